"""The interface of a transport: how the bytes of KV caches get from one worker to another.

Each pair of workers has one control connection, which carries `KvOpen`, `KvSlice` and `KvTaken` frames; a
transport moves the bytes. Its life: the sender registers its pool and offers the transport with a handle; the
receiver accepts the first offer that it can use; the sender sends slice after slice, and the receiver copies
each into its own pool and confirms it. Closing the control connection cancels what is in flight, and its
timeout is the deadline: within a slice, neither end waits longer for the other.
"""

from __future__ import annotations

import os
import select
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from runtime.kv_transfer.arrival import KvArrival
from runtime.kv_transfer.slices import Runs, count_tokens
from runtime.protocol.between_workers import KvOpen, KvSlice
from runtime.protocol.framing import Connection
from runtime.protocol.message import Message

if TYPE_CHECKING:
    from runtime.kv_transfer.memory import SharedPool

DEADLINE_S = 10.0


class Unavailable(Exception):
    """This pair of workers can't use the transport; another one may work."""


class Outgoing(ABC):
    """The sender's end for one receiver, used by one thread.

    Attributes
    ----------
    handle : what the receiver needs in order to open its end
    """

    handle: str = ""

    @abstractmethod
    def send(self, header: KvSlice, runs: Runs) -> None:
        """Send a slice whose tokens are in `runs` of the sender's pool.

        Raises
        ------
        OSError, RuntimeError : the pair is broken and must be closed
        """

    def close(self) -> None:
        """Free what the pair held, except for the control connection; from any thread."""
        return None


class Incoming(ABC):
    """The receiver's end for one sender, used by one thread."""

    @abstractmethod
    def receive(self, header: KvSlice, arrival: KvArrival | None) -> None:
        """Write a slice to its arrival's place in the pool, or discard it if there is none or it is closed.

        Raises
        ------
        OSError, RuntimeError : the pair is broken and must be closed
        """

    def close(self) -> None:
        """Free what the pair held, except for the control connection."""
        return None


class Transport(ABC):
    """One way to move KV caches, for all pairs of a worker.

    Attributes
    ----------
    cache : the worker's pages, of the kind that the transport moves
    pulls : the receiver reads the sender's pool, so headers carry slots and no bytes follow
    window : slices in flight at a time; those that wait are merged into fewer, larger ones

    Parameters
    ----------
    deadline_s : how long one end waits for the other within a slice
    shared : the shared memory that the pool is in, if it is in one
    """

    name: ClassVar[str]
    pulls: ClassVar[bool]
    window: ClassVar[int]

    def __init__(self, cache: Any, deadline_s: float, shared: SharedPool | None = None) -> None:
        self.cache, self.deadline_s, self.shared = cache, deadline_s, shared

    @abstractmethod
    def outgoing(self, connection: Connection) -> Outgoing:
        """The sender's end, to be offered to a receiver.

        Raises
        ------
        Unavailable : it can't be used with this worker's pool
        """

    @abstractmethod
    def incoming(self, connection: Connection, opening: KvOpen, handle: str) -> Incoming:
        """The receiver's end for a sender's offer.

        Raises
        ------
        Unavailable : it can't be used between these two workers
        """


# -- for transports whose receiver pulls


class HeaderOnly(Outgoing):
    """The sender's end of every transport that pulls."""

    def __init__(self, connection: Connection, handle: str) -> None:
        self._connection, self.handle = connection, handle

    def send(self, header: KvSlice, runs: Runs) -> None:
        """Tell the receiver where the slice is."""
        self._connection.send(header)


def checked_runs(
    header: KvSlice, opening: KvOpen, count: Callable[[np.ndarray, int], int] = count_tokens
) -> Runs:
    """The runs of a header, after a check that all of the slice lies in the sender's pool.

    Parameters
    ----------
    count : does what `count_tokens` does

    Raises
    ------
    ConnectionError : it does not
    """
    tokens = header.end_token - header.first_token
    try:
        runs = Runs.from_bytes(header.runs, tokens)
    except ValueError as error:
        raise ConnectionError(f"the slice has no runs: {error}") from error
    inside = (
        opening.first_layer <= header.first_layer < header.end_layer <= opening.end_layer
        and opening.first_head <= header.first_head < header.end_head <= opening.end_head
    )
    if not inside or count(runs.array, opening.slots) != tokens:
        raise ConnectionError("the slice is not in the sender's pool")
    return runs


def require_open(connection: Connection) -> None:
    """Check after a pull that the data was valid: a sender that reuses blocks before they were read closes
    the connection first.

    Raises
    ------
    ConnectionError : the sender has closed the connection
    """
    poll = select.poll()
    poll.register(connection.stream, select.POLLRDHUP)
    if poll.poll(0):
        raise ConnectionError("the sender took its blocks back")


def host_identity() -> str:
    """Equal for processes that can open each other's memory: the same boot, PID namespace and user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}:{os.geteuid()}"


# -- control connections


def next_message(connection: Connection) -> Message | None:
    """The next message, or None at the end of the stream. The wait for its first byte has no limit; the rest
    has the stream's timeout."""
    is_readable(connection, None)
    return connection.receive()


def is_readable(connection: Connection, wait_ms: float | None = 0) -> bool:
    """Whether more data arrives within `wait_ms` (None: no limit)."""
    poll = select.poll()
    poll.register(connection.stream, select.POLLIN)
    return bool(poll.poll(wait_ms))
