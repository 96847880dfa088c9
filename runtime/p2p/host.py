"""Connections and channels to other nodes, for asyncio; libp2p itself runs in a thread of its own."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from cost_model.errors import InputError
from runtime.p2p.membership.identity import Identity
from runtime.p2p.transport.channel import Channel
from runtime.p2p.transport.gate import Gate, Notices, error_line
from runtime.p2p.transport.node_thread import NodeThread, peer_of
from runtime.p2p.transport.stream_channel import StreamChannel

if TYPE_CHECKING:
    from runtime.p2p.membership.mdns import Neighbours

log = logging.getLogger(__name__)

MEET_EVERY_S = 2.0
REMIND_EVERY_S = 60.0  # how often an unreachable bootstrap peer is reported again

Handler = Callable[[Channel], Awaitable[None]]


class Peers:
    """One node of the network: it listens, stays connected to its bootstrap peers, serves and opens channels.

    Parameters
    ----------
    identity : key pair of this node
    listen : multiaddrs to listen on, such as /ip4/0.0.0.0/tcp/7400; port 0 for any free port
    network_key : 32 bytes that all nodes of the private network share; None: no private network
    allowed : peer ids that may connect; None: everybody who has the network key
    bootstrap : multiaddrs with /p2p/PEER_ID of peers to stay connected to
    mdns : also find peers of the same private network on the local network by multicast DNS
    protocol : version of the messages on channels; peers with a different one are refused

    Raises
    ------
    InputError : there is neither a network key nor a list of allowed peers, or a bootstrap address is invalid
    """

    def __init__(
        self,
        identity: Identity,
        listen: Sequence[str],
        network_key: bytes | None,
        allowed: Collection[str] | None,
        bootstrap: Sequence[str],
        mdns: bool = False,
        protocol: str = "",
    ) -> None:
        if network_key is None and allowed is None:
            problem = "anybody could connect"
            raise InputError("peers", "", problem, "give a network key or a list of allowed peers")
        for address in bootstrap:
            peer_of(address)
        self.peer_id = identity.peer_id
        self.addresses: list[str] = []
        self.connected: set[str] = set()
        self.latency_ms: dict[str, float] = {}
        self._listen, self._bootstrap = listen, bootstrap
        self._network_key, self._mdns = network_key or b"", mdns
        self._neighbours: Neighbours | None = None
        self._gate = Gate(allowed, protocol)
        self._thread = NodeThread(identity, network_key, self._gate, self)
        self._handlers: dict[str, Handler] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._channels: set[StreamChannel] = set()
        self._opening: dict[int, asyncio.Future[Channel]] = {}
        self._tickets = itertools.count()
        self._known: dict[str, tuple[str, ...]] = {}
        self._on_lost: list[Callable[[str], None]] = []
        self._on_joined: list[Callable[[str], None]] = []
        self._on_measured: list[Callable[[str, float], None]] = []
        self._on_not_joined: list[Callable[[str], None]] = []
        self._not_joined: dict[str, str] = {}
        self._all_refused = asyncio.Event()
        self._notices = Notices(REMIND_EVERY_S)
        self._running = False

    @property
    def refused(self) -> dict[str, int]:
        """How often each stranger was refused, by peer id, or by IP address if it proved no id."""
        return self._gate.refused

    async def start(self) -> None:
        """Begin to listen and to connect.

        Raises
        ------
        InputError : an address cannot be listened on, or has no multicast for mDNS
        """
        loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._thread.start(loop, self._listen, self._bootstrap)
        await self._started
        if self._mdns:
            await self._announce()

    async def stop(self) -> None:
        """Close every channel after delivering what was sent, and end the thread. May be called twice."""
        if not self._running:
            return
        self._running = False
        if self._neighbours is not None:
            await self._neighbours.stop()
        for task in self._tasks:
            task.cancel()
        for channel in list(self._channels):
            channel.close()
        bridge = self._thread.bridge
        bridge.to_trio(self._thread.stopping.set)
        await self._ended
        self._thread.join()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _announce(self) -> None:
        from runtime.p2p.membership.mdns import Neighbours

        neighbours = Neighbours(self.peer_id, self.addresses, self._network_key, self._found)
        try:
            await neighbours.start()
        except OSError as error:
            await self.stop()
            problem = f"the interface of --listen has no multicast: {error.strerror or error}"
            raise InputError(
                "--mdns", "", problem, "give the addresses of other nodes with --join"
            ) from error
        self._neighbours = neighbours
        self._keep(self._meet(neighbours))

    def _found(self, peer_id: str, addresses: list[str]) -> None:
        self.learn(peer_id, addresses)
        self.connect(peer_id)

    async def _meet(self, neighbours: Neighbours) -> None:
        """Every MEET_EVERY_S, connect to one random neighbour that is not connected."""
        while True:
            await asyncio.sleep(MEET_EVERY_S)
            if unmet := neighbours.known.keys() - self.connected:
                self._found(peer_id := random.choice(list(unmet)), neighbours.known[peer_id])

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def serve(self, service: str, handler: Handler) -> None:
        """Call `handler` with each channel that peers open to this service, then close the channel."""
        self._handlers[service] = handler
        self._thread.serve(service)

    def learn(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Remember the addresses of a peer for `open` and `connect`."""
        self._known[peer_id] = tuple(addresses)

    def forget(self, peer_id: str) -> None:
        """Forget the addresses of a peer."""
        self._known.pop(peer_id, None)

    def connect(self, peer_id: str) -> None:
        """Try once to connect to a peer with known addresses; success calls `on_peer_joined`'s callbacks."""
        if self._running and peer_id in self._known and peer_id not in self.connected:
            self._thread.bridge.to_trio(self._thread.found, peer_id, list(self._known[peer_id]))

    async def open(self, target: str, service: str) -> Channel:
        """Open a channel to a service of a peer, given by its id or by a multiaddr with /p2p/PEER_ID.

        Raises
        ------
        ConnectionError : the peer was not reached in time, or does not offer the service
        InputError : the multiaddr is invalid
        """
        by_address = target.startswith("/")
        peer_id = peer_of(target) if by_address else target
        addresses = ((target,) if by_address else ()) + self._known.get(peer_id, ())
        if not self._running:
            raise ConnectionError(f"peer {peer_id}: this node is not connected to any network")
        ticket, future = next(self._tickets), asyncio.get_running_loop().create_future()
        self._opening[ticket] = future
        self._thread.bridge.to_trio(self._thread.open, ticket, peer_id, addresses, service)
        try:
            return await future
        except ConnectionError as error:
            raise ConnectionError(f"peer {peer_id}: cannot open service {service}: {error}") from None
        finally:
            self._opening.pop(ticket, None)

    def on_peer_lost(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with the id of each peer whose last connection is gone."""
        self._on_lost.append(callback)

    def on_peer_joined(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with the id of each peer that becomes connected."""
        self._on_joined.append(callback)

    def on_measured(self, callback: Callable[[str, float], None]) -> None:
        """Call `callback` with the peer id and the milliseconds of each answered ping."""
        self._on_measured.append(callback)

    def on_not_joined(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with a line for the operator while a bootstrap peer cannot be joined."""
        self._on_not_joined.append(callback)

    @property
    def refused_by_all(self) -> bool:
        """Whether this node has no way into the network until somebody changes options.

        True if all bootstrap peers refuse this node or are refused, no peer is connected, and mDNS is off.
        """
        return self._all_refused.is_set()

    async def until_refused_by_all(self) -> list[str]:
        """Wait until `refused_by_all`; returns the reason for each bootstrap peer."""
        await self._all_refused.wait()
        return list(self._not_joined.values())

    # callbacks of the libp2p thread

    def started(self, addresses: list[str]) -> None:
        """The thread listens on these addresses."""
        self.addresses, self._running = addresses, True
        self._started.set_result(None)

    def ended(self, error: BaseException | None) -> None:
        """The thread has ended, perhaps with an error; all channels end too."""
        if error is not None and self._started.done():
            log.error("the peer-to-peer network failed: %s", error_line(error))
        self._running = False
        for channel in list(self._channels):
            channel.end()
        for future in self._opening.values():
            if not future.done():
                future.set_exception(ConnectionError("this node has left the network"))
        for peer_id in list(self.connected):
            self.lost(peer_id)
        if not self._started.done():
            self._started.set_exception(
                error or ConnectionError("the peer-to-peer network ended while it was starting")
            )
        self._ended.set_result(None)

    def joined(self, peer_id: str) -> None:
        """A peer is connected."""
        self.connected.add(peer_id)
        self._all_refused.clear()
        for address in [each for each in self._not_joined if peer_of(each) == peer_id]:
            del self._not_joined[address]
        for callback in self._on_joined:
            callback(peer_id)

    def lost(self, peer_id: str) -> None:
        """A peer's last connection is gone."""
        self.connected.discard(peer_id)
        self.latency_ms.pop(peer_id, None)
        for callback in self._on_lost:
            callback(peer_id)

    def not_joined(self, address: str, reason: str, final: bool) -> None:
        """A bootstrap peer could not be joined; final: retries are pointless until options change."""
        if final:
            self._not_joined[address] = reason
        others = {each for each in self._bootstrap if peer_of(each) != self.peer_id}
        if not self.connected and not self._mdns and self._not_joined.keys() >= others:
            self._all_refused.set()
        if self._notices.times(address, reason if final else ""):
            for callback in self._on_not_joined:
                callback(f"not joined yet, still trying: {reason}")

    def measured(self, peer_id: str, latency_ms: float) -> None:
        """A peer has answered a ping."""
        self.latency_ms[peer_id] = latency_ms
        for callback in self._on_measured:
            callback(peer_id, latency_ms)

    def accepted(self, channel: StreamChannel) -> None:
        """A peer has opened a channel."""
        self._channels.add(channel)
        self._keep(self._handle(channel))

    async def _handle(self, channel: StreamChannel) -> None:
        try:
            await self._handlers[channel.service](channel)
        except Exception as error:
            log.warning(
                "channel %s of peer %s failed: %s", channel.service, channel.peer_id, error_line(error)
            )
        finally:
            channel.close()
            self._channels.discard(channel)

    def opened(self, ticket: int, channel: StreamChannel) -> None:
        """A channel that this node asked for is open."""
        future = self._opening.get(ticket)
        if future is None or future.done() or not self._running:
            channel.close()
        else:
            self._channels.add(channel)
            channel.on_end = self._channels.discard
            future.set_result(channel)

    def not_opened(self, ticket: int, reason: str) -> None:
        """A channel that this node asked for could not be opened."""
        future = self._opening.get(ticket)
        if future is not None and not future.done():
            future.set_exception(ConnectionError(reason))
