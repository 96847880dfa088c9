"""How engine_speed.py talks to its sides: JSON lines, a case in, and what was measured out.

Needs the standard library alone: sides run in environments of their own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any


class Channel:
    """A side's end. What libraries print goes to stderr from now on."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def ready(self) -> None:
        """The side has loaded and can be asked."""
        self.send({})

    def receive(self) -> dict[str, Any] | None:
        """The next case: `prompts` of token ids, each to be followed by `new_tokens`; None at the end."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None

    def send(self, answer: dict[str, Any]) -> None:
        """The answer: `times_s`, for each prompt when each of its tokens came, since the case was begun."""
        self._answers.write(json.dumps(answer) + "\n")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (case := self.receive()) is not None:
            yield case
