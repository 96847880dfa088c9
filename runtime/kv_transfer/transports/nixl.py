"""KV payloads by NIXL: the receiver reads the sender's registered pool over whatever UCX finds between them.

A read goes into a buffer of the receiver, never into its pool, because it may still write after its request
was cancelled or its deadline has passed. NIXL 1.5 is an optional dependency. Tested between pools in CPU
memory; the path for pools on GPUs is written from the documentation and untested.
"""

from __future__ import annotations

import base64
import importlib.util
import secrets
import threading
import time
from typing import Any

import msgspec
import numpy as np
import torch

from runtime.kv_cache.pool import PagedCache
from runtime.kv_transfer.arrival import KvArrival
from runtime.kv_transfer.slices import Piece, Runs, pieces
from runtime.kv_transfer.staging import Staging
from runtime.kv_transfer.transports.base import (
    HeaderOnly,
    Incoming,
    Outgoing,
    Transport,
    Unavailable,
    checked_runs,
    require_open,
)
from runtime.protocol.between_workers import KvOpen, KvSlice
from runtime.protocol.framing import Connection

_BACKENDS = ["UCX"]
_PIECE_BYTES = 4 * 1024 * 1024
_POLL_S, _LONGEST_POLL_S = 20e-6, 1e-3
_abandoned = list[Any]()
"""Agents and buffers of reads that never finished: NIXL may still write to the buffers."""


class Handle(msgspec.Struct, frozen=True, array_like=True):
    """What a receiver needs to read a pool."""

    metadata: bytes
    address: int
    size_bytes: int
    device: int
    is_gpu: bool


class Nixl(Transport):
    """Between any two workers that have the package installed."""

    name, pulls, window = "nixl", True, 4

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._lock = threading.Lock()
        self._agent: _Agent | None = None

    def outgoing(self, connection: Connection) -> Outgoing:
        """Register the pool, once, and tell the receiver where it is."""
        pool = self.cache.pool
        with self._lock:
            self._agent = self._agent or _Agent(pool)
            metadata = self._agent.metadata()
        handle = Handle(metadata, pool.data_ptr(), pool.nbytes, max(pool.get_device(), 0), pool.is_cuda)
        return HeaderOnly(connection, base64.b64encode(msgspec.msgpack.encode(handle)).decode())

    def incoming(self, connection: Connection, opening: KvOpen, handle: str) -> Incoming:
        """Prepare to read the sender's pool."""
        try:
            theirs = msgspec.msgpack.decode(base64.b64decode(handle), type=Handle)
        except ValueError as error:
            raise Unavailable(f"the sender's handle is invalid: {error}") from error
        return _Incoming(connection, self.cache, opening, theirs, self.deadline_s)


class _Agent:
    """NIXL in this process, with one piece of registered memory."""

    def __init__(self, memory: torch.Tensor) -> None:
        if importlib.util.find_spec("nixl") is None:
            raise Unavailable("the package nixl is not installed")
        try:
            from nixl._api import nixl_agent, nixl_agent_config

            self.memory = memory
            self.nixl = nixl_agent(f"kv-{secrets.token_hex(8)}", nixl_agent_config(backends=_BACKENDS))
            self._registered = self.nixl.register_memory(memory, backends=_BACKENDS)
        except Exception as error:
            raise Unavailable(f"NIXL can't be used here: {error}") from error

    def metadata(self) -> bytes:
        return self.nixl.get_agent_metadata()

    def close(self) -> None:
        self.nixl.deregister_memory(self._registered, backends=_BACKENDS)


class _Incoming(Incoming):
    def __init__(
        self, connection: Connection, cache: PagedCache, opening: KvOpen, theirs: Handle, deadline_s: float
    ) -> None:
        self._connection, self._opening, self._theirs = connection, opening, theirs
        self._deadline_s = deadline_s
        self._staging = Staging(cache, _PIECE_BYTES, cache.pool.device)
        self._head_bytes = cache.shape.head_bytes
        self._row_bytes = (opening.end_head - opening.first_head) * self._head_bytes
        self._is_whole = True
        self._agent = _Agent(self._staging.memory)
        try:
            self._peer = self._agent.nixl.add_remote_agent(theirs.metadata)
        except Exception as error:
            self._agent.close()
            raise Unavailable(f"the sender's NIXL can't be reached: {error}") from error

    def receive(self, header: KvSlice, arrival: KvArrival | None) -> None:
        """Read the slice, a piece at a time, and copy each into the pool."""
        if arrival is None:
            return
        runs = checked_runs(header, self._opening)
        for piece in pieces(header, self._opening.sides, _PIECE_BYTES):
            at, end = piece.first_token - header.first_token, piece.end_token - header.first_token
            self._read(*self._places(header, piece, runs.between(at, end)))
            require_open(self._connection)
            with arrival.writing() as is_open:
                if not is_open:
                    return
                self._staging.store(header, piece, arrival.runs(piece.first_token, piece.end_token))

    def close(self) -> None:
        """Close the agent, unless a read may still be running."""
        if not self._is_whole:
            _abandoned.append((self._agent, self._staging))
            return
        self._agent.nixl.remove_remote_agent(self._peer)
        self._agent.close()

    def _places(self, header: KvSlice, piece: Piece, runs: Runs) -> tuple[np.ndarray, np.ndarray]:
        """Stretches of memory here and there: [stretches, (address, bytes, device)], in the slice's order."""
        opening, heads = self._opening, header.end_head - header.first_head
        if heads * self._head_bytes == self._row_bytes:
            starts, counts = runs.array.T.astype(np.uint64)
            counts = counts - starts
        else:
            starts = runs.slots().astype(np.uint64)
            counts = np.ones_like(starts)
        first_side = opening.sides * (piece.first_layer - opening.first_layer) + piece.first_side
        end_side = opening.sides * (piece.end_layer - 1 - opening.first_layer) + piece.end_side
        sides = np.arange(first_side, end_side, dtype=np.uint64)[:, None] * np.uint64(opening.slots)
        offsets = (sides + starts) * np.uint64(self._row_bytes)
        offsets += np.uint64((header.first_head - opening.first_head) * self._head_bytes)
        sizes = np.tile(counts * np.uint64(heads * self._head_bytes), len(sides))
        there = _stretches(self._theirs.address, offsets.reshape(-1), sizes, self._theirs.device)
        packed = np.concatenate([np.zeros(1, np.uint64), np.cumsum(sizes)[:-1]])
        memory = self._staging.memory
        here = _stretches(memory.data_ptr(), packed, sizes, max(memory.get_device(), 0))
        return here, there

    def _read(self, here: np.ndarray, there: np.ndarray) -> None:
        nixl, end_s, wait_s = self._agent.nixl, time.monotonic() + self._deadline_s, _POLL_S
        try:
            ours = nixl.get_xfer_descs(here, _kind(self._staging.memory.is_cuda))
            theirs = nixl.get_xfer_descs(there, _kind(self._theirs.is_gpu))
            read = nixl.initialize_xfer("READ", ours, theirs, self._peer, backends=_BACKENDS)
            self._is_whole = False
            state = nixl.transfer(read)
            while state == "PROC":
                require_open(self._connection)
                if time.monotonic() > end_s:
                    raise TimeoutError("NIXL did not read in time")
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_POLL_S)
                state = nixl.check_xfer_state(read)
            if state != "DONE":
                raise ConnectionError(f"NIXL's read ended as {state}")
            nixl.release_xfer_handle(read)
        except OSError:
            raise
        except Exception as error:
            raise ConnectionError(f"NIXL's read failed: {error}") from error
        self._is_whole = True


def _stretches(base: int, offsets: np.ndarray, sizes: np.ndarray, device: int) -> np.ndarray:
    addresses = offsets + np.uint64(base)
    return np.stack([addresses, sizes, np.full_like(sizes, device)], axis=1)


def _kind(is_gpu: bool) -> str:
    return "VRAM" if is_gpu else "DRAM"
