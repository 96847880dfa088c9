"""KV payloads through torch.distributed: a group of two ranks for each pair, shared with nobody.

The sender's end has the group's store, on the address of the control connection. A group that has failed is
not used again: the next connection makes a new store and a new group.

NCCL is written after its documentation and gloo's example; no machine with two GPUs has run it yet.
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from runtime.engine.torch.collectives import connect_store, open_store
from runtime.kv_transfer.arrival import Landing
from runtime.kv_transfer.cells import pieces
from runtime.kv_transfer.runs import Runs
from runtime.kv_transfer.staging import Staging
from runtime.kv_transfer.transports.base import Incoming, Outgoing, Transport, Unavailable
from runtime.protocol.between_workers import KvOpen, KvSlice
from runtime.protocol.framing import Connection

_PIECE_BYTES = 4 * 1024 * 1024  # a message of gloo costs 0.2 ms, whatever its size
_SENDER, _RECEIVER = 0, 1


class Gloo(Transport):
    """Through host memory, between any two workers."""

    name, pulls, window = "gloo", False, 4

    def outgoing(self, connection: Connection) -> Outgoing:
        """A store for the pair; the group is made with the first slice."""
        return _Outgoing(self, connection)

    def incoming(self, connection: Connection, opening: KvOpen, handle: str) -> Incoming:
        """Join the pair's group with the first slice."""
        if not handle.isdecimal():
            raise Unavailable(f"{handle!r} is no port")
        return _Incoming(self, connection, int(handle))

    def group(self, store: dist.Store, rank: int, address: str) -> Any:
        """The pair's process group; waits for the other side."""
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=self.deadline_s)
        return gloo(store, rank, 2, options)

    def staging(self) -> Staging:
        """Where messages are put together."""
        return Staging(self.cache, _PIECE_BYTES)


class Nccl(Gloo):
    """From GPU to GPU."""

    name = "nccl"

    def outgoing(self, connection: Connection) -> Outgoing:
        """A store for the pair; the group is made with the first slice."""
        self._require_gpu()
        return super().outgoing(connection)

    def incoming(self, connection: Connection, opening: KvOpen, handle: str) -> Incoming:
        """Join the pair's group with the first slice."""
        self._require_gpu()
        return super().incoming(connection, opening, handle)

    def group(self, store: dist.Store, rank: int, address: str) -> Any:
        """The pair's process group; waits for the other side."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self.deadline_s)
        return dist.ProcessGroupNCCL(store, rank, 2, options)

    def staging(self) -> Staging:
        """Where messages are put together."""
        return Staging(self.cache, _PIECE_BYTES, self.cache.pool.device)

    def _require_gpu(self) -> None:
        if self.cache.pool.device.type != "cuda" or not dist.is_nccl_available():
            raise Unavailable("NCCL needs pools on GPUs, and a torch that has it")


class _Outgoing(Outgoing):
    def __init__(self, transport: Gloo, connection: Connection) -> None:
        self._transport, self._connection = transport, connection
        self._address = connection.stream.getsockname()[0]
        self._store = open_store(self._address, 2)
        self._group: Any = None
        self._stagings = [transport.staging(), transport.staging()]
        self.handle = str(self._store.port)

    def send(self, header: KvSlice, runs: Runs) -> None:
        """The slice as messages; the next is put together while one is on its way."""
        self._connection.send(header)
        if self._group is None:
            self._group = self._transport.group(self._store, _SENDER, self._address)
        works = deque[Any]()
        for number, piece in enumerate(pieces(header, _PIECE_BYTES)):
            if len(works) == len(self._stagings):
                works.popleft().wait()
            staging = self._stagings[number % len(self._stagings)]
            part = runs.between(piece.first_token - header.first_token, piece.end_token - header.first_token)
            works.append(self._group.send([staging.load(header, piece, part)], _RECEIVER, 0))
        for work in works:
            work.wait()

    def close(self) -> None:
        """End the group and its store."""
        self._group = None
        del self._store


class _Incoming(Incoming):
    def __init__(self, transport: Gloo, connection: Connection, port: int) -> None:
        self._transport, self._port = transport, port
        self._own_address = connection.stream.getsockname()[0]
        self._address = connection.stream.getpeername()[0]
        self._group: Any = None
        self._stagings = [transport.staging(), transport.staging()]

    def receive(self, header: KvSlice, landing: Landing | None) -> None:
        """Messages, the next one asked for while one is put in place."""
        if self._group is None:
            store = connect_store(self._address, self._port, 2)
            self._group = self._transport.group(store, _RECEIVER, self._own_address)
        works = deque[Any]()
        waiting = deque[Any]()
        for number, piece in enumerate(pieces(header, _PIECE_BYTES)):
            if len(works) == len(self._stagings):
                works.popleft().wait()
                _place(header, landing, *waiting.popleft())
            staging = self._stagings[number % len(self._stagings)]
            works.append(self._group.recv([staging.room(piece)], _SENDER, 0))
            waiting.append((piece, staging))
        for work in works:
            work.wait()
            _place(header, landing, *waiting.popleft())

    def close(self) -> None:
        """End the group."""
        self._group = None


def _place(header: KvSlice, landing: Landing | None, piece: Any, staging: Staging) -> None:
    if landing is not None:
        with landing.writing() as is_open:
            if is_open:
                staging.store(header, piece, landing.runs(piece.first_token, piece.end_token))
