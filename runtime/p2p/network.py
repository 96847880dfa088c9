"""The parts of py-libp2p that a node is made of, with what 0.8.1 lacks.

Noise alone is offered, so that no plaintext client gets in; a stranger is refused when its handshake has
shown who it is, before it has a say in anything; whoever is refused is logged in one line; an inbound
connection gives back its slot when it ends (libp2p keeps it until the host stops); a muxer that fails ends
its connection, not the host. No identify, no relays, no dialling by libp2p itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from typing import Any

import trio
from libp2p.abc import INetConn, INotifee, IRawConnection, ISecureConn
from libp2p.crypto.x25519 import create_new_key_pair as new_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import IOException
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import Yamux
from libp2p.transport.tcp.tcp import TCP
from libp2p.transport.upgrader import TransportUpgrader

from runtime.p2p.identity import Identity

log = logging.getLogger(__name__)
logging.getLogger("libp2p.transport.tcp").setLevel(logging.CRITICAL)  # a line for each try, of many

MUXER = TProtocol("/hexgen2/yamux/1")  # for its own name libp2p takes its own Yamux, whatever class is given
UPGRADE_S = 5.0
MAX_CONNECTIONS = 4096
MAX_STRANGERS = 1000
LOG_EVERY_S = 600.0
SOCKET_BYTES = 128 * 1024


class StrangerRefused(IOException):
    """A peer that may not connect."""


class Gate:
    """Who may connect: the peer ids of a list, or anybody who got through the handshake.

    refused : how often each stranger was refused, by peer id, or by address if it came not so far
    """

    def __init__(self, allowed: Collection[str] | None) -> None:
        self._allowed = None if allowed is None else frozenset(allowed)
        self._logged_at: dict[str, float] = {}
        self.refused: dict[str, int] = {}

    def admits(self, peer_id: str) -> bool:
        """Whether this peer may connect; a stranger is logged and counted."""
        if self._allowed is None or peer_id in self._allowed:
            return True
        self._refuse(peer_id, f"peer {peer_id}: it is not on the list of allowed peers")
        return False

    def failed(self, address: str, reason: str) -> None:
        """Somebody at this address did not get through the handshake."""
        self._refuse(address, f"a connection from {address}: {reason}")

    def _refuse(self, who: str, what: str) -> None:
        """Count, and log the first time and then now and then: a scanner fills neither log nor memory."""
        if len(self.refused) >= MAX_STRANGERS and who not in self.refused:
            who = "others"
        self.refused[who] = self.refused.get(who, 0) + 1
        now = time.monotonic()
        if now - self._logged_at.get(who, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._logged_at[who] = now
            log.warning("refused %s (%d times so far)", what, self.refused[who])


class GatedNoise(NoiseTransport):
    """Noise that refuses strangers as soon as the handshake proves who they are."""

    def __init__(self, identity: Identity, gate: Gate) -> None:
        super().__init__(identity.key_pair, noise_privkey=new_noise_key_pair().private_key)
        self._gate = gate

    async def secure_inbound(self, conn: IRawConnection) -> ISecureConn:
        return await self._checked(await super().secure_inbound(conn))

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> ISecureConn:
        return await self._checked(await super().secure_outbound(conn, peer_id))

    async def _checked(self, secured: ISecureConn) -> ISecureConn:
        if not self._gate.admits(str(secured.get_remote_peer())):
            await secured.close()
            raise StrangerRefused("not on the list of allowed peers")
        return secured


class BufferedSocket(ReadWriteCloser):
    """Reads whatever has come at once: libp2p asks for 2 bytes, then for what they announce, each a call."""

    def __init__(self, stream: ReadWriteCloser) -> None:
        self._stream, self._buffer, self._start = stream, b"", 0

    async def read(self, n: int | None = None) -> bytes:
        if self._start == len(self._buffer):
            self._buffer, self._start = await self._stream.read(SOCKET_BYTES), 0
        end = len(self._buffer) if n is None else self._start + n
        data = self._buffer[self._start : end]
        self._start += len(data)
        return data

    async def write(self, data: bytes) -> None:
        await self._stream.write(data)

    async def close(self) -> None:
        await self._stream.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self._stream.get_remote_address()


class BufferedTcp(TCP):
    """TCP whose outbound connections read through a buffer."""

    async def dial(self, maddr: Any) -> IRawConnection:
        connection: Any = await super().dial(maddr)
        connection.stream = BufferedSocket(connection.stream)
        return connection


class ContainedYamux(Yamux):
    """Yamux whose failure on what a peer sent closes that connection and nothing else.

    heard : pieces of data that came from the peer so far
    """

    heard: int = 0

    async def _write_frame(self, data: bytes) -> None:
        """One frame, whole: a write that is cancelled half way would leave both ciphers out of step.

        `cut` ends one that nobody reads. (libp2p's own also makes the text of a debug log of each frame.)
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
            log.warning("connection of peer %s broken: %s", self.peer_id, one_line(errors))
            await self._cleanup_on_error()


class NoDialling(AutoConnector):
    """libp2p's own dialler, which would dial whatever address it knows until thousands are connected."""

    async def start(self) -> None:
        """Never begins."""

    async def run_background_task(self, nursery: trio.Nursery) -> None:
        """Never begins."""


class PeerSwarm(Swarm):
    """libp2p's connections, with refusals logged and inbound slots given back."""

    gate: Gate

    async def _do_handle_inbound_connection(
        self, read_write_closer: Any, maddr: Any, failure_event: Any
    ) -> None:
        connection = RawConnection(BufferedSocket(read_write_closer), False)
        remote = read_write_closer.get_remote_address()
        try:
            muxed = await self.upgrade_inbound_raw_conn(connection, maddr)
        except Exception as error:
            if not _about_a_stranger(error):
                self.gate.failed(remote[0] if remote else "an unknown address", one_line(_root(error)))
            await connection.close()
            return
        await muxed.event_closed.wait()  # type: ignore[attr-defined]


class ConnectionEvents(INotifee):
    """Tells of connections as they come and go."""

    def __init__(
        self, connected: Callable[[INetConn], None], disconnected: Callable[[INetConn], None]
    ) -> None:
        self._connected, self._disconnected = connected, disconnected

    async def connected(self, network: Any, conn: INetConn) -> None:
        self._connected(conn)

    async def disconnected(self, network: Any, conn: INetConn) -> None:
        self._disconnected(conn)

    async def opened_stream(self, network: Any, stream: Any) -> None:
        """Of no interest."""

    async def closed_stream(self, network: Any, stream: Any) -> None:
        """Of no interest."""

    async def listen(self, network: Any, multiaddr: Any) -> None:
        """Of no interest."""

    async def listen_close(self, network: Any, multiaddr: Any) -> None:
        """Of no interest."""


def new_swarm(identity: Identity, network_key: bytes | None, gate: Gate) -> PeerSwarm:
    """The node's connections: TCP, the network key if there is one, Noise, Yamux."""
    peer_id = ID.from_pubkey(identity.key_pair.public_key)
    peers = PeerStore()
    peers.add_key_pair(peer_id, identity.key_pair)
    swarm = PeerSwarm(
        peer_id,
        peers,
        TransportUpgrader({NOISE: GatedNoise(identity, gate)}, {MUXER: ContainedYamux}),
        transports=[BufferedTcp()],
        retry_config=RetryConfig(max_retries=0),
        connection_config=ConnectionConfig(
            max_connections=MAX_CONNECTIONS,
            min_connections=0,
            low_watermark=0,
            high_watermark=MAX_CONNECTIONS,
            inbound_upgrade_timeout=UPGRADE_S,
            outbound_upgrade_timeout=UPGRADE_S,
        ),
        psk=None if network_key is None else network_key.hex(),
    )
    swarm.gate = gate
    swarm.auto_connector = NoDialling(swarm)
    return swarm


async def cut(connection: INetConn) -> None:
    """End a connection whose peer may not answer: the socket first, so that nothing waits to be written."""
    with trio.move_on_after(1.0) as scope:
        scope.shield = True
        try:
            await connection.muxed_conn.secured_conn.close()  # type: ignore[attr-defined]
            await connection.close()
        except Exception as error:
            log.debug("cutting a connection: %s", error)


def one_line(error: BaseException) -> str:
    """What an exception, or the first of a group, says, in one line, with its kind."""
    error = first_of(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def first_of(error: BaseException) -> BaseException:
    """The exception itself, or the first one inside a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _root(error: BaseException) -> BaseException:
    return _causes(error)[-1]


def _about_a_stranger(error: BaseException) -> bool:
    return any(isinstance(cause, StrangerRefused) for cause in _causes(error))
