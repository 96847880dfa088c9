"""What lies between a pool and a stream of bytes: nothing where that will do, else a buffer."""

from __future__ import annotations

import torch

from runtime.kv_cache.pool import PagedCache
from runtime.kv_transfer.cells import PIECE_BYTES, Piece
from runtime.kv_transfer.rows import copy_tokens, packed_rows, pool_rows
from runtime.kv_transfer.runs import Runs
from runtime.protocol.between_workers import KvSlice

_STRETCH_BYTES = 8 * 1024  # copying less is faster than naming it


class Staging:
    """A contiguous buffer, through which pieces leave a pool or come into it.

    If the pool is a GPU's, copies run on a stream of their own, and each call returns when they are done; a
    buffer in host memory then has locked pages.

    Attributes
    ----------
    memory : the buffer: [bytes], uint8; another one once a piece is larger

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
        self._rows = None if self._is_gpu else pool_rows(cache)
        self.memory = self._allocate(size_bytes)

    def in_place(self, header: KvSlice, runs: Runs) -> list[memoryview]:
        """The bytes of a slice where they lie in the pool's `runs`, if that is in large stretches of CPU
        memory; else nothing: take `load` or `store`."""
        if self._rows is None or header.end_head - header.first_head != self._cache.shape.heads:
            return []
        stretches = 2 * (header.end_layer - header.first_layer) * len(runs.array)
        return [] if header.payload_bytes < _STRETCH_BYTES * stretches else self._rows.stretches(header, runs)

    def load(self, header: KvSlice, piece: Piece, runs: Runs) -> torch.Tensor:
        """The bytes of a piece, copied from the pool's `runs`."""
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
        """Put the staged bytes of a piece into the pool's `runs`."""
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
        """Where the bytes of a piece are, after `load` or before `store`: [bytes], uint8."""
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


def pool_view(cache: PagedCache, header: KvSlice, piece: Piece) -> torch.Tensor:
    """A piece's layers, sides and heads in a worker's pool: [layers, sides, slots, heads, head_dim]."""
    part = cache.shape.part
    layers = cache.pool[piece.first_layer - part.first_layer : piece.end_layer - part.first_layer]
    sides = layers[:, piece.first_side : piece.end_side]
    return sides[:, :, :, header.first_head - part.first_head : header.end_head - part.first_head]


def _shaped(room: torch.Tensor, view: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Staged bytes as the pool's view is, with the piece's tokens for slots."""
    tokens = piece.end_token - piece.first_token
    return room.view(view.dtype).view(*view.shape[:2], tokens, *view.shape[3:])


def _whole(piece: Piece) -> Runs:
    return Runs.one(0, piece.end_token - piece.first_token)
