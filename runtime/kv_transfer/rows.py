"""Memory of a KV cache in numpy: made once for a pool, as torch's views cost more than small slices do.

An item is a token's heads of a layer's keys or values: opaque bytes, copied at once whatever they mean. The
compiled copy gives Python's lock up once for all runs. Where that is missing, numpy keeps it while it copies
fewer than 500 items: giving it up for each block of tokens, and waiting for it again, costs far more than a
copy where several threads move KV caches. So keep pieces small, and give it up between them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from runtime import native
from runtime.kv_cache.layout import Part
from runtime.kv_cache.pool import PagedCache
from runtime.kv_transfer.cells import Piece
from runtime.kv_transfer.runs import Runs
from runtime.protocol.between_workers import KvSlice

_PAST_CACHES_FROM = 256 * 1024
"""Bytes: less than that, just arrived, is soon read and may as well stay in the caches."""


class Rows:
    """Keys and values of all slots of a pool in CPU memory. Layers and heads are global numbers.

    Parameters
    ----------
    memory : [bytes], uint8, of [layers, 2, slots, heads, bytes of a head]
    """

    def __init__(self, memory: np.ndarray, part: Part, slots: int, head_bytes: int) -> None:
        self._memory, self._part, self._slots, self._head_bytes = memory, part, slots, head_bytes
        self._row_bytes = (part.end_head - part.first_head) * head_bytes
        self._by_heads = dict[tuple[int, int], np.ndarray]()

    def of(self, header: KvSlice, piece: Piece) -> np.ndarray:
        """A piece's layers and sides, one after the other, and its heads: [planes, slots], a view."""
        heads = header.first_head, header.end_head
        if heads not in self._by_heads:
            self._by_heads[heads] = self._view(*heads)
        first, end = (
            2 * (piece.first_layer - self._part.first_layer) + piece.first_side,
            2 * (piece.end_layer - 1 - self._part.first_layer) + piece.end_side,
        )
        return self._by_heads[heads][first:end]

    def stretches(self, header: KvSlice, runs: Runs) -> list[memoryview]:
        """The bytes of a slice of all heads where they lie, side after side, run after run."""
        flat, row_bytes, offset = self._memory.data, self._row_bytes, self._part.first_layer
        sides = range(2 * (header.first_layer - offset), 2 * (header.end_layer - offset))
        starts = [side * self._slots * row_bytes for side in sides]
        places = [(first * row_bytes, end * row_bytes) for first, end in runs.array.tolist()]
        return [flat[start + first : start + end] for start in starts for first, end in places]

    def _view(self, first_head: int, end_head: int) -> np.ndarray:
        planes = 2 * (self._part.end_layer - self._part.first_layer)
        return np.ndarray(
            (planes, self._slots),
            _item((end_head - first_head) * self._head_bytes),
            self._memory.data,
            (first_head - self._part.first_head) * self._head_bytes,
            (self._slots * self._row_bytes, self._row_bytes),
        )


def pool_rows(cache: PagedCache) -> Rows:
    """A worker's pool, which is in CPU memory."""
    memory = cache.pool.view(-1).view(torch.uint8).numpy()
    return Rows(memory, cache.shape.part, cache.pool.shape[2], cache.shape.bytes_per_token_cell // 2)


def packed_rows(memory: np.ndarray, piece: Piece) -> np.ndarray:
    """The bytes of a piece by themselves: [planes, tokens]. It has all its layers' sides, or one side."""
    planes = (piece.end_layer - piece.first_layer) * (piece.end_side - piece.first_side)
    tokens = piece.end_token - piece.first_token
    return np.ndarray((planes, tokens), _item(piece.bytes // (planes * tokens)), memory.data)


def copy_tokens(
    into: np.ndarray, into_runs: Runs, source: np.ndarray, source_runs: Runs, to_stay: bool = True
) -> None:
    """Copy the tokens of source_runs to those of into_runs, as many, in all planes.

    Parameters
    ----------
    to_stay : it goes where it will be used later, not through a buffer
    """
    if native.copies():
        past_caches = to_stay and len(into) * into_runs.tokens * into.itemsize >= _PAST_CACHES_FROM
        native.copy_tokens(into, into_runs.array, source, source_runs.array, past_caches)
        return
    for to, at, count in _aligned(into_runs.array.tolist(), source_runs.array.tolist()):
        into[:, to : to + count] = source[:, at : at + count]


def _item(size_bytes: int) -> np.dtype:
    return np.dtype((np.void, size_bytes))


def _aligned(first: list[list[int]], second: list[list[int]]) -> Iterator[tuple[int, int, int]]:
    """Pairs of places and a count, such that each stretch is one run on both sides."""
    others = iter(second)
    at = end = 0
    for to, to_end in first:
        while to < to_end:
            if at == end:
                at, end = next(others)
            count = min(to_end - to, end - at)
            yield to, at, count
            to, at = to + count, at + count
