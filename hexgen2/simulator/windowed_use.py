"""What the requests on a replica take of its layers with a window, beside what they take of the others."""

from __future__ import annotations

import math
from typing import Any

from hexgen2.simulator.decode_batch import DecodeBatch
from runtime.routing.kv_budget import KvBudget


class WindowedUse:
    """The twin of a worker's blocks for layers with a window, in tokens. Where such layers have no room of
    their own, requests take none of it.

    Attributes
    ----------
    free : tokens that no request takes
    most : the most that a request takes whose tokens have been computed
    """

    def __init__(self, budget: KvBudget) -> None:
        self._room = room = budget.windowed.room if budget.windowed is not None else None
        self.tokens = self.free = float(room.tokens) if room else math.inf
        self.most = room.window + room.block_tokens if room else 0
        self._held: dict[Any, int] = {}

    def __bool__(self) -> bool:
        return self._room is not None

    def kept(self, tokens: int) -> int:
        """What a request takes, so many tokens of which have been computed."""
        return min(tokens, self.most)

    def computing(self, tokens: int) -> int:
        """What a prompt of so many tokens takes until it is computed."""
        return self._room.computing(tokens) if self._room else 0

    def of_batch(self, batch: DecodeBatch) -> int:
        """What the requests take that decode in a batch."""
        return batch.limited + batch.count * self._room.block_tokens if self._room else 0

    def hold(self, request: Any, kept: int) -> None:
        """A request takes so much from now on."""
        self.free += self._held.get(request, 0) - kept
        self._held[request] = kept

    def release(self, request: Any) -> None:
        """A request takes nothing any more."""
        self.free += self._held.pop(request, 0)
