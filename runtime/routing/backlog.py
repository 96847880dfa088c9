"""The requests of a replica that have not ended, as schedulers count them: their work and their tokens."""

from __future__ import annotations

import math
from collections.abc import Hashable

SURE = 1e-6
"""Once the sum is less than this share of what it has been, rounding could show, and it is added up anew."""


class Backlog:
    """What was added for each request, until it ends.

    Attributes
    ----------
    work : sum over the requests; its unit is the scheduler's
    tokens : KV cache tokens that they are expected to hold at their ends
    """

    __slots__ = ("_most", "_of", "tokens", "work")

    def __init__(self) -> None:
        self.work = self.tokens = self._most = 0.0
        self._of: dict[Hashable, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def add(self, request_id: Hashable, work: float, tokens: float) -> None:
        """A request begins."""
        self._of[request_id] = work, tokens
        self.work += work
        self.tokens += tokens
        self._most = max(self._most, self.work)

    def end(self, request_id: Hashable) -> None:
        """A request has ended, or goes on elsewhere; nothing if it was not added."""
        work, tokens = self._of.pop(request_id, (0.0, 0.0))
        self.work -= work
        self.tokens -= tokens
        if not self._of or self.work < SURE * self._most:
            self.work = self._most = math.fsum(work for work, _ in self._of.values())
            self.tokens = math.fsum(tokens for _, tokens in self._of.values())
