"""Emulated KV payloads: they follow their headers as with `tcp`, but with a fraction of the bytes."""

from __future__ import annotations

import numpy as np

from runtime.engine.emulated.cache import EmulatedCache
from runtime.kv_transfer.arrival import KvArrival
from runtime.kv_transfer.slices import Runs
from runtime.kv_transfer.transports.base import Incoming, Outgoing, Transport
from runtime.protocol.between_workers import KvOpen, KvSlice
from runtime.protocol.codec import encode
from runtime.protocol.framing import Connection

_FILLER = memoryview(bytes(256 * 1024))


class ScaledTcp(Transport):
    """Sends the states of a slice's tokens, then filler up to 1/kv_scale of the slice's bytes. Headers, and
    so emulated links and counters, have the bytes of the real cache."""

    name, pulls, window = "emulated", False, 32

    def outgoing(self, connection: Connection) -> Outgoing:
        """The sender's end."""
        return _Outgoing(connection, self.cache)

    def incoming(self, connection: Connection, opening: KvOpen, handle: str) -> Incoming:
        """The receiver's end."""
        return _Incoming(connection, self.cache)


class _Outgoing(Outgoing):
    def __init__(self, connection: Connection, cache: EmulatedCache) -> None:
        self._connection, self._cache = connection, cache

    def send(self, header: KvSlice, runs: Runs) -> None:
        states = self._cache.states[runs.slots()]
        buffers = [memoryview(encode(header)), states.data.cast("B")]
        rest = _filler_bytes(header, self._cache.kv_scale)
        while rest > 0:
            buffers.append(_FILLER[: min(rest, len(_FILLER))])
            rest -= len(buffers[-1])
        self._connection.send_buffers(buffers)


class _Incoming(Incoming):
    def __init__(self, connection: Connection, cache: EmulatedCache) -> None:
        self._connection, self._cache = connection, cache

    def receive(self, header: KvSlice, arrival: KvArrival | None) -> None:
        states = np.empty(header.end_token - header.first_token, np.uint64)
        self._connection.receive_into(states.data.cast("B"))
        self._connection.drain(_filler_bytes(header, self._cache.kv_scale))
        if arrival is None:
            return
        slots = arrival.runs(header.first_token, header.end_token).slots()
        with arrival.writing() as is_open:
            if is_open:
                self._cache.states[slots] = states


def _filler_bytes(header: KvSlice, kv_scale: float) -> int:
    sent = 8 * (header.end_token - header.first_token)
    return max(round(header.payload_bytes / kv_scale) - sent, 0)
