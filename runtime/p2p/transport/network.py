"""Adapters for the parts of py-libp2p that a node uses. All use of its private parts is in this file.

Tried with libp2p 0.8.1 only. The adapters change the following. Only Noise is offered, so that no plaintext
client can connect. A stranger is refused as soon as its handshake shows who it is, and both ends can say why.
An inbound connection frees its slot when it ends (libp2p: when the host stops). A muxer that fails ends its
own connection, not the host. There is no identify, no relay, and no dialling by libp2p itself.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from typing import Any, cast

import trio
from libp2p.abc import INetConn, INotifee, IRawConnection, ISecureConn
from libp2p.crypto.x25519 import create_new_key_pair as new_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.io.exceptions import IOException
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import TYPE_DATA, YAMUX_HEADER_FORMAT, Yamux, YamuxStream
from libp2p.transport.tcp.tcp import TCP
from libp2p.transport.upgrader import TransportUpgrader

from runtime.p2p.membership.identity import Identity
from runtime.p2p.transport.gate import Cause, Gate, Refused, causes, error_line, refusal_in
from runtime.p2p.transport.greeting import greet
from runtime.p2p.transport.opening import MemberConnection

log = logging.getLogger(__name__)
for module in ("transport.tcp", "network.swarm", "security", "protocol_muxer"):  # these log every attempt
    logging.getLogger(f"libp2p.{module}").setLevel(logging.CRITICAL)

MUXER = TProtocol("/hexgen2/yamux/1")  # for the standard name libp2p ignores the class and uses its own Yamux
UPGRADE_S = 4.0
MAX_CONNECTIONS = 4096


class GatedNoise(NoiseTransport):
    """Noise, followed by an exchange of greetings."""

    def __init__(self, identity: Identity, gate: Gate) -> None:
        super().__init__(identity.key_pair, noise_privkey=new_noise_key_pair().private_key)
        self._own_id, self._gate = identity.peer_id, gate

    async def secure_inbound(self, conn: IRawConnection) -> ISecureConn:
        raw = cast(MemberConnection, conn)
        written = raw.written
        try:
            secured = await super().secure_inbound(conn)
        except IOException as error:
            if raw.written == written:
                raise
            problem = "it ended the handshake on seeing who this node is, so it probably expects another peer"
            remedy = f"its --join must end in /p2p/{self._own_id}"
            raise Refused(Cause.OTHER_PEER, problem, remedy) from error
        return await self._greeted(raw, secured)

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> ISecureConn:
        try:
            secured = await super().secure_outbound(conn, peer_id)
        except PeerIDMismatchesPubkey as error:
            found = str(error).rpartition("remote_peer_id_from_pubkey=")[2]  # found only in the message
            problem = f"the peer at this address is {found}"
            remedy = f"if that is the one you mean, write /p2p/{found} at the end of --join"
            raise Refused(Cause.OTHER_PEER, problem, remedy) from error
        return await self._greeted(cast(MemberConnection, conn), secured)

    async def _greeted(self, raw: MemberConnection, secured: ISecureConn) -> ISecureConn:
        try:
            await greet(secured, self._own_id, self._gate)
        except Refused as refused:
            refused.peer_id = str(secured.get_remote_peer())
            await secured.close()
            raise
        raw.trust()
        return secured


class MemberTcp(TCP):
    """TCP that applies the network key to outbound connections."""

    def __init__(self, network_key: bytes | None) -> None:
        super().__init__()
        self._network_key = network_key

    async def dial(self, maddr: Any) -> IRawConnection:
        connection: Any = await super().dial(maddr)
        return MemberConnection(connection.stream, True, self._network_key)


class ContainedYamux(Yamux):
    """Yamux that closes only its own connection when a peer's data makes it fail.

    heard : number of pieces of data received from the peer so far
    """

    heard: int = 0

    async def send_data(self, stream: YamuxStream, data: bytes) -> None:
        """Write to a stream whose window has room for it; libp2p's own write gives up half-way after 5 s."""
        stream.send_window -= len(data)
        head = struct.pack(YAMUX_HEADER_FORMAT, 0, TYPE_DATA, 0, stream.stream_id, len(data))
        await self._write_frame(head + data)

    async def grant(self, stream: YamuxStream, size_bytes: int) -> None:
        """Let the peer send more on a stream; libp2p's own read would send a grant for every frame."""
        stream.recv_window += size_bytes
        await stream.send_window_update(size_bytes)

    async def _write_frame(self, data: bytes) -> None:
        """Write one whole frame: a write cancelled half-way would leave the ciphers of both ends out of step.

        `cut` ends a write that the peer never reads. (libp2p's own method also formats a log line per frame.)
        """
        with trio.CancelScope(shield=True):
            async with self._write_lock:
                await self.secured_conn.write(data)

    async def _read_data_body(self, length: int) -> bytes:
        body = await super()._read_data_body(length)
        self.heard += 1
        return body

    async def start(self) -> None:
        try:
            await super().start()
        except* Exception as errors:
            log.warning("connection to peer %s broke: %s", self.peer_id, error_line(errors))
            await self._cleanup_on_error()


class NoDialling(AutoConnector):
    """Switches off libp2p's dialler, which dials all known addresses until thousands are connected."""

    async def start(self) -> None:
        """Do nothing."""

    async def run_background_task(self, nursery: trio.Nursery) -> None:
        """Do nothing."""


class PeerSwarm(Swarm):
    """libp2p's swarm, which also logs refusals and frees the slots of inbound connections."""

    gate: Gate
    network_key: bytes | None

    async def _do_handle_inbound_connection(
        self, read_write_closer: Any, maddr: Any, failure_event: Any
    ) -> None:
        connection = MemberConnection(read_write_closer, False, self.network_key)
        host = host_at(read_write_closer)
        try:
            muxed = await self.upgrade_inbound_raw_conn(connection, maddr)
        except Exception as error:
            self._refuse(host, error)
            await connection.close()
            return
        await muxed.event_closed.wait()  # type: ignore[attr-defined]

    def _refuse(self, host: str, error: Exception) -> None:
        refused = refusal_in(error)
        if refused is None and any(isinstance(cause, trio.TooSlowError) for cause in causes(error)):
            problem = f"it did not finish the handshake within {UPGRADE_S:g} s"
            refused = Refused(Cause.UNCLEAR, problem, "it hangs, or is not a HexGen-2 node")
        if refused is None:
            refused = Refused(Cause.UNCLEAR, error_line(causes(error)[-1]))
        self.gate.refuse(host, refused)


class ConnectionEvents(INotifee):
    """Calls back when a connection opens or closes."""

    def __init__(
        self, connected: Callable[[INetConn], None], disconnected: Callable[[INetConn], None]
    ) -> None:
        self._connected, self._disconnected = connected, disconnected

    async def connected(self, network: Any, conn: INetConn) -> None:
        self._connected(conn)

    async def disconnected(self, network: Any, conn: INetConn) -> None:
        self._disconnected(conn)

    async def opened_stream(self, network: Any, stream: Any) -> None:
        """Not used."""

    async def closed_stream(self, network: Any, stream: Any) -> None:
        """Not used."""

    async def listen(self, network: Any, multiaddr: Any) -> None:
        """Not used."""

    async def listen_close(self, network: Any, multiaddr: Any) -> None:
        """Not used."""


def new_swarm(identity: Identity, network_key: bytes | None, gate: Gate) -> PeerSwarm:
    """Make the swarm of a node: TCP, the network key if there is one, Noise, Yamux."""
    peer_id = ID.from_pubkey(identity.key_pair.public_key)
    peers = PeerStore()
    peers.add_key_pair(peer_id, identity.key_pair)
    swarm = PeerSwarm(
        peer_id,
        peers,
        TransportUpgrader({NOISE: GatedNoise(identity, gate)}, {MUXER: ContainedYamux}),
        transports=[MemberTcp(network_key)],
        retry_config=RetryConfig(max_retries=0),
        connection_config=ConnectionConfig(
            max_connections=MAX_CONNECTIONS,
            min_connections=0,
            low_watermark=0,
            high_watermark=MAX_CONNECTIONS,
            inbound_upgrade_timeout=UPGRADE_S,
            outbound_upgrade_timeout=UPGRADE_S,
        ),
    )
    swarm.gate, swarm.network_key = gate, network_key
    swarm.auto_connector = NoDialling(swarm)
    return swarm


async def cut(connection: INetConn) -> None:
    """End a connection whose peer may not answer; closes the socket first, so that no write blocks."""
    with trio.move_on_after(1.0) as scope:
        scope.shield = True
        try:
            await connection.muxed_conn.secured_conn.close()  # type: ignore[attr-defined]
            await connection.close()
        except Exception as error:
            log.debug("cutting a connection: %s", error)


def host_at(stream: Any) -> str:
    """The IP address at the other end of a TCP connection; libp2p's own method fails for IPv6."""
    try:
        return str(stream.stream.socket.getpeername()[0])
    except OSError:
        return "an unknown address"
