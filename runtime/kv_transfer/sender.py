"""The sending side of KV transfers from a prefill to a decode replica.

Each destination has a `KvStream` with its own thread. A layer is queued as soon as it is computed; the thread
that computes never waits for the network.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from runtime.kv_cache.layout import KvTransfer
from runtime.kv_cache.pages import Pages
from runtime.kv_transfer.departure import SLICE_BYTES, Item, KvDeparture
from runtime.kv_transfer.pair import Address
from runtime.kv_transfer.slices import LIMIT_BYTES
from runtime.kv_transfer.stream import Group, KvStream, Shaper, Shapers
from runtime.kv_transfer.transports.base import DEADLINE_S
from runtime.kv_transfer.transports.registry import AUTO, make_transport, offered
from runtime.protocol.handshake import Credentials
from runtime.protocol.to_workers import KvLink

if TYPE_CHECKING:
    import torch

    from runtime.kv_transfer.memory import SharedPool


class KvSender:
    """Sends the KV caches of one worker.

    Parameters
    ----------
    credentials : with which this worker connects to others
    cache, shared : the pool, and the shared memory that it is in, if any
    peers : address of every worker
    on_sent : called once with a request id when all of it was sent or it was given up, so its blocks are no
        longer read; from any thread
    on_failed : called with a request id and a reason, before on_sent, if a destination is lost
    transport : "auto", or the name of the only one to offer
    links : emulated links of this worker
    shapers : these, where other senders of the worker share them
    deadline_s : a connection that makes no progress for so long is broken

    Raises
    ------
    InputError : no transport has that name
    """

    def __init__(
        self,
        credentials: Credentials,
        cache: Pages,
        peers: dict[str, Address],
        on_sent: Callable[[str], None],
        on_failed: Callable[[str, str], None],
        *,
        shared: SharedPool | None = None,
        transport: str = AUTO,
        links: Iterable[KvLink] = (),
        shapers: Shapers | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._credentials, self._cache = credentials, cache
        self._on_sent, self._on_failed = on_sent, on_failed
        made = [make_transport(name, cache, deadline_s, shared) for name in offered(transport)]
        self._transports = [each for each in made if each is not None]
        # To copy a slice from GPU to GPU takes some time however small it is.
        self._slice_bytes = LIMIT_BYTES if cache.on_gpu else SLICE_BYTES
        self._streams: dict[str, KvStream] = {}
        self._shapers = shapers or Shapers()
        self._departures: dict[str, KvDeparture] = {}
        self._lock = threading.Lock()
        self._peers: dict[str, Address] = {}
        self._links: dict[str, KvLink] = {}
        self.reconnect(peers, links)

    def reconnect(self, peers: dict[str, Address], links: Iterable[KvLink] = ()) -> None:
        """Take new addresses and links; requests for workers that are gone fail."""
        with self._lock:
            self._peers = dict(peers)
            self._links = {
                link.destination: link for link in links if link.source == self._credentials.worker
            }
            gone = [self._streams.pop(name) for name in list(self._streams) if name not in peers]
            for destination, stream in self._streams.items():
                stream.shaper = self._shaper(destination)
        for stream in gone:
            stream.close()

    def begin(self, request_id: str, plan: tuple[KvTransfer, ...], first_token: int, end_token: int) -> None:
        """Announce that tokens [first, end) of a request will be sent by this plan."""
        departure = KvDeparture(request_id, plan, first_token, end_token, self._slice_bytes)
        if departure.is_over:
            self._on_sent(request_id)
        else:
            with self._lock:
                self._departures[request_id] = departure

    def layer_ready(
        self,
        request_id: str,
        layer: int,
        table: Sequence[int],
        upto_token: int,
        event: torch.cuda.Event | None = None,
    ) -> None:
        """Send what is new in a layer: once the event has happened, keys and values of all tokens before
        `upto_token` are in the pool. Unknown requests are ignored."""
        with self._lock:
            departure = self._departures.get(request_id)
            items = departure.advance(self._cache, layer, table, upto_token, event) if departure else []
        by_destination: dict[str, list[Item]] = defaultdict(list)
        for item in items:
            by_destination[item.destination].append(item)
        for destination, members in by_destination.items():
            self._stream_to(destination).put(members)

    def give_up(self, request_id: str) -> None:
        """Send nothing more of a cancelled request; on_sent is called as soon as its blocks are free."""
        with self._lock:
            departure = self._departures.get(request_id)
            if departure is None:
                return
            departure.given_up = True
            is_over = self._drop_if_over(departure)
        if is_over:
            self._on_sent(request_id)

    def close(self) -> None:
        """End all streams and wait for that; requests that are not sent completely fail."""
        with self._lock:
            streams = list(self._streams.values())
        self.reconnect({})
        for stream in streams:
            stream.join()

    def _stream_to(self, destination: str) -> KvStream:
        with self._lock:
            if destination not in self._streams:
                self._streams[destination] = KvStream(
                    self._credentials,
                    destination,
                    self._transports,
                    lambda: self._address(destination),
                    self._shaper(destination),
                    self._finish,
                    self._fail,
                    self._slice_bytes,
                )
            return self._streams[destination]

    def _address(self, destination: str) -> Address:
        if destination not in self._peers:
            raise ConnectionError("its address is unknown")
        return self._peers[destination]

    def _shaper(self, destination: str) -> Shaper:
        link = self._links.get(destination)
        if link is None:
            return self._shapers.of(destination)
        return self._shapers.of(destination, link.bandwidth_bytes_s, link.latency_s)

    # -- called by KvStream

    def _finish(self, items: Group) -> None:
        over = list[str]()
        with self._lock:
            for item in items:
                item.departure.finish()
                if self._drop_if_over(item.departure):
                    over.append(item.departure.request_id)
        for request_id in over:
            self._on_sent(request_id)

    def _fail(self, departure: KvDeparture, text: str) -> None:
        with self._lock:
            if departure.given_up or departure.is_over:
                return
            departure.given_up = True
            departure.hold()  # so that on_failed comes before on_sent, whatever other streams do meanwhile
        self._on_failed(departure.request_id, text)
        with self._lock:
            departure.finish()
            is_over = self._drop_if_over(departure)
        if is_over:
            self._on_sent(departure.request_id)

    def _drop_if_over(self, departure: KvDeparture) -> bool:
        """Forget a departure that is over; returns True once."""
        if departure.is_over and self._departures.get(departure.request_id) is departure:
            del self._departures[departure.request_id]
            return True
        return False
