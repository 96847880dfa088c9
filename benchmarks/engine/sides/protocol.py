"""How engine_speed.py talks to its sides: JSON lines, with a case in and its measurements out.

Uses only the standard library, because sides run in environments of their own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any


class Channel:
    """A side's end of the channel. It redirects stdout to stderr, so that library output does not disturb
    it."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def ready(self) -> None:
        """Say that this side has loaded and can be asked."""
        self.send({})

    def receive(self) -> dict[str, Any] | None:
        """The next case: `prompts` of token ids, and how many `new_tokens` each needs; None at the end."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None

    def send(self, answer: dict[str, Any]) -> None:
        """Send the answer: `times_s` has, for each prompt, the seconds from the start of the case to each
        token."""
        self._answers.write(json.dumps(answer) + "\n")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (case := self.receive()) is not None:
            yield case
