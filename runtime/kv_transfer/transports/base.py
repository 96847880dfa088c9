"""What every way of KV payloads between two workers has in common.

A pair of workers has one control connection, of `KvOpen`, `KvSlice` and `KvTaken` frames; a transport is the
way of the bytes beside it. Its life: the sender *registers* its pool and *offers* the transport with a
handle; the receiver takes one it can use; the sender *sends* slice after slice, the receiver *receives* each
into its own pool and says so. How many are taken is the poll, closing is the cancel, and the control
connection's timeout the deadline: neither end waits longer for the other within a slice.
"""

from __future__ import annotations

import select
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from runtime.kv_transfer.arrival import Landing
from runtime.kv_transfer.runs import Runs
from runtime.protocol.between_workers import KvOpen, KvSlice
from runtime.protocol.framing import Connection
from runtime.protocol.message import Message

if TYPE_CHECKING:
    from runtime.kv_transfer.memory import SharedPool

DEADLINE_S = 10.0


class Unavailable(Exception):
    """This pair of workers can't use the transport; another may do."""


def next_message(connection: Connection) -> Message | None:
    """The next message, however long it takes to begin; its end has the stream's timeout."""
    is_readable(connection, None)
    return connection.receive()


def is_readable(connection: Connection, wait_ms: float | None = 0) -> bool:
    """Whether more has come, within so long; None: however long it takes."""
    poll = select.poll()
    poll.register(connection.stream, select.POLLIN)
    return bool(poll.poll(wait_ms))


class Outgoing(ABC):
    """The sender's end for one receiver. One thread uses it.

    Attributes
    ----------
    handle : what the receiver needs to know to be the other end
    """

    handle: str = ""

    @abstractmethod
    def send(self, header: KvSlice, runs: Runs) -> None:
        """Send a slice whose tokens are in `runs` of the own pool.

        Raises
        ------
        OSError, RuntimeError : the pair is broken, for good
        """

    def close(self) -> None:
        """Free what the pair had, the control connection aside; from any thread."""
        return None


class Incoming(ABC):
    """The receiver's end for one sender. One thread uses it."""

    @abstractmethod
    def receive(self, header: KvSlice, landing: Landing | None) -> None:
        """Put a slice into its landing; without one, or once that is closed, let the bytes go.

        Raises
        ------
        OSError, RuntimeError : the pair is broken, for good
        """

    def close(self) -> None:
        """Free what the pair had, the control connection aside."""
        return None


class Transport(ABC):
    """One way of payloads, for all pairs of a worker.

    Attributes
    ----------
    cache : the worker's pages, of the kind that the transport moves
    pulls : the receiver reads the sender's pool by itself, so headers carry slots
    window : slices on their way at a time; what waits meanwhile is merged into fewer, larger ones
    """

    name: ClassVar[str]
    pulls: ClassVar[bool]
    window: ClassVar[int]

    def __init__(self, cache: Any, deadline_s: float, shared: SharedPool | None = None) -> None:
        self.cache, self.deadline_s, self.shared = cache, deadline_s, shared

    @abstractmethod
    def outgoing(self, connection: Connection) -> Outgoing:
        """The sender's end, to be offered.

        Raises
        ------
        Unavailable : not with this worker's pool
        """

    @abstractmethod
    def incoming(self, connection: Connection, opening: KvOpen, handle: str) -> Incoming:
        """The receiver's end of a sender's offer.

        Raises
        ------
        Unavailable : not between these two
        """
