"""The trio thread, in which libp2p runs: connections, dialling, services, and pings.

The asyncio thread calls it only through the bridge and is called back through `Listener`.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Protocol

import trio
from libp2p.abc import INetConn
from libp2p.custom_types import TProtocol
from libp2p.network.stream.net_stream import NetStream
from libp2p.peer.id import ID
from libp2p.protocol_muxer.multiselect import Multiselect
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.tools.anyio_service import background_trio_service
from libp2p.utils.address_validation import expand_wildcard_address
from multiaddr import Multiaddr

from cost_model.errors import InputError
from cost_model.printable import one_line
from runtime.p2p.membership.identity import Identity
from runtime.p2p.transport.bridge import Bridge
from runtime.p2p.transport.gate import Gate, Notices, causes, error_line, first_of, refusal_in
from runtime.p2p.transport.network import ConnectionEvents, cut, new_swarm
from runtime.p2p.transport.stream_channel import StreamChannel
from runtime.p2p.transport.watch import cancel_at, echo, ping, silence

log = logging.getLogger(__name__)

DIAL_S = 3.0
OPEN_S = 5.0
LEAVE_S = 2.0
RETRY_S = (0.25, 0.5, 1.0, 2.0)
PING = TProtocol("/hexgen2/ping/1")


def protocol_of(service: str) -> TProtocol:
    """The name of a service on the wire."""
    return TProtocol(f"/hexgen2/{service}/1")


class Listener(Protocol):
    """Callbacks to the asyncio thread, made in that thread."""

    def started(self, addresses: list[str]) -> None: ...
    def ended(self, error: BaseException | None) -> None: ...
    def joined(self, peer_id: str) -> None: ...
    def lost(self, peer_id: str) -> None: ...
    def measured(self, peer_id: str, latency_ms: float) -> None: ...
    def accepted(self, channel: StreamChannel) -> None: ...
    def opened(self, ticket: int, channel: StreamChannel) -> None: ...
    def not_opened(self, ticket: int, reason: str) -> None: ...
    def not_joined(self, address: str, reason: str, final: bool) -> None: ...


class NodeThread:
    """Runs libp2p. All methods except `start`, `join` and `serve` run in the trio thread."""

    def __init__(self, identity: Identity, network_key: bytes | None, gate: Gate, listener: Listener) -> None:
        self._identity, self._network_key, self._gate, self._listener = identity, network_key, gate, listener
        self._notices = Notices()
        self._services = Multiselect({PING: None})
        self._live: dict[str, list[INetConn]] = {}
        self._channels: set[StreamChannel] = set()
        self._dialling: dict[str, trio.Lock] = {}
        self._thread: threading.Thread | None = None

    def start(self, loop: Any, listen: Sequence[str], bootstrap: Collection[str]) -> None:
        """Start the thread; the listener's `started` follows, and in every case its `ended`."""
        self._thread = threading.Thread(
            target=self._run, args=(loop, listen, bootstrap), name="libp2p", daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread to end; call it after the listener's `ended`."""
        if self._thread is not None:
            self._thread.join()

    def serve(self, service: str) -> None:
        """Accept channels of this service."""
        self._services.add_handler(protocol_of(service), None)

    def _run(self, loop: Any, listen: Sequence[str], bootstrap: Collection[str]) -> None:
        error: BaseException | None = None
        try:
            trio.run(self._main, loop, listen, bootstrap)
        except BaseException as failure:
            log.debug("the libp2p thread failed", exc_info=True)
            error = first_of(failure)
        loop.call_soon_threadsafe(self._listener.ended, error)

    async def _main(self, loop: Any, listen: Sequence[str], bootstrap: Collection[str]) -> None:
        self.bridge = Bridge(loop)
        self.stopping = trio.Event()
        self._swarm = new_swarm(self._identity, self._network_key, self._gate)
        self._swarm.set_stream_handler(self._accept)
        self._swarm.register_notifee(ConnectionEvents(self._connected, self._disconnected))
        async with background_trio_service(self._swarm), trio.open_nursery() as nursery:
            self._nursery = nursery
            await self._listen(listen)
            self.bridge.to_asyncio(self._listener.started, self.addresses())
            for address in bootstrap:
                self._spawn(self._stay_connected, address)
            await self.stopping.wait()
            await self._leave()
            nursery.cancel_scope.cancel()

    def _spawn(self, function: Callable[..., Awaitable[object]], *arguments: Any) -> None:
        """Run a function in the background; if it fails, log that and carry on."""

        async def contained() -> None:
            try:
                await function(*arguments)
            except* Exception as errors:
                log.warning("%s failed: %s", function.__name__, error_line(errors))

        self._nursery.start_soon(contained)

    # addresses

    async def _listen(self, addresses: Sequence[str]) -> None:
        for address in addresses:
            _refuse_taken_port(Multiaddr(address))
            if not await self._swarm.listen(Multiaddr(address)):
                raise InputError("listen address", address, "cannot listen here", "choose another address")

    def addresses(self) -> list[str]:
        """The multiaddrs, with peer id, where others reach this node: for a wildcard, one per interface."""
        bound = [address for listener in self._swarm.listeners.values() for address in listener.get_addrs()]
        found: list[str] = []
        for address in bound:
            port = int(address.value_for_protocol("tcp"))
            wild = str(address).startswith(("/ip4/0.0.0.0/", "/ip6/::/"))
            found += map(str, expand_wildcard_address(address, port) if wild else [address])
        return [f"{address}/p2p/{self._identity.peer_id}" for address in dict.fromkeys(found)]

    def found(self, peer_id: str, addresses: list[str]) -> None:
        """Try to connect to a peer at these addresses, unless it is connected."""
        if not self._live.get(peer_id):
            self._spawn(self._try_found, peer_id, addresses)

    async def _try_found(self, peer_id: str, addresses: list[str]) -> None:
        try:
            await self._connection(peer_id, addresses)
        except Exception as error:
            refused = refusal_in(error)
            if refused is None or not refused.final:
                log.debug("cannot reach peer %s: %s", peer_id, error_line(error))
            elif self._notices.times(peer_id, refused.cause):
                log.warning("cannot connect to peer %s: %s", peer_id, error)

    async def _stay_connected(self, address: str) -> None:
        """Keep the peer at a bootstrap address connected: dial it now and whenever the connection is lost."""
        peer_id = peer_of(address)
        if peer_id == self._identity.peer_id:
            return
        failures = 0
        while True:
            try:
                await self._connection(peer_id, [address])
                failures = 0
            except Exception as error:
                failures += 1
                refused = refusal_in(error)
                final = refused is not None and refused.final
                reason = str(error) if isinstance(error, ConnectionError) else error_line(error)
                self.bridge.to_asyncio(self._listener.not_joined, address, reason, final)
            await trio.sleep(RETRY_S[min(failures, len(RETRY_S)) - 1] if failures else RETRY_S[1])

    # connections

    async def _connection(self, peer_id: str, addresses: Sequence[str]) -> INetConn:
        """The live connection to a peer; dials if there is none.

        Raises
        ------
        ConnectionError : the peer cannot be reached at any address
        """
        lock = self._dialling.setdefault(peer_id, trio.Lock())
        try:
            async with lock:
                if self._live.get(peer_id):
                    return self._live[peer_id][0]
                return await self._dial(peer_id, addresses)
        finally:
            if not lock.locked():  # no other task is dialling it
                self._dialling.pop(peer_id, None)

    async def _dial(self, peer_id: str, addresses: Sequence[str]) -> INetConn:
        failure = ConnectionError("no address of it is known")
        for address in addresses:
            try:
                with trio.fail_after(DIAL_S):
                    return await self._swarm.dial_addr(Multiaddr(address), ID.from_string(peer_id))
            except Exception as error:
                found = _dial_failure(address, error)
                if refusal_in(failure) is None:  # a refusal says more than silence at other addresses
                    failure = found
        raise failure

    def _connected(self, connection: INetConn) -> None:
        peer_id = str(connection.muxed_conn.peer_id)
        if not self._gate.admits(peer_id):
            self._spawn(cut, connection)
            return
        first = not self._live.get(peer_id)
        self._live.setdefault(peer_id, []).append(connection)
        self._spawn(self._watch, peer_id, connection)
        if first:
            self.bridge.to_asyncio(self._listener.joined, peer_id)

    def _disconnected(self, connection: INetConn) -> None:
        peer_id = str(connection.muxed_conn.peer_id)
        others = self._live.get(peer_id, [])
        if connection in others:
            others.remove(connection)
            if not others:
                del self._live[peer_id]
                self.bridge.to_asyncio(self._listener.lost, peer_id)

    async def _watch(self, peer_id: str, connection: INetConn) -> None:
        """Ping a peer, and cut the connection when the peer has been silent for too long."""
        muxer: Any = connection.muxed_conn

        async def send_pings() -> None:
            try:
                stream = await self._negotiated(connection, PING)
                await ping(stream, lambda ms: self.bridge.to_asyncio(self._listener.measured, peer_id, ms))
            except* Exception as errors:  # libp2p raises many kinds when a connection ends
                log.debug("pings to peer %s ended: %s", peer_id, error_line(errors))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_pings)
            nursery.start_soon(cancel_at, muxer.event_closed, nursery.cancel_scope)
            await silence(muxer)
            log.warning("cut the connection to peer %s: it does not answer", peer_id)
            self._disconnected(connection)
            await cut(connection)  # this also ends a ping that is stuck in a write
            nursery.cancel_scope.cancel()

    # streams

    async def _negotiated(self, connection: INetConn, protocol: TProtocol) -> NetStream:
        stream = await connection.new_stream()
        await MultiselectClient().select_one_of([protocol], MultiselectCommunicator(stream), int(OPEN_S))
        return stream  # type: ignore[return-value]

    async def _accept(self, stream: Any) -> None:
        """Serve one stream that a peer opened; an error ends only that stream."""
        peer_id = str(stream.muxed_conn.peer_id)
        try:
            protocol, _ = await self._services.negotiate(MultiselectCommunicator(stream), int(OPEN_S))
            if protocol is None or not self._gate.admits(peer_id):
                await stream.reset()
            elif protocol == PING:
                await echo(stream)
            else:
                channel = StreamChannel(stream, peer_id, protocol.split("/")[2], self.bridge)
                self.bridge.to_asyncio(self._listener.accepted, channel)
                await self._run_channel(channel)
        except* Exception as errors:
            log.debug("a stream of peer %s failed: %s", peer_id, error_line(errors))

    async def _run_channel(self, channel: StreamChannel) -> None:
        self._channels.add(channel)
        try:
            await channel.run()
        finally:
            self._channels.discard(channel)

    def open(self, ticket: int, peer_id: str, addresses: Sequence[str], service: str) -> None:
        """Open a channel; the listener's `opened` or `not_opened` follows, with the same ticket."""
        self._spawn(self._open, ticket, peer_id, addresses, service)

    async def _open(self, ticket: int, peer_id: str, addresses: Sequence[str], service: str) -> None:
        channel = None
        reason = f"no answer within {OPEN_S:g} s"
        try:
            with trio.move_on_after(OPEN_S):
                connection = await self._connection(peer_id, addresses)
                stream = await self._negotiated(connection, protocol_of(service))
                channel = StreamChannel(stream, peer_id, service, self.bridge)
        except Exception as error:
            reason = str(error) if isinstance(error, ConnectionError) else error_line(error)
        if channel is None:
            self.bridge.to_asyncio(self._listener.not_opened, ticket, reason)
            return
        self.bridge.to_asyncio(self._listener.opened, ticket, channel)
        await self._run_channel(channel)

    # the end

    async def _leave(self) -> None:
        """Give closed channels LEAVE_S to send what is queued, then cut every connection."""
        with trio.move_on_after(LEAVE_S):
            while self._channels:
                await trio.sleep(0.01)
        async with trio.open_nursery() as nursery:
            for connection in [one for several in self._live.values() for one in several]:
                nursery.start_soon(cut, connection)


def _dial_failure(address: str, error: Exception) -> ConnectionError:
    """The error for an operator when dialling an address fails."""
    refused = refusal_in(error)
    if refused is not None:
        reason = f"{address}: {refused}"
    elif isinstance(error, trio.TooSlowError):
        reason = f"{address} does not answer within {DIAL_S:g} s"
    elif any(isinstance(cause, ConnectionRefusedError) for cause in causes(error)):
        reason = f"{address}: connection refused, nothing listens there"
    else:
        reason = f"{address}: {error_line(causes(error)[-1])}"
    failure = ConnectionError(one_line(reason))
    failure.__cause__ = error
    return failure


def peer_of(address: str) -> str:
    """The peer id at the end of a multiaddr.

    Raises
    ------
    InputError : it is not a multiaddr, or has no peer id
    """
    try:
        peer_id = Multiaddr(address).value_for_protocol("p2p")
        return str(ID.from_string(str(peer_id)))
    except Exception as error:
        remedy = "write /ip4/ADDRESS/tcp/PORT/p2p/PEER_ID"
        raise InputError("peer address", address, "is not an address with a peer id", remedy) from error


def _refuse_taken_port(address: Multiaddr) -> None:
    """Raise InputError if the port is in use; libp2p would silently share it (SO_REUSEPORT)."""
    host, port = str(address).split("/")[2], int(address.value_for_protocol("tcp"))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            problem, remedy = f"cannot listen here: {error.strerror}", "choose another address or port"
            raise InputError("listen address", str(address), problem, remedy) from error
