"""A sender's connection to one receiver, and how both agree on a transport when it opens."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass

from runtime.kv_transfer.transports.base import Outgoing, Transport, Unavailable, host_identity
from runtime.protocol.between_workers import KvOffer, KvOpen, KvOpened
from runtime.protocol.framing import Connection
from runtime.protocol.handshake import Credentials, connect

Address = tuple[str, int]


@dataclass(slots=True, eq=False)
class Pair:
    """An open connection and its transport; `reader` is the thread that reads the receiver's answers."""

    address: Address
    connection: Connection
    transport: Transport
    outgoing: Outgoing
    reader: threading.Thread | None = None

    def cut(self) -> None:
        """Shut the connection down, which wakes the threads that wait on it; the descriptor stays open."""
        with contextlib.suppress(OSError):
            self.connection.stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Wait for the reader to end, then free everything."""
        self.cut()
        if self.reader is not None:
            self.reader.join()
        self.outgoing.close()
        self.connection.close()


def open_pair(address: Address, credentials: Credentials, transports: list[Transport]) -> Pair:
    """Connect to a receiver and agree on one of these transports, given best first.

    Raises
    ------
    OSError : the receiver does not answer, or no transport works for both
    """
    deadline_s = transports[0].deadline_s
    connection = connect(address, credentials, deadline_s)
    try:
        connection.set_deadline(deadline_s)
        return Pair(address, connection, *_agree(connection, transports))
    except BaseException:
        connection.close()
        raise


def _agree(connection: Connection, transports: list[Transport]) -> tuple[Transport, Outgoing]:
    """Offer the transports; the one that the receiver accepts, and its end here."""
    offers, problems = dict[str, tuple[Transport, Outgoing]](), list[str]()
    for transport in transports:
        try:
            offers[transport.name] = transport, transport.outgoing(connection)
        except Unavailable as error:
            problems.append(f"{transport.name}: {error}")
    try:
        handles = {name: outgoing.handle for name, (_, outgoing) in offers.items()}
        connection.send(_opening(transports[0], handles))
        answer = connection.receive()
        if isinstance(answer, KvOpened) and answer.transport in offers:
            return offers.pop(answer.transport)
        problems.append(answer.problem if isinstance(answer, KvOpened) else "no answer")
        raise ConnectionError("no transport in common: " + "; ".join(problems))
    finally:
        for _, outgoing in offers.values():
            outgoing.close()


def _opening(transport: Transport, handles: dict[str, str]) -> KvOpen:
    cache = transport.cache
    part = cache.shape.part
    return KvOpen(
        host=host_identity(),
        first_layer=part.first_layer,
        end_layer=part.end_layer,
        first_head=part.first_head,
        end_head=part.end_head,
        slots=cache.blocks * cache.block_tokens,
        sides=cache.shape.sides,
        head_dim=cache.shape.head_dim,
        dtype=cache.shape.dtype_name,
        offers=tuple(KvOffer(transport=name, handle=handle) for name, handle in handles.items()),
    )
