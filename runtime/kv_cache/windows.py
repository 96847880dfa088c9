"""KV caches of layers that attend to a window of tokens: such layers have blocks of their own, and give back
those that no later token attends to.

A replica then has two pools of blocks: one for the layers that attend to all tokens, one for those with the
window. In each, a request's n-th block has the same tokens; of the second, only the last ones are kept. Both
groups of layers are numbered from 0 in the order of the model, so that each is a cache like any other.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cost_model.lengths import first_kept, most_blocks
from runtime.kv_cache.blocks import BlockPool, Digest
from runtime.kv_cache.layout import Stages
from runtime.kv_cache.pages import Pages
from runtime.protocol.message import StageShape
from runtime.protocol.to_workers import Configure


def numbered(stages: Stages, layers: Sequence[int]) -> Stages:
    """The stages with these layers alone, numbered from 0.

    Parameters
    ----------
    layers : numbers in the model, rising
    """
    return tuple(
        StageShape(
            workers=stage.workers,
            first_layer=bisect_left(layers, stage.first_layer),
            end_layer=bisect_left(layers, stage.end_layer),
        )
        for stage in stages
    )


@dataclass(slots=True)
class _Table:
    """The blocks of a request in the windowed layers.

    Attributes
    ----------
    blocks : by number; the first `kept_from` are not this request's (any more)
    spare : kept for tokens of a prompt that are still to run
    total : blocks that all its tokens span
    sent : blocks that the executors know
    """

    blocks: list[int]
    kept_from: int
    spare: list[int]
    total: int
    sent: int = field(default=0)


class WindowedPool(BlockPool):
    """The blocks of a replica, some of whose layers have a window. It counts those of the other layers, as
    any pool; those of the windowed layers it keeps by request.

    A prompt begins when it has all blocks of the other layers, and as many of the windowed ones as it ever
    needs at the same time. Beginnings are shared where both pools still have what the next token attends to.

    Parameters
    ----------
    blocks, windowed_blocks : of the layers that attend to all tokens, and of those with the window
    window : tokens that a token attends to, itself included
    running : tokens of a prompt that may be in steps under way at the same time
    """

    def __init__(
        self,
        blocks: int,
        windowed_blocks: int,
        block_tokens: int,
        window: int,
        running: int,
        reuse: bool = True,
    ) -> None:
        super().__init__(blocks, block_tokens, reuse)
        self._windowed = BlockPool(windowed_blocks, block_tokens, reuse)
        self._window = window
        self.expect(running)
        self._tables: dict[str, _Table] = {}
        self._both = threading.RLock()

    def expect(self, running: int) -> None:
        """Begin further prompts with room for so many tokens in steps under way."""
        self._most = most_blocks(self._window, self.block_tokens, running)
        self._most_decoding = most_blocks(self._window, self.block_tokens)

    @property
    def free(self) -> int:
        """Blocks that no request holds, of the pool that has the smaller share of them."""
        with self._both:
            whole = super().free
            return min(whole, self.blocks * self._windowed.free // max(1, self._windowed.blocks))

    def windowed_table(self, owner: str) -> tuple[int, ...]:
        """The blocks of a request in the windowed layers; those that it does not hold are 0."""
        return tuple(self._tables[owner].blocks)

    def can_fit(self, tokens: int) -> bool:
        return super().can_fit(tokens) and self._needed(self.blocks_for(tokens)) <= self._windowed.blocks

    def allocate(self, count: int, spare: int = 0, owner: str = "") -> list[int] | None:
        with self._both:
            windowed = self._windowed.allocate(count, spare)
            if windowed is None:
                return None
            whole = super().allocate(count, spare)
            if whole is None:
                self._windowed.release(windowed)
                return None
            table = self._tables[owner]
            table.blocks += windowed
            table.total += count
            return whole

    def begin(
        self, tokens: int, digests: Sequence[Digest], spare: int = 0, owner: str = ""
    ) -> tuple[list[int], int] | None:
        with self._both:
            shared = self._shared(digests, None)
            kept_from = self._kept_from(shared * self.block_tokens)
            fresh = self._needed(self.blocks_for(tokens) - shared)
            return self._begin(tokens, digests[:shared], kept_from, fresh, spare, owner)

    def reserve(
        self, tokens: int, digests: Sequence[Digest], spare: int = 0, owner: str = ""
    ) -> tuple[list[int], int] | None:
        with self._both:
            shared, kept_from = self._shared(digests, tokens), self._kept_from(tokens)
            fresh = self.blocks_for(tokens) - max(shared, kept_from)
            begun = self._begin(tokens, digests[:shared], kept_from, fresh, spare, owner)
            if begun is not None:
                self.extend(owner, tokens)
            return begun

    def _begin(
        self, tokens: int, digests: Sequence[Digest], kept_from: int, fresh: int, spare: int, owner: str
    ) -> tuple[list[int], int] | None:
        """Take blocks in both pools, those of the digests shared, or none."""
        found = digests[kept_from:]
        windowed = self._windowed.begin_with(found, fresh, min(spare, self._growing()))
        if windowed is None:
            return None
        begun = super().begin(tokens, digests, spare, owner)
        if begun is None:
            self._windowed.release(windowed)
            return None
        own = windowed[: len(found)]
        self._tables[owner] = _Table(
            [0] * kept_from + own, kept_from, windowed[len(found) :], self.blocks_for(tokens)
        )
        return begun

    def extend(self, owner: str, end: int) -> int:
        with self._both:
            table = self._tables[owner]
            while len(table.blocks) * self.block_tokens < end:
                more = [table.spare.pop()] if table.spare else self._windowed.allocate(1)
                if more is None:
                    return len(table.blocks) * self.block_tokens
                table.blocks += more
            return end

    def unsent(self, owner: str) -> tuple[int, ...]:
        table = self._tables[owner]
        fresh, table.sent = tuple(table.blocks[table.sent :]), len(table.blocks)
        return fresh

    def passed(self, owner: str, end: int, finished: bool) -> None:
        with self._both:
            if (table := self._tables.get(owner)) is None:
                return
            kept_from = max(table.kept_from, self._kept_from(end))
            self._windowed.release(table.blocks[table.kept_from : kept_from])
            table.kept_from = kept_from
            missing = 0 if finished else self._needed(table.total - len(table.blocks))
            while len(table.spare) < missing and (more := self._windowed.allocate(1)):
                table.spare += more
            self._windowed.release(table.spare[missing:])
            del table.spare[missing:]

    def publish(self, block: int, digest: Digest, owner: str = "", number: int = 0) -> None:
        with self._both:
            self._publish(block, digest)
            table = self._tables.get(owner)
            if table is not None and table.kept_from <= number < len(table.blocks):
                self._windowed.publish(table.blocks[number], digest)

    def release(self, blocks: Iterable[int], owner: str = "") -> None:
        with self._both:
            super().release(blocks, owner)
            if table := self._tables.pop(owner, None):
                self._windowed.release(table.spare)
                self._windowed.release(table.blocks[table.kept_from :])

    def _growing(self) -> int:
        """Requests that may take more windowed blocks than they hold: once these span the window, a request
        gives one back before it takes the next."""
        return sum(
            len(table.blocks) - table.kept_from + len(table.spare) < self._most_decoding
            for table in self._tables.values()
        )

    def _needed(self, blocks: int) -> int:
        """Of so many blocks of a prompt, those that are needed at the same time."""
        return min(blocks, self._most)

    def _kept_from(self, token: int) -> int:
        """The first block that is read by a token at this position or after it."""
        return first_kept(token, self._window, self.block_tokens) // self.block_tokens

    def _shared(self, digests: Sequence[Digest], reader: int | None) -> int:
        """How many leading blocks a request can share: the windowed layers have those of them that the token
        `reader` reads (None: the first one that is not shared)."""
        with self._lock:
            run = len(self._find(digests))
        shared, missing = 0, -1
        for count in range(1, run + 1):
            if not self._windowed.known(digests[count - 1]):
                missing = count - 1
            first = self._kept_from(count * self.block_tokens if reader is None else reader)
            if missing < first:
                shared = count
        return shared


def make_pool(config: Configure, cache: Pages, reuse: bool) -> BlockPool:
    """The blocks of a replica's cache; layers with a window have others.

    Parameters
    ----------
    reuse : see BlockPool
    """
    blocks, size, windowed = cache.blocks, cache.block_tokens, config.windowed
    if windowed is None:
        return BlockPool(blocks, size, reuse)
    apart = windowed.kv_budget_tokens // size
    return WindowedPool(blocks, apart, size, windowed.window, config.tokens_running, reuse)
