"""Cells of a KV cache on the move: which rows of a pool they are, and how they are copied.

Every view here is [layers, sides, slots, heads, head_dim], as the pool is; a side is keys or values. A slice
on its way has its bytes in that order, with tokens for slots. Each end cuts them as it likes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from runtime.engine.cache import PagedCache
from runtime.messages import KvSlice

PIECE_BYTES = 1024 * 1024  # fits a core's own cache: a staged copy then costs little
_VIEW_BYTES = 8 * 1024  # copying less is faster than naming it

LIMIT_BYTES = 64 * 1024 * 1024  # no slice is as large

Run = tuple[int, int]


class Runs:
    """Where the tokens of a request are: runs of slots [first, end), in the order of the tokens."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self.runs = tuple((int(first), int(end)) for first, end in runs)
        self._ends = list(accumulate(end - first for first, end in self.runs))

    @property
    def tokens(self) -> int:
        """How many tokens."""
        return self._ends[-1] if self._ends else 0

    def between(self, first: int, end: int) -> Runs:
        """Runs of the tokens [first, end), counted from the first token here."""
        found, index = list[Run](), bisect_right(self._ends, first)
        while first < end:
            run_end = self.runs[index][1]
            slot = run_end - (self._ends[index] - first)
            taken = min(run_end - slot, end - first)
            found.append((slot, slot + taken))
            first += taken
            index += 1
        return Runs(found)

    def slots(self) -> np.ndarray:
        """One slot per token, int64."""
        return np.concatenate([np.arange(*run) for run in self.runs] or [np.empty(0, np.int64)])


@dataclass(frozen=True, slots=True)
class Piece:
    """Layers [first, end) x sides [first, end) x tokens [first, end) of a slice, all its heads."""

    first_layer: int
    end_layer: int
    first_side: int
    end_side: int
    first_token: int
    end_token: int
    bytes: int


def pieces(header: KvSlice, limit_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """Cut a slice in the order of its bytes: several layers at once where they are small, else some tokens of
    one layer's keys or values."""
    layers, tokens = header.end_layer - header.first_layer, header.end_token - header.first_token
    row_bytes = header.payload_bytes // (2 * layers * tokens)
    layer_bytes = 2 * tokens * row_bytes
    if layer_bytes <= limit_bytes:
        step = limit_bytes // layer_bytes
        for layer in range(header.first_layer, header.end_layer, step):
            end = min(layer + step, header.end_layer)
            yield Piece(layer, end, 0, 2, header.first_token, header.end_token, (end - layer) * layer_bytes)
        return
    step = max(1, limit_bytes // row_bytes)
    for layer in range(header.first_layer, header.end_layer):
        for side in (0, 1):
            for token in range(header.first_token, header.end_token, step):
                end = min(token + step, header.end_token)
                yield Piece(layer, layer + 1, side, side + 1, token, end, (end - token) * row_bytes)


def whole(header: KvSlice) -> Piece:
    """All of a slice as one piece."""
    return next(pieces(header, header.payload_bytes))


def word(head_bytes: int) -> np.dtype:
    """The largest unit in which heads of so many bytes can be copied."""
    return np.dtype(np.int64 if head_bytes % 8 == 0 else np.uint8)


def as_words(view: torch.Tensor) -> np.ndarray:
    """A view in CPU memory in words, whatever its values mean: [layers, 2, slots, heads, words of a head]."""
    unit = word(view.shape[-1] * view.itemsize)
    return view.view(torch.int64 if unit.itemsize == 8 else torch.uint8).numpy()


def copy_tokens(into: np.ndarray, into_runs: Runs, source: np.ndarray, source_runs: Runs) -> None:
    """Copy as many tokens as both runs have; all other dimensions of the views are equal."""
    for to, at, count in _aligned(into_runs.runs, source_runs.runs):
        into[:, :, to : to + count] = source[:, :, at : at + count]


def slice_bytes(header: KvSlice, cell_bytes: int) -> int:
    """The payload that a header's ranges make, 0 if one is empty; a cell is one layer, head and token."""
    layers, heads = header.end_layer - header.first_layer, header.end_head - header.first_head
    tokens = header.end_token - header.first_token
    return layers * heads * tokens * cell_bytes if min(layers, heads, tokens) > 0 else 0


class Staging:
    """A contiguous buffer, through which pieces leave a pool or come into it.

    If the pool is a GPU's, copies run on a stream of their own, and each call returns when they are done; a
    buffer in host memory then has locked pages.

    Parameters
    ----------
    device : where the buffer is; host memory without
    """

    def __init__(
        self, cache: PagedCache, size_bytes: int = PIECE_BYTES, device: torch.device | None = None
    ) -> None:
        self._cache, self._device = cache, device
        self._is_gpu = cache.pool.device.type == "cuda"
        self._stream = torch.cuda.Stream(cache.pool.device) if self._is_gpu else None
        self._tensor = self._allocate(size_bytes)

    def in_place(self, header: KvSlice, runs: Runs) -> list[memoryview]:
        """The bytes of a slice where they lie in the pool's `runs`, if that is in large stretches of CPU
        memory; else nothing: take `load` or `store`."""
        heads = header.end_head - header.first_head
        if self._stream is not None or heads != self._cache.shape.heads:
            return []
        sides = 2 * (header.end_layer - header.first_layer)
        if header.payload_bytes < _VIEW_BYTES * sides * len(runs.runs):
            return []
        layers = as_words(pool_view(self._cache, header, whole(header)))
        rows = layers.reshape(sides, layers.shape[2], -1)
        return [side[first:end].data.cast("B") for side in rows for first, end in runs.runs]

    def load(self, header: KvSlice, piece: Piece, runs: Runs) -> torch.Tensor:
        """The bytes of a piece, copied from the pool's `runs`."""
        view, staged = self._views(header, piece)
        if self._stream is None:
            copy_tokens(as_words(staged), _whole(piece), as_words(view), runs)
        else:
            with torch.cuda.stream(self._stream):
                staged.copy_(view.index_select(2, self._index(runs)), non_blocking=True)
            self._stream.synchronize()
        return self.room(piece)

    def store(self, header: KvSlice, piece: Piece, runs: Runs) -> None:
        """Put the staged bytes of a piece into the pool's `runs`."""
        view, staged = self._views(header, piece)
        if self._stream is None:
            copy_tokens(as_words(view), runs, as_words(staged), _whole(piece))
        else:
            with torch.cuda.stream(self._stream):
                view.index_copy_(2, self._index(runs), staged.to(view.device, non_blocking=True))
            self._stream.synchronize()

    def room(self, piece: Piece) -> torch.Tensor:
        """Where the bytes of a piece are, after `load` or before `store`: [bytes], uint8."""
        if piece.bytes > len(self._tensor):
            self._tensor = self._allocate(piece.bytes)
        return self._tensor[: piece.bytes]

    def _allocate(self, size_bytes: int) -> torch.Tensor:
        is_pinned = self._is_gpu and self._device is None
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device, pin_memory=is_pinned)

    def _views(self, header: KvSlice, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
        view = pool_view(self._cache, header, piece)
        size = (*view.shape[:2], piece.end_token - piece.first_token, *view.shape[3:])
        return view, self.room(piece).view(view.dtype).view(size)

    def _index(self, runs: Runs) -> torch.Tensor:
        return torch.from_numpy(runs.slots()).to(self._cache.pool.device)


def pool_view(cache: PagedCache, header: KvSlice, piece: Piece) -> torch.Tensor:
    """A piece's layers, sides and heads in a worker's pool, all slots."""
    part = cache.shape.part
    layers = cache.pool[piece.first_layer - part.first_layer : piece.end_layer - part.first_layer]
    sides = layers[:, piece.first_side : piece.end_side]
    return sides[:, :, :, header.first_head - part.first_head : header.end_head - part.first_head]


def _whole(piece: Piece) -> Runs:
    return Runs([(0, piece.end_token - piece.first_token)])


def _aligned(first: Sequence[Run], second: Sequence[Run]) -> Iterator[tuple[int, int, int]]:
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
