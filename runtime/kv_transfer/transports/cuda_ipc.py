"""KV payloads between GPUs of a host: the receiver maps the sender's pool and copies on its own CUDA stream.

Tried between two processes on one card, not from card to card.
"""

from __future__ import annotations

import base64
import math

import msgspec
import torch

from runtime.kv_cache.pool import PagedCache
from runtime.kv_transfer.arrival import KvArrival
from runtime.kv_transfer.slices import Piece, pieces
from runtime.kv_transfer.staging import pool_view
from runtime.kv_transfer.transports.base import (
    HeaderOnly,
    Incoming,
    Outgoing,
    Transport,
    Unavailable,
    checked_runs,
    host_identity,
    require_open,
)
from runtime.protocol.between_workers import KvOpen, KvSlice
from runtime.protocol.framing import Connection
from runtime.torch_private import map_cuda, share_cuda

_PIECE_BYTES = 64 * 1024 * 1024


class CudaIpc(Transport):
    """Between two processes of a host, both with pools on GPUs."""

    name, pulls, window = "cuda_ipc", True, 3

    def outgoing(self, connection: Connection) -> Outgoing:
        """Share the pool's memory."""
        if self.cache.pool.device.type != "cuda":
            raise Unavailable("the sender's pool is not on a GPU")
        shared = share_cuda(self.cache.pool)
        return HeaderOnly(connection, base64.b64encode(msgspec.msgpack.encode(shared)).decode())

    def incoming(self, connection: Connection, opening: KvOpen, handle: str) -> Incoming:
        """Map the sender's pool."""
        if opening.host != host_identity():
            raise Unavailable("the sender is on another host")
        if self.cache.pool.device.type != "cuda":
            raise Unavailable("the receiver's pool is not on a GPU")
        try:
            storage = map_cuda(msgspec.msgpack.decode(base64.b64decode(handle)))
        except (RuntimeError, TypeError, ValueError) as error:
            raise Unavailable(f"the sender's memory can't be opened: {error}") from error
        size = (
            opening.end_layer - opening.first_layer,
            opening.sides,
            opening.slots,
            opening.end_head - opening.first_head,
            self.cache.shape.width,
        )
        dtype = self.cache.shape.stored_dtype
        if storage.nbytes() < math.prod(size) * dtype.itemsize:
            raise Unavailable("the sender's memory is smaller than its pool")
        pool = torch.empty(0, dtype=dtype, device=storage.device).set_(storage)[: math.prod(size)].view(size)
        return _Incoming(connection, self.cache, opening, pool)


class _Incoming(Incoming):
    def __init__(
        self, connection: Connection, cache: PagedCache, opening: KvOpen, pool: torch.Tensor
    ) -> None:
        self._connection, self._cache, self._opening, self._pool = connection, cache, opening, pool
        self._stream = torch.cuda.Stream(cache.pool.device)

    def receive(self, header: KvSlice, arrival: KvArrival | None) -> None:
        """Copy the slice's slots, a piece at a time, and wait until all is done."""
        if arrival is None:
            return
        runs, opening = checked_runs(header, self._opening), self._opening
        with arrival.writing() as is_open, torch.cuda.stream(self._stream):
            if not is_open:
                return
            for piece in pieces(header, opening.sides, _PIECE_BYTES):
                part = _source_part(header, piece, opening)
                at, end = piece.first_token - header.first_token, piece.end_token - header.first_token
                source = torch.from_numpy(runs.between(at, end).slots())
                target = torch.from_numpy(arrival.runs(piece.first_token, piece.end_token).slots())
                view = pool_view(self._cache, header, piece)
                rows = self._pool[part].index_select(2, source.to(self._pool.device))
                view.index_copy_(2, target.to(view.device), rows.to(view.device, non_blocking=True))
            self._stream.synchronize()
        require_open(self._connection)


def _source_part(header: KvSlice, piece: Piece, opening: KvOpen) -> tuple[slice, slice, slice, slice]:
    """A piece's layers, sides, slots (all) and heads in the sender's pool."""
    return (
        slice(piece.first_layer - opening.first_layer, piece.end_layer - opening.first_layer),
        slice(piece.first_side, piece.end_side),
        slice(None),
        slice(header.first_head - opening.first_head, header.end_head - opening.first_head),
    )
