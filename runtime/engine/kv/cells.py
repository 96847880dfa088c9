"""Cells of a KV cache on the move: which rows of a pool they are, and how they are copied.

Every view here is [layers, 2, slots, heads, head_dim], as the pool is. Bytes on the way are pieces of at most
some size, each contiguous as (layer, key/value, token, head, head_dim); both sides cut a slice the same way.
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

PIECE_BYTES = 256 * 1024  # fits a core's own cache: a staged copy then costs little

_LIMIT_BYTES = 16 * 1024 * 1024  # one token of one layer is never as large

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
    """Layers [first, end) x tokens [first, end) of a slice, all its heads; `bytes` in all."""

    first_layer: int
    end_layer: int
    first_token: int
    end_token: int
    bytes: int


def pieces(header: KvSlice, limit_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """Cut a slice: several layers at once where they are small, else some tokens of one layer."""
    layers, tokens = header.end_layer - header.first_layer, header.end_token - header.first_token
    token_bytes = header.payload_bytes // (layers * tokens)
    layer_step = max(1, limit_bytes // (token_bytes * tokens))
    token_step = max(1, min(tokens, limit_bytes // token_bytes))
    for layer in range(header.first_layer, header.end_layer, layer_step):
        end_layer = min(layer + layer_step, header.end_layer)
        for token in range(header.first_token, header.end_token, token_step):
            end = min(token + token_step, header.end_token)
            yield Piece(layer, end_layer, token, end, (end_layer - layer) * (end - token) * token_bytes)


def as_bytes(view: torch.Tensor) -> np.ndarray:
    """A view in CPU memory as bytes: [layers, 2, slots, heads, bytes of a head]."""
    return view.view(torch.uint8).numpy()


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
    """A contiguous buffer in host memory, through which pieces leave a pool or come into it.

    Pages are locked if the pool is a GPU's; its copies then run on a stream of their own, and each call
    returns when they are done.
    """

    def __init__(self, cache: PagedCache, size_bytes: int = PIECE_BYTES) -> None:
        self._cache = cache
        self._is_gpu = cache.pool.device.type == "cuda"
        self._stream = torch.cuda.Stream(cache.pool.device) if self._is_gpu else None
        self.resize(size_bytes)

    def resize(self, size_bytes: int) -> None:
        """Make room for a piece of this size."""
        self.tensor = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._is_gpu)
        self.buffer = self.tensor.numpy().data

    def load(self, header: KvSlice, piece: Piece, runs: Runs) -> memoryview:
        """The bytes of a piece, from the pool's `runs`."""
        view, staged = self._views(header, piece)
        if self._stream is None:
            copy_tokens(as_bytes(staged), _whole(piece), as_bytes(view), runs)
        else:
            with torch.cuda.stream(self._stream):
                staged.copy_(view.index_select(2, self._index(runs)), non_blocking=True)
            self._stream.synchronize()
        return self.buffer[: piece.bytes]

    def store(self, header: KvSlice, piece: Piece, runs: Runs) -> None:
        """Put the staged bytes of a piece into the pool's `runs`."""
        view, staged = self._views(header, piece)
        if self._stream is None:
            copy_tokens(as_bytes(view), runs, as_bytes(staged), _whole(piece))
        else:
            with torch.cuda.stream(self._stream):
                view.index_copy_(2, self._index(runs), staged.to(view.device, non_blocking=True))
            self._stream.synchronize()

    def room(self, piece: Piece) -> memoryview:
        """Where the bytes of a piece are to be put before `store`.

        Raises
        ------
        ConnectionError : no honest piece is so large
        """
        if piece.bytes > _LIMIT_BYTES:
            raise ConnectionError(f"a piece of {piece.bytes} bytes")
        if piece.bytes > len(self.buffer):
            self.resize(piece.bytes)
        return self.buffer[: piece.bytes]

    def _views(self, header: KvSlice, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
        view = pool_view(self._cache, header, piece)
        size = (*view.shape[:2], piece.end_token - piece.first_token, *view.shape[3:])
        self.room(piece)
        return view, self.tensor[: piece.bytes].view(view.dtype).view(size)

    def _index(self, runs: Runs) -> torch.Tensor:
        return torch.from_numpy(runs.slots()).to(self._cache.pool.device)


def pool_view(cache: PagedCache, header: KvSlice, piece: Piece) -> torch.Tensor:
    """A piece's layers and heads in a worker's pool, all slots."""
    part = cache.shape.part
    layers = cache.pool[piece.first_layer - part.first_layer : piece.end_layer - part.first_layer]
    return layers[:, :, :, header.first_head - part.first_head : header.end_head - part.first_head]


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
