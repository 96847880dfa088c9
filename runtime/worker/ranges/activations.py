"""Activations on their way from one hop of a path to the next: a connection and a thread per next worker.

The thread that computes never waits for the network. Whatever a next worker has not confirmed when its
connection breaks counts as lost, so that no request waits for something that never comes.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from runtime.engine.base import Rows
from runtime.kv_transfer.transports.base import next_message
from runtime.protocol.between_workers import ActivationPart, Activations, ActivationsTaken
from runtime.protocol.codec import encode
from runtime.protocol.framing import Connection
from runtime.protocol.handshake import Credentials, connect

log = logging.getLogger(__name__)

PURPOSE = "activations"
DEADLINE_S = 10.0
"""A next worker that takes nothing for so long has lost what was sent to it."""
GRACE_S = 0.5
"""Lets the front end notice that a worker has died, before its requests are reported as failed."""
MOST_BYTES = 4 << 30

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of a request that have arrived at a hop, at `arrived_s` (time.monotonic), with the activations
    of the hop before; None: at the first hop there are none."""

    part: ActivationPart
    rows: Rows | None
    arrived_s: float


class ActivationSender:
    """Sends activations to the next hops.

    Parameters
    ----------
    credentials : with which this worker connects to others
    peers : address of every worker
    on_lost : called with a request some of whose activations may not have arrived, and why; from any thread
    """

    def __init__(
        self,
        credentials: Credentials,
        peers: Mapping[str, Address],
        on_lost: Callable[[str, str], None],
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._credentials, self._on_lost, self._deadline_s = credentials, on_lost, deadline_s
        self._peers = dict(peers)
        self._streams: dict[str, _Stream] = {}

    def reconnect(self, peers: Mapping[str, Address]) -> None:
        """Take new addresses; from any thread."""
        self._peers = dict(peers)
        for worker, stream in list(self._streams.items()):
            stream.leave_unless(peers.get(worker))

    def send(self, worker: str, parts: Sequence[ActivationPart], rows: Sequence[Rows]) -> None:
        """Queue the activations of some requests for a worker; never waits."""
        if worker not in self._streams:
            self._streams[worker] = _Stream(
                self._credentials, worker, lambda: self._peers.get(worker), self._on_lost, self._deadline_s
            )
        self._streams[worker].put(_Parcel(tuple(parts), tuple(rows)))


@dataclass(frozen=True, slots=True, eq=False)
class _Parcel:
    parts: tuple[ActivationPart, ...]
    rows: tuple[Rows, ...]


class _Stream:
    """Sends to one worker, in order, over a connection that is opened when needed."""

    def __init__(
        self,
        credentials: Credentials,
        worker: str,
        address: Callable[[], Address | None],
        on_lost: Callable[[str, str], None],
        deadline_s: float,
    ) -> None:
        self._credentials, self._worker, self._address = credentials, worker, address
        self._on_lost, self._deadline_s = on_lost, deadline_s
        self._queue: queue.SimpleQueue[_Parcel] = queue.SimpleQueue()
        self._sent: deque[_Parcel] = deque()
        self._moved_s = 0.0
        self._lock = threading.Lock()
        self._open: tuple[Address, Connection] | None = None
        threading.Thread(target=self._run, name=f"activations to {worker}", daemon=True).start()

    def put(self, parcel: _Parcel) -> None:
        self._queue.put(parcel)

    def leave_unless(self, address: Address | None) -> None:
        """End a connection to another address, which may be one that takes nothing any more."""
        with self._lock:
            opened = self._open
        if opened is not None and opened[0] != address:
            opened[1].close()

    def _run(self) -> None:
        while True:
            with suppress(queue.Empty):
                self._send(self._queue.get(timeout=self._deadline_s / 4))
            with self._lock:
                late = self._sent and time.monotonic() - self._moved_s > self._deadline_s
            if late:
                self._break(self._open, f"it took nothing for {self._deadline_s:g} s")

    def _send(self, parcel: _Parcel) -> None:
        opened = None
        try:
            opened = self._connected()
            header = Activations(parts=parcel.parts, payload_bytes=sum(rows.nbytes for rows in parcel.rows))
            with self._lock:
                if not self._sent:
                    self._moved_s = time.monotonic()
                self._sent.append(parcel)
            opened[1].send_buffers([memoryview(encode(header)), *parcel.rows])
        except OSError as error:
            self._break(opened, str(error), parcel)

    def _connected(self) -> tuple[Address, Connection]:
        """The connection, which is a new one if the worker listens elsewhere now."""
        address = self._address()
        if address is None:
            raise ConnectionError("its address is unknown")
        if self._open is not None and self._open[0] != address:
            self._break(self._open, "it has moved")
        if self._open is None:
            connection = connect(address, self._credentials, self._deadline_s)
            connection.set_deadline(self._deadline_s)
            self._open = address, connection
            threading.Thread(
                target=self._read, args=(self._open,), name=f"answers of {self._worker}", daemon=True
            ).start()
        return self._open

    def _read(self, opened: tuple[Address, Connection]) -> None:
        """Count what the worker takes, until the connection ends."""
        text, connection = "it closed the connection", opened[1]
        try:
            while (message := next_message(connection)) is not None:
                with self._lock:
                    if opened is not self._open:
                        return
                    if not isinstance(message, ActivationsTaken) or message.count > len(self._sent):
                        raise ConnectionError(f"{message} answers nothing that was sent")
                    for _ in range(message.count):
                        self._sent.popleft()
                    self._moved_s = time.monotonic()
        except (OSError, ValueError) as error:
            text = str(error)
        self._break(opened, text)

    def _break(
        self, opened: tuple[Address, Connection] | None, text: str, also: _Parcel | None = None
    ) -> None:
        """Close a connection, and report once what it may not have delivered, `also` among it."""
        lost = [also] if also is not None else []
        with self._lock:
            if opened is self._open:
                self._open = None
                lost += self._sent
                self._sent.clear()
            elif also is not None and also in self._sent:
                self._sent.remove(also)
        if opened is not None:
            opened[1].close()
        if not lost:
            return
        log.warning("activations to %s: %s", self._worker, text)
        time.sleep(GRACE_S)
        for request_id in {part.request_id for parcel in lost for part in parcel.parts}:
            self._on_lost(request_id, f"sending activations to {self._worker} failed: {text}")


def arriving(connection: Connection, row_bytes: int) -> Iterator[list[Piece]]:
    """What a hop before sends, frame by frame, until it closes the connection.

    Parameters
    ----------
    row_bytes : of the activations of one token

    Raises
    ------
    OSError : the connection broke, or (ConnectionError) the peer breaks the protocol
    """
    while (message := connection.receive()) is not None:
        if not isinstance(message, Activations):
            raise ConnectionError(f"{type(message).__name__} instead of activations")
        counts = [len(part.tokens) * row_bytes for part in message.parts]
        if message.payload_bytes != sum(counts) or message.payload_bytes > MOST_BYTES:
            raise ConnectionError(f"{message.payload_bytes} bytes of activations for {sum(counts)}")
        whole = memoryview(bytearray(message.payload_bytes))
        connection.receive_into(whole)
        now, first, pieces = time.monotonic(), 0, list[Piece]()
        for part, count in zip(message.parts, counts, strict=True):
            pieces.append(Piece(part, whole[first : first + count], now))
            first += count
        yield pieces
        connection.send(ActivationsTaken(count=1))
