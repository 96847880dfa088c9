"""Copies between a pool of KV cache and contiguous bytes, and from pool to pool.

In CPU memory, an item is a token's heads of a layer's keys or values: opaque bytes that are copied as one.
Numpy arrays of a pool are made once, because making torch views costs more than copying a small slice. The
compiled copy releases the GIL once for all runs. Without it, numpy keeps the GIL while it copies fewer than
500 items; that is cheaper than releasing it for each block and waiting for it again when several threads move
KV caches. So pieces are small, and the GIL is released between them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from runtime import native
from runtime.kv_cache.layout import Part
from runtime.kv_cache.pool import PagedCache
from runtime.kv_transfer.slices import GPU_PIECE_BYTES, PIECE_BYTES, Piece, Runs
from runtime.protocol.between_workers import KvSlice

_PAST_CACHES_FROM = 256 * 1024
"""Bytes. A smaller copy stays in the CPU caches, because what has just arrived is soon read."""
_STRETCH_BYTES = 8 * 1024  # below, copying a stretch is faster than describing it to a socket


class Staging:
    """A contiguous buffer through which pieces leave a pool or enter it.

    If the pool is on a GPU, copies run on a CUDA stream of their own, and each call returns when they are
    done; a buffer in host memory is then page-locked.

    Attributes
    ----------
    memory : the buffer, [bytes] uint8; replaced by a larger one when a piece does not fit
    piece_bytes : how large pieces should be

    Parameters
    ----------
    device : where the buffer is; None: in host memory
    """

    def __init__(
        self, cache: PagedCache, size_bytes: int | None = None, device: torch.device | None = None
    ) -> None:
        self._cache, self._device, self._is_gpu = cache, device, cache.on_gpu
        self.piece_bytes = size_bytes or (GPU_PIECE_BYTES if self._is_gpu else PIECE_BYTES)
        self._stream = torch.cuda.Stream(cache.pool.device) if self._is_gpu else None
        self._rows = None if self._is_gpu else pool_rows(cache)
        self.memory = self._allocate(self.piece_bytes)

    def in_place(self, header: KvSlice, runs: Runs) -> list[memoryview]:
        """The bytes of a slice where they lie in the pool's `runs`, if they lie in large stretches of CPU
        memory; otherwise an empty list: use `load` or `store`."""
        if self._rows is None or header.end_head - header.first_head != self._cache.shape.heads:
            return []
        planes = self._cache.shape.sides * (header.end_layer - header.first_layer)
        stretches = planes * len(runs.array)
        return [] if header.payload_bytes < _STRETCH_BYTES * stretches else self._rows.stretches(header, runs)

    def load(self, header: KvSlice, piece: Piece, runs: Runs) -> torch.Tensor:
        """Copy a piece from the pool's `runs` into the buffer: [bytes] uint8."""
        room = self.room(piece)
        if self._rows is not None:
            packed, rows = packed_rows(room.numpy(), piece), self._rows.of(header, piece)
            copy_tokens(packed, _whole(piece), rows, runs, to_stay=False)
            return room
        view = pool_view(self._cache, header, piece)
        with torch.cuda.stream(self._stream):
            _shaped(room, view, piece).copy_(view.index_select(2, self._index(runs)), non_blocking=True)
        self._synchronize()
        return room

    def store(self, header: KvSlice, piece: Piece, runs: Runs) -> None:
        """Copy a piece from the buffer to the pool's `runs`."""
        room = self.room(piece)
        if self._rows is not None:
            copy_tokens(self._rows.of(header, piece), runs, packed_rows(room.numpy(), piece), _whole(piece))
            return
        view = pool_view(self._cache, header, piece)
        with torch.cuda.stream(self._stream):
            staged = _shaped(room, view, piece)
            view.index_copy_(2, self._index(runs), staged.to(view.device, non_blocking=True))
        self._synchronize()

    def room(self, piece: Piece) -> torch.Tensor:
        """The part of the buffer that holds a piece after `load` or before `store`: [bytes] uint8."""
        if piece.bytes > len(self.memory):
            self.memory = self._allocate(piece.bytes)
        return self.memory[: piece.bytes]

    def _allocate(self, size_bytes: int) -> torch.Tensor:
        is_pinned = self._is_gpu and self._device is None
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device, pin_memory=is_pinned)

    def _synchronize(self) -> None:
        assert self._stream is not None
        self._stream.synchronize()

    def _index(self, runs: Runs) -> torch.Tensor:
        return torch.from_numpy(runs.slots()).to(self._cache.pool.device)


class Rows:
    """Keys and values of all slots of a pool in CPU memory. Layers and heads are global numbers.

    Parameters
    ----------
    memory : [bytes] uint8, of [layers, sides, slots, heads, bytes of a head]
    """

    def __init__(self, memory: np.ndarray, part: Part, sides: int, slots: int, head_bytes: int) -> None:
        self._memory, self._part, self._sides = memory, part, sides
        self._slots, self._head_bytes = slots, head_bytes
        self._row_bytes = (part.end_head - part.first_head) * head_bytes
        self._by_heads = dict[tuple[int, int], np.ndarray]()

    def of(self, header: KvSlice, piece: Piece) -> np.ndarray:
        """The slice's heads in the piece's layers and sides: [planes, slots] items, a view. A plane is one
        side of one layer."""
        heads = header.first_head, header.end_head
        if heads not in self._by_heads:
            self._by_heads[heads] = self._view(*heads)
        first, end = (
            self._sides * (piece.first_layer - self._part.first_layer) + piece.first_side,
            self._sides * (piece.end_layer - 1 - self._part.first_layer) + piece.end_side,
        )
        return self._by_heads[heads][first:end]

    def stretches(self, header: KvSlice, runs: Runs) -> list[memoryview]:
        """The bytes of a slice that has all heads, where they lie: plane after plane, run after run."""
        flat, row_bytes, offset = self._memory.data, self._row_bytes, self._part.first_layer
        planes = range(*(self._sides * (layer - offset) for layer in (header.first_layer, header.end_layer)))
        starts = [plane * self._slots * row_bytes for plane in planes]
        places = [(first * row_bytes, end * row_bytes) for first, end in runs.array.tolist()]
        return [flat[start + first : start + end] for start in starts for first, end in places]

    def _view(self, first_head: int, end_head: int) -> np.ndarray:
        planes = self._sides * (self._part.end_layer - self._part.first_layer)
        return np.ndarray(
            (planes, self._slots),
            _item((end_head - first_head) * self._head_bytes),
            self._memory.data,
            (first_head - self._part.first_head) * self._head_bytes,
            (self._slots * self._row_bytes, self._row_bytes),
        )


def pool_rows(cache: PagedCache) -> Rows:
    """The rows of a worker's pool in CPU memory."""
    memory, shape = cache.pool.view(-1).view(torch.uint8).numpy(), cache.shape
    return Rows(memory, shape.part, shape.sides, cache.pool.shape[2], shape.head_bytes)


def packed_rows(memory: np.ndarray, piece: Piece) -> np.ndarray:
    """The contiguous bytes of a piece: [planes, tokens] items. A piece of several layers has all
    sides."""
    planes = (piece.end_layer - piece.first_layer) * (piece.end_side - piece.first_side)
    tokens = piece.end_token - piece.first_token
    return np.ndarray((planes, tokens), _item(piece.bytes // (planes * tokens)), memory.data)


def copy_tokens(
    into: np.ndarray, into_runs: Runs, source: np.ndarray, source_runs: Runs, to_stay: bool = True
) -> None:
    """Copy the tokens of source_runs to those of into_runs, the same number, in all planes.

    Parameters
    ----------
    to_stay : the copy is read later, so it may bypass the CPU caches; False for a buffer that is sent at once
    """
    if native.copies():
        past_caches = to_stay and len(into) * into_runs.tokens * into.itemsize >= _PAST_CACHES_FROM
        native.copy_tokens(into, into_runs.array, source, source_runs.array, past_caches)
        return
    for to, at, count in _aligned(into_runs.array.tolist(), source_runs.array.tolist()):
        into[:, to : to + count] = source[:, at : at + count]


def pool_view(cache: PagedCache, header: KvSlice, piece: Piece) -> torch.Tensor:
    """A piece's layers, sides and heads in a worker's pool: [layers, sides, slots, heads, width]."""
    part = cache.shape.part
    layers = cache.pool[piece.first_layer - part.first_layer : piece.end_layer - part.first_layer]
    sides = layers[:, piece.first_side : piece.end_side]
    return sides[:, :, :, header.first_head - part.first_head : header.end_head - part.first_head]


def _shaped(room: torch.Tensor, view: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Staged bytes in the shape of the pool's view, with the piece's tokens for slots."""
    tokens = piece.end_token - piece.first_token
    return room.view(view.dtype).view(*view.shape[:2], tokens, *view.shape[3:])


def _whole(piece: Piece) -> Runs:
    return Runs.one(0, piece.end_token - piece.first_token)


def _item(size_bytes: int) -> np.dtype:
    return np.dtype((np.void, size_bytes))


def _aligned(first: list[list[int]], second: list[list[int]]) -> Iterator[tuple[int, int, int]]:
    """Cut both lists of runs into equal stretches: (slot in the first, slot in the second, slots)."""
    others = iter(second)
    at = end = 0
    for to, to_end in first:
        while to < to_end:
            if at == end:
                at, end = next(others)
            count = min(to_end - to, end - at)
            yield to, at, count
            to, at = to + count, at + count
