"""The stream of KV slices to one destination: its queue, its thread, its connection, its emulated link."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from runtime.kv_transfer.departure import Item, KvDeparture
from runtime.kv_transfer.pair import Address, Pair, open_pair
from runtime.kv_transfer.transports.base import Transport, next_message
from runtime.protocol.between_workers import KvSlice, KvTaken
from runtime.protocol.handshake import Credentials

log = logging.getLogger(__name__)

Group = list[Item]
"""Consecutive layers of the same heads and tokens: one slice."""


class Shaper:
    """An emulated link from one sender to one receiver.

    A message is in flight from the moment it is ready: the latencies of queued messages overlap, their bytes
    pass one after the other. An idle link saves no capacity for later.

    Parameters
    ----------
    bandwidth_bytes_s : 0 for no limit
    """

    def __init__(self, bandwidth_bytes_s: float = 0.0, latency_s: float = 0.0) -> None:
        self.bandwidth_bytes_s, self.latency_s = bandwidth_bytes_s, latency_s
        self._free_s = 0.0
        self._lock = threading.Lock()

    def pass_through(self, size_bytes: int, ready_s: float) -> None:
        """Wait until the last byte of a message would have arrived, ready at `ready_s` (time.monotonic)."""
        with self._lock:
            start_s = max(self._free_s, ready_s)
            self._free_s = start_s + (size_bytes / self.bandwidth_bytes_s if self.bandwidth_bytes_s else 0.0)
            delay_s = self._free_s + self.latency_s - time.monotonic()
        if delay_s > 0:
            time.sleep(delay_s)


class Shapers:
    """The emulated links of a worker, which all its senders share."""

    def __init__(self) -> None:
        self._known: dict[str, Shaper] = {}
        self._lock = threading.Lock()

    def of(self, destination: str, bandwidth_bytes_s: float = 0.0, latency_s: float = 0.0) -> Shaper:
        """The link to a destination: the one that is there, unless it has become another one."""
        with self._lock:
            known = self._known.get(destination)
            if known is None or (known.bandwidth_bytes_s, known.latency_s) != (bandwidth_bytes_s, latency_s):
                known = self._known[destination] = Shaper(bandwidth_bytes_s, latency_s)
            return known


class KvStream:
    """Sends to one destination, in order, over a connection that is opened when needed.

    A connection that breaks, or makes no progress within the deadline, fails every request that it carried
    in part; the next slice opens a new one.

    Parameters
    ----------
    address : returns where the destination listens now; raises ConnectionError if it is gone
    finish : called with items that were taken or dropped; their memory is no longer read
    fail : called with each request that failed, and why, before its items are finished
    slice_bytes : of a slice, at most
    """

    def __init__(
        self,
        credentials: Credentials,
        destination: str,
        transports: list[Transport],
        address: Callable[[], Address],
        shaper: Shaper,
        finish: Callable[[Group], None],
        fail: Callable[[KvDeparture, str], None],
        slice_bytes: int,
    ) -> None:
        self.shaper = shaper
        self._credentials, self._destination, self._transports = credentials, destination, transports
        self._address, self._finish, self._fail = address, finish, fail
        self._slice_bytes = slice_bytes
        self._deadline_s = transports[0].deadline_s
        self._queue, self._in_flight = deque[Item](), deque[Group]()
        self._carried = set[KvDeparture]()
        self._pair: Pair | None = None
        self._lost, self._silent, self._stop = "", False, False
        self._moved_s = 0.0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"kv to {destination}", daemon=True)
        self._thread.start()

    def put(self, items: list[Item]) -> None:
        """Queue items that are ready; never waits."""
        with self._changed:
            stopped = self._stop
            if not stopped:
                self._queue.extend(items)
                self._changed.notify_all()
        if stopped:
            self._give_back(items, {item.departure for item in items}, "the worker is gone")

    def close(self) -> None:
        """Fail what is queued or in flight and end the thread."""
        with self._changed:
            self._stop = True
            if self._pair is not None:
                self._pair.cut()
            self._changed.notify_all()

    def join(self) -> None:
        """Wait, after `close`, until the thread has ended."""
        self._thread.join(self._deadline_s)

    def _run(self) -> None:
        while True:
            group = self._next()
            if self._stop:
                self._break("the worker is gone", also=group, all_queued=True)
                return
            if group:
                self._forward(group)
            else:
                self._break(self._lost, all_queued=self._silent)

    def _next(self) -> Group:
        """Wait for a slice to send and room for it; returns nothing if the connection is lost or closed."""
        with self._changed:
            while not self._stop and not self._lost:
                if self._queue and self._has_room():
                    return self._take()
                wait_s = self._moved_s + self._deadline_s - time.monotonic() if self._in_flight else None
                if wait_s is not None and wait_s <= 0:
                    self._lost, self._silent = f"the receiver took nothing for {self._deadline_s:g} s", True
                else:
                    self._changed.wait(wait_s)
        return []

    def _has_room(self) -> bool:
        return self._pair is None or len(self._in_flight) < self._pair.transport.window

    def _take(self) -> Group:
        """Take the next items that make up one slice."""
        group = [self._queue.popleft()]
        size = group[0].bytes
        while (
            self._queue and self._queue[0].continues(group[-1]) and size + group[0].bytes <= self._slice_bytes
        ):
            group.append(self._queue.popleft())
            size += group[0].bytes
        return group

    def _forward(self, group: Group) -> None:
        departure = group[0].departure
        if departure.given_up:
            self._finish(group)
            return
        try:
            for item in group:
                if item.event is not None:
                    item.event.synchronize()
            pair = self._open()
        except Exception as error:
            self._break(str(error), also=group, all_queued=True)
            return
        if departure.given_up:  # it failed with the previous connection
            self._finish(group)
            return
        header = _header(group, pair.transport.pulls)
        self.shaper.pass_through(header.payload_bytes, group[-1].ready_s)
        with self._changed:
            if not self._in_flight:
                self._moved_s = time.monotonic()
            self._in_flight.append(group)
            self._carried = {other for other in self._carried if not other.is_over} | {departure}
        try:
            pair.outgoing.send(header, group[0].runs)
        except Exception as error:
            is_silent = isinstance(error, TimeoutError | BlockingIOError)
            self._break(str(error) or type(error).__name__, all_queued=is_silent)

    # -- the connection

    def _open(self) -> Pair:
        address = self._address()
        if self._pair is not None and self._pair.address != address:
            self._lost = self._lost or "the destination has moved"
        if self._lost:
            self._break(self._lost)
        if self._pair is None:
            pair = open_pair(address, self._credentials, self._transports)
            with self._changed:
                self._pair = pair
                if self._stop:
                    pair.cut()
            name = f"kv answers of {self._destination}"
            pair.reader = threading.Thread(target=self._read, args=(pair,), name=name, daemon=True)
            pair.reader.start()
        return self._pair

    def _read(self, pair: Pair) -> None:
        """Read the answers on one connection until it ends."""
        try:
            while (message := next_message(pair.connection)) is not None:
                if not isinstance(message, KvTaken):
                    raise ConnectionError(f"{type(message).__name__} is not an answer to KV slices")
                with self._changed:
                    if self._pair is not pair:
                        return
                    if not 0 < message.slices <= len(self._in_flight):
                        raise ConnectionError(
                            f"the receiver confirmed {message.slices} slices, more than were sent"
                        )
                    taken = [self._in_flight.popleft() for _ in range(message.slices)]
                    self._moved_s = time.monotonic()
                    if self._queue:
                        self._changed.notify_all()
                self._finish([item for group in taken for item in group])
            text = "the other side closed the connection"
        except (OSError, ValueError) as error:
            text = str(error)
        with self._changed:
            if self._pair is pair:
                self._lost = text
                self._changed.notify_all()

    def _break(self, text: str, also: Group | None = None, all_queued: bool = False) -> None:
        """Close the connection; fail what it carried and, if asked, all that is queued."""
        with self._changed:
            pair, self._pair, self._lost, self._silent = self._pair, None, "", False
            items = [*(item for group in self._in_flight for item in group), *(also or ())]
            self._in_flight.clear()
            if all_queued:
                items += self._queue
                self._queue.clear()
            departures = {item.departure: None for item in items} | dict.fromkeys(self._carried)
            self._carried.clear()
        if pair is not None:
            pair.close()
        self._give_back(items, departures, text)

    def _give_back(self, items: Group, departures: Iterable[KvDeparture], text: str) -> None:
        if items:
            log.warning("KV to %s: %s", self._destination, text)
        for departure in departures:
            self._fail(departure, f"sending the KV cache to {self._destination} failed: {text}")
        self._finish(items)


def _header(group: Group, pulls: bool) -> KvSlice:
    item = group[0]
    return KvSlice(
        request_id=item.departure.request_id,
        first_layer=item.layer,
        end_layer=group[-1].layer + 1,
        first_head=item.heads[0],
        end_head=item.heads[1],
        first_token=item.first_token,
        end_token=item.end_token,
        payload_bytes=sum(item.bytes for item in group),
        runs=item.runs.to_bytes() if pulls else b"",
    )
