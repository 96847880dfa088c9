"""The account of layers with a window, which keep the last tokens of a request alone: what each request
takes of their KV cache. Front end and simulator count by it what workers allocate (`kv_cache/windows.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from cost_model.lengths import BLOCK_TOKENS, most_blocks


@dataclass(frozen=True, slots=True)
class WindowedRoom:
    """What a replica's layers with a window hold.

    Parameters
    ----------
    tokens : of all requests together, in whole blocks
    window : tokens that a token attends to, itself included
    running : tokens of prompts that may be in steps under way at the same time
    """

    tokens: int
    window: int
    running: int
    block_tokens: int = BLOCK_TOKENS

    @property
    def most(self) -> int:
        """The most that a request takes whose tokens have been computed."""
        return most_blocks(self.window, self.block_tokens) * self.block_tokens

    @property
    def most_computing(self) -> int:
        """The most that a prompt takes while it is computed."""
        return most_blocks(self.window, self.block_tokens, self.running) * self.block_tokens

    @property
    def beside_prompts(self) -> int:
        """What remains while a long prompt takes what its steps need besides."""
        return max(self.most, self.tokens - max(0, self.most_computing - self.most))

    def held(self, tokens: int) -> int:
        """What a request takes, so many tokens of which have been computed."""
        return min(self._whole(tokens), self.most)

    def computing(self, tokens: int) -> int:
        """What a prompt of so many tokens takes until it is computed."""
        return min(self._whole(tokens), self.most_computing)

    def _whole(self, tokens: int) -> int:
        """So many tokens in whole blocks."""
        return -(-tokens // self.block_tokens) * self.block_tokens


@dataclass(slots=True)
class WindowedAccount:
    """How much of a WindowedRoom the requests of a replica hold, each of which is counted with the tokens by
    which it is expected to grow here.

    Parameters
    ----------
    kept : tokens that stay free for prompts for other replicas in a mixed replica, beside what a prompt takes
        while it is computed; None: nothing is kept (in other roles)
    """

    room: WindowedRoom
    kept: int | None = None
    _growth: dict[Any, int] = field(default_factory=dict)
    _held: dict[Any, int] = field(default_factory=dict)
    _taken: int = 0
    _sent: int = 0

    def hold(self, request_id: Any, tokens: int, growth: int | None) -> None:
        """Count a request that grows by `growth` tokens; None: it continues on another replica."""
        self._growth[request_id] = -1 if growth is None else growth
        self._held[request_id] = taken = self.room.held(tokens + (growth or 0))
        self._taken += taken
        self._sent += taken if growth is None else 0

    def grow(self, request_id: Any, tokens: int) -> None:
        """A request that decodes here has so many tokens by now."""
        taken = self.room.held(tokens + max(0, self._growth[request_id]))
        self._taken += taken - self._held[request_id]
        self._held[request_id] = taken

    def release(self, request_id: Any) -> None:
        """Free what a request holds; nothing if it holds nothing."""
        taken = self._held.pop(request_id, 0)
        self._taken -= taken
        if self._growth.pop(request_id, 0) < 0:
            self._sent -= taken

    def has_room(
        self,
        tokens: int,
        growth: int | None,
        share: float = 1.0,
        uncounted: Callable[[], Iterable[tuple[Any, int]]] = tuple,
    ) -> bool:
        """Whether a further request may be sent now.

        Parameters
        ----------
        growth : as of `hold`
        share : of the room, what all requests together may take
        uncounted : returns requests and the tokens that they have, where `grow` was not told; asked only if
            that may decide
        """
        taken, limit = self._taken + self.room.held(tokens + (growth or 0)), share * self.room.tokens
        if self.kept is not None:
            limit = share * self.room.beside_prompts
            if growth is not None:
                taken, limit = taken - self._sent, limit - self.kept
        if taken > limit:
            return False
        if (len(self._held) + 1) * self.room.most <= limit:
            return True
        for request_id, has in uncounted():
            taken += self.room.held(has + max(0, self._growth[request_id])) - self._held[request_id]
        return taken <= limit
