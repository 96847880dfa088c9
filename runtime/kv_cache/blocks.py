"""Tracks which blocks of a replica's KV cache are free, shared, or kept for reuse; the driver's bookkeeping.

Full blocks are identified by a digest of all tokens up to their end, so that a prompt finds the blocks that
an earlier request with the same prefix computed (W. Kwon and others, Efficient Memory Management for Large
Language Model Serving with PagedAttention, SOSP 2023). A block is free when no request holds it; a free block
keeps its content and can be found until another request takes it; the least recently used block is taken
first.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

Digest = bytes
_DIGEST_BYTES = 16


def prefix_digests(tokens: Sequence[int], block_tokens: int, known: Sequence[Digest] = ()) -> list[Digest]:
    """The digest of each full block of tokens; it covers all tokens up to the end of the block.

    Parameters
    ----------
    known : digests of the first blocks, if computed before
    """
    digests = list(known)
    for first in range(len(digests) * block_tokens, len(tokens) - block_tokens + 1, block_tokens):
        block = array("q", tokens[first : first + block_tokens]).tobytes()
        parent = digests[-1] if digests else b""
        digests.append(hashlib.blake2b(parent + block, digest_size=_DIGEST_BYTES).digest())
    return digests


class BlockPool:
    """Hands out blocks [0, blocks) of a replica, with reference counts; thread-safe.

    Who takes or releases blocks says for which request (`owner`): pools of other kinds count by request.

    Parameters
    ----------
    reuse : keep the content of freed blocks for prompts with the same prefix
    """

    def __init__(self, blocks: int, block_tokens: int, reuse: bool = True) -> None:
        self.blocks, self.block_tokens, self.reuse = blocks, block_tokens, reuse
        self._blank = list(range(blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * blocks
        self._digest: dict[int, Digest] = {}
        self._block: dict[Digest, int] = {}
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        """Number of blocks that no request holds."""
        with self._lock:
            return len(self._blank) + len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that this many tokens need."""
        return -(-tokens // self.block_tokens)

    def can_fit(self, tokens: int) -> bool:
        """Whether the pool is large enough for a request of so many tokens."""
        return self.blocks_for(tokens) <= self.blocks

    def fits(self, tokens: int) -> bool:
        """Whether a request of so many tokens has room when nothing else is here now."""
        return self.can_fit(tokens)

    def helps(self, victim: str, owner: str) -> bool:
        """Whether a request finds a further block if another one releases its own."""
        return True

    def allocate(self, count: int, spare: int = 0, owner: str = "") -> list[int] | None:
        """Take `count` blocks; takes nothing and returns None unless `spare` more are free."""
        with self._lock:
            if not self._has(count + spare):
                return None
            return [self._take() for _ in range(count)]

    def begin(
        self, tokens: int, digests: Sequence[Digest], spare: int = 0, owner: str = ""
    ) -> tuple[list[int], int] | None:
        """Take blocks for a request's first `tokens` tokens: shared ones that hold them already, then new.

        Parameters
        ----------
        digests : digests of the blocks that may be shared
        spare : number of blocks that must stay free

        Returns
        -------
        the blocks, and how many of the tokens they hold already; None (and nothing taken) without room
        """
        with self._lock:
            found = self._find(digests)
            fresh = self.blocks_for(tokens) - len(found)
            idle = sum(self._holders[block] == 0 for block in found)
            if not self._has(fresh + idle + spare):
                return None
            for block in found:
                self._hold(block)
            return found + [self._take() for _ in range(fresh)], len(found) * self.block_tokens

    def reserve(
        self, tokens: int, digests: Sequence[Digest], spare: int = 0, owner: str = ""
    ) -> tuple[list[int], int] | None:
        """As `begin`, for a request all of whose tokens have been computed elsewhere."""
        return self.begin(tokens, digests, spare, owner)

    def begin_with(self, digests: Sequence[Digest], fresh: int, spare: int = 0) -> list[int] | None:
        """Take the blocks of these digests, all of which are known, and so many new ones; takes nothing and
        returns None unless `spare` more are free."""
        with self._lock:
            found = [self._block[digest] for digest in digests]
            if not self._has(fresh + sum(self._holders[block] == 0 for block in found) + spare):
                return None
            for block in found:
                self._hold(block)
            return found + [self._take() for _ in range(fresh)]

    def known(self, digest: Digest) -> bool:
        """Whether a block with this digest can be shared."""
        with self._lock:
            return digest in self._block

    def extend(self, owner: str, end: int) -> int:
        """Make sure that a request has blocks for its tokens before `end`; returns up to which token it
        has."""
        return end

    def windowed_table(self, owner: str) -> tuple[int, ...]:
        """The blocks of a request in layers with a window, where these have others (`windows.py`)."""
        return ()

    def unsent(self, owner: str) -> tuple[int, ...]:
        """Further blocks that the executors are to learn of with a request's next step, beside those that
        `begin` and `allocate` returned."""
        return ()

    def passed(self, owner: str, end: int, finished: bool) -> None:
        """Note that no step will read what a request's tokens before `end` alone attend to. `finished`: all
        its tokens so far have run."""

    def publish(self, block: int, digest: Digest, owner: str = "", number: int = 0) -> None:
        """Make a block findable by its digest, the `number`-th of a request. Its content must be written
        before any later step runs."""
        self._publish(block, digest)

    def _publish(self, block: int, digest: Digest) -> None:
        with self._lock:
            if self.reuse and digest not in self._block and block not in self._digest:
                self._digest[block], self._block[digest] = digest, block

    def release(self, blocks: Iterable[int], owner: str = "") -> None:
        """Release the blocks of a request.

        Its last blocks are reused before its first ones, which other prompts are more likely to share.
        """
        with self._lock:
            for block in reversed(list(blocks)):
                self._holders[block] -= 1
                if self._holders[block] == 0:
                    if block in self._digest:
                        self._idle[block] = None
                    else:
                        self._blank.append(block)

    def _has(self, count: int) -> bool:
        return count <= len(self._blank) + len(self._idle)

    def _find(self, digests: Sequence[Digest]) -> list[int]:
        found = []
        for digest in digests:
            if (block := self._block.get(digest)) is None:
                break
            found.append(block)
        return found

    def _hold(self, block: int) -> None:
        if self._holders[block] == 0:
            del self._idle[block]
        self._holders[block] += 1

    def _take(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            del self._block[self._digest.pop(block)]
        self._holders[block] = 1
        return block
