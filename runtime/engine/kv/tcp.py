"""KV payloads behind their headers, on the control connection itself: works between any two hosts."""

from __future__ import annotations

from runtime.engine.cache import PagedCache
from runtime.engine.kv.base import Incoming, Outgoing, Transport
from runtime.engine.kv.cells import Runs, Staging, pieces
from runtime.engine.kv.landing import Landing
from runtime.messages import KvOpen, KvSlice
from runtime.transport import Connection


class Tcp(Transport):
    """Bytes follow the header."""

    name, pulls, window = "tcp", False, 32

    def offer(self, connection: Connection) -> str:
        """Nothing to know."""
        return ""

    def outgoing(self, connection: Connection, handle: str) -> Outgoing:
        """The sender's end."""
        return _Outgoing(connection, self.cache)

    def incoming(self, connection: Connection, opening: KvOpen, handle: str) -> Incoming:
        """The receiver's end."""
        return _Incoming(connection, self.cache)


class _Outgoing(Outgoing):
    def __init__(self, connection: Connection, cache: PagedCache) -> None:
        self._connection, self._staging = connection, Staging(cache)

    def send(self, header: KvSlice, runs: Runs) -> None:
        first = True
        for piece in pieces(header):
            at, end = piece.first_token - header.first_token, piece.end_token - header.first_token
            data = self._staging.load(header, piece, runs.between(at, end))
            if first:
                self._connection.send_with_payload(header, [data])
                first = False
            else:
                self._connection.stream.sendall(data)


class _Incoming(Incoming):
    def __init__(self, connection: Connection, cache: PagedCache) -> None:
        self._connection, self._staging = connection, Staging(cache)

    def receive(self, header: KvSlice, landing: Landing | None) -> None:
        for piece in pieces(header):
            self._connection.receive_into(self._staging.room(piece))
            if landing is not None:
                with landing.writing() as is_open:
                    if is_open:
                        runs = landing.runs(piece.first_token, piece.end_token)
                        self._staging.store(header, piece, runs)
