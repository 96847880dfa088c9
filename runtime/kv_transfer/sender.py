"""The sending side of a KV cache's way from a prefill to a decode replica.

Each destination has a lane with a thread of its own. A layer is queued as soon as it is computed; the thread
that computes never waits for the network.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from runtime.kv_cache.layout import KvTransfer
from runtime.kv_cache.pages import Pages
from runtime.kv_transfer.departure import Item, Push
from runtime.kv_transfer.pair import Address
from runtime.kv_transfer.shaping import Shaper
from runtime.kv_transfer.stream import Group, Lane
from runtime.kv_transfer.transports.base import DEADLINE_S
from runtime.kv_transfer.transports.registry import AUTO, make_transport, offered
from runtime.protocol.handshake import Introduction
from runtime.protocol.to_workers import KvLink

if TYPE_CHECKING:
    import torch

    from runtime.kv_transfer.memory import SharedPool


class KvSender:
    """Pushes KV caches of one worker.

    Parameters
    ----------
    introduction : of this worker to the others
    cache, shared : the pool, and the shared memory that it is in, if it is
    peers : address of every worker
    on_sent : called once with a request id when nothing of it is left to send, or it was given up: its blocks
        are not read any more; from any thread
    on_failed : called with a request id and a reason, before on_sent, if a destination is lost
    transport : "auto", or the only one to use
    links : emulated links of this worker
    deadline_s : how long nothing may move while something should

    Raises
    ------
    InputError : no such transport
    """

    def __init__(
        self,
        introduction: Introduction,
        cache: Pages,
        peers: dict[str, Address],
        on_sent: Callable[[str], None],
        on_failed: Callable[[str, str], None],
        *,
        shared: SharedPool | None = None,
        transport: str = AUTO,
        links: Iterable[KvLink] = (),
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._introduction, self._cache = introduction, cache
        self._on_sent, self._on_failed = on_sent, on_failed
        made = [make_transport(name, cache, deadline_s, shared) for name in offered(transport)]
        self._transports = [each for each in made if each is not None]
        self._lanes: dict[str, Lane] = {}
        self._pushes: dict[str, Push] = {}
        self._lock = threading.Lock()
        self._peers: dict[str, Address] = {}
        self._links: dict[str, KvLink] = {}
        self.reconnect(peers, links)

    def reconnect(self, peers: dict[str, Address], links: Iterable[KvLink] = ()) -> None:
        """Others have come, gone or moved: what is for a worker that is gone fails."""
        with self._lock:
            self._peers = dict(peers)
            self._links = {
                link.destination: link for link in links if link.source == self._introduction.worker
            }
            gone = [self._lanes.pop(name) for name in list(self._lanes) if name not in peers]
            for destination, lane in self._lanes.items():
                lane.shaper = self._shaper(destination)
        for lane in gone:
            lane.close()

    def begin(self, request_id: str, plan: tuple[KvTransfer, ...], first_token: int, end_token: int) -> None:
        """Announce that tokens [first, end) of a request go out by a plan."""
        push = Push(request_id, plan, first_token, end_token)
        if push.is_over:
            self._on_sent(request_id)
        else:
            with self._lock:
                self._pushes[request_id] = push

    def layer_ready(
        self,
        request_id: str,
        layer: int,
        table: Sequence[int],
        upto_token: int,
        event: torch.cuda.Event | None = None,
    ) -> None:
        """Send what is new of a layer: keys and values of all tokens before `upto_token` are in the pool,
        once the event has happened. Requests that are unknown or over are ignored."""
        with self._lock:
            push = self._pushes.get(request_id)
            items = push.advance(self._cache, layer, table, upto_token, event) if push else []
        by_lane: dict[str, list[Item]] = defaultdict(list)
        for item in items:
            by_lane[item.destination].append(item)
        for destination, members in by_lane.items():
            self._lane(destination).put(members)

    def give_up(self, request_id: str) -> None:
        """Send nothing more of a cancelled request; on_sent comes as soon as its blocks are free."""
        with self._lock:
            push = self._pushes.get(request_id)
            if push is None:
                return
            push.given_up = True
            is_over = self._drop_if_over(push)
        if is_over:
            self._on_sent(request_id)

    def close(self) -> None:
        """End all lanes; requests on their way fail."""
        self.reconnect({})

    def _lane(self, destination: str) -> Lane:
        with self._lock:
            if destination not in self._lanes:
                self._lanes[destination] = Lane(
                    self._introduction,
                    destination,
                    self._transports,
                    lambda: self._address(destination),
                    self._shaper(destination),
                    self._finish,
                    self._fail,
                )
            return self._lanes[destination]

    def _address(self, destination: str) -> Address:
        if destination not in self._peers:
            raise ConnectionError("nobody knows where it is")
        return self._peers[destination]

    def _shaper(self, destination: str) -> Shaper:
        link = self._links.get(destination)
        return Shaper(link.bandwidth_bytes_s, link.latency_s) if link else Shaper()

    # -- called by lanes

    def _finish(self, items: Group) -> None:
        over = list[str]()
        with self._lock:
            for item in items:
                item.push.finish()
                if self._drop_if_over(item.push):
                    over.append(item.push.request_id)
        for request_id in over:
            self._on_sent(request_id)

    def _fail(self, push: Push, text: str) -> None:
        with self._lock:
            if push.given_up or push.is_over:
                return
            push.given_up = True
            push.hold()  # so that on_sent comes after on_failed, whatever other lanes do meanwhile
        self._on_failed(push.request_id, text)
        with self._lock:
            push.finish()
            is_over = self._drop_if_over(push)
        if is_over:
            self._on_sent(push.request_id)

    def _drop_if_over(self, push: Push) -> bool:
        """Forget a push at its end; True once."""
        if push.is_over and self._pushes.get(push.request_id) is push:
            del self._pushes[push.request_id]
            return True
        return False
