"""Synchronizes the node table over channels of the service `table`, one between any two connected peers.

At first both ends send all records they have. A change is forwarded at once to every other peer. A heartbeat
(same facts, next sequence number) goes only from its node to its neighbours; others get it by digests: every
DIGEST_S a node sends one random neighbour a digest of what it has, and receives what it lacks. So n nodes
that are all connected send n*(n-1) records per announcement; plain flooding would send the square of that.

Why not libp2p's gossipsub: it needs libp2p's host with the identify protocol, must be started before the
first connection, and silently drops messages that come too often (FloodSub too). A table needs full
synchronization and repair anyway, and with these it needs nothing more.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from runtime.p2p.host import Peers
from runtime.p2p.membership.identity import Identity
from runtime.p2p.membership.record import NodeRecord, PeerId, SignedRecord, sign
from runtime.p2p.membership.table import MAX_NODES, NodeTable, NodeView
from runtime.p2p.transport.allowance import Allowance
from runtime.p2p.transport.channel import Channel

log = logging.getLogger(__name__)

SERVICE = "table"
ANNOUNCE_S = 3.0
DIGEST_S = 1.0
RECORDS_A_FRAME = 64
MAX_TABLE_FRAME_BYTES = 2 * 1024 * 1024
WORK_A_S, WORK_AT_ONCE = 200, 4 * MAX_NODES  # records exchanged with one peer: per second, in a burst
CHANNELS_A_PEER = 8
LEAVE_S = 0.3  # time to send the last record before the connections close


class RecordBatch(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """Records that the other end may lack."""

    records: Annotated[tuple[SignedRecord, ...], Meta(max_length=RECORDS_A_FRAME)]


class Digest(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """The newest sequence number that the sender has of each node; the answer is all newer records."""

    sequences: Annotated[dict[PeerId, int], Meta(max_length=MAX_NODES)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RecordBatch | Digest)


class Gossip:
    """Keeps the node table synchronized with the peers' tables, and announces this node in them.

    Parameters
    ----------
    peers : started or not
    about : this node's record; peer id, addresses, latencies and sequence number are filled in
    """

    def __init__(self, peers: Peers, identity: Identity, table: NodeTable, about: NodeRecord) -> None:
        self._peers, self._identity, self.table, self._about = peers, identity, table, about
        self._channels: dict[str, set[Channel]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._running = False
        self._allowance = Allowance(WORK_A_S, WORK_AT_ONCE)
        self._slowed: set[str] = set()
        table.subscribe(self._forgotten)
        peers.serve(SERVICE, self._converse)
        peers.on_peer_joined(self._joined)
        peers.on_peer_lost(table.lost)
        peers.on_measured(table.measured)

    async def start(self) -> None:
        """Announce this node and begin to synchronize. Call it after `peers.start()`."""
        self._running = True
        self.announce()
        for peer_id in list(self._peers.connected):
            self._joined(peer_id)
        self._spawn(self._keep_announcing())
        self._spawn(self._keep_repairing())

    async def stop(self) -> None:
        """Announce that this node leaves, and stop. Call it before `peers.stop()`."""
        if not self._running:
            return
        self.announce(status="left")
        self._running = False
        await asyncio.sleep(LEAVE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channels in list(self._channels.values()):
            for channel in list(channels):
                channel.close()

    def announce(self, **changes: Any) -> None:
        """Send a new record of this node. `changes` (status, load, services...) last for later records."""
        self._about = msgspec.structs.replace(self._about, **changes)
        record = msgspec.structs.replace(
            self._about,
            peer_id=self._identity.peer_id,
            addresses=tuple(self._peers.addresses),
            latency_ms={peer: round(ms, 3) for peer, ms in list(self._peers.latency_ms.items())[:256]},
            sequence=self.table.next_sequence(self._identity.peer_id),
            issued_at=self.table.now(),
        )
        signed = sign(record, self._identity)
        self.table.merge(signed)
        self._send_to_all([signed])

    # one peer

    def _joined(self, peer_id: str) -> None:
        """Open a channel if this node has the smaller id of the two, so that there is only one channel."""
        if self._running and self._peers.peer_id < peer_id:
            self._spawn(self._open(peer_id))

    async def _open(self, peer_id: str) -> None:
        while self._running and peer_id in self._peers.connected and not self._channels.get(peer_id):
            try:
                channel = await self._peers.open(peer_id, SERVICE)
            except ConnectionError as error:
                log.debug("no table channel to peer %s yet: %s", peer_id, error)
                await asyncio.sleep(DIGEST_S)
                continue
            try:
                await self._converse(channel)
            finally:
                channel.close()

    async def _converse(self, channel: Channel) -> None:
        """Exchange records with one peer, within its allowance, until the channel ends."""
        others = self._channels.setdefault(channel.peer_id, set())
        if len(others) >= CHANNELS_A_PEER:
            log.warning(
                "refused a table channel from peer %s: it has %d already", channel.peer_id, len(others)
            )
            return
        others.add(channel)
        try:
            await self._pause(channel.peer_id, self._send(channel, self.table.signed()))
            while (frame := await channel.receive()) is not None:
                work = self._take(channel, frame)
                if work is None:
                    return
                await self._pause(channel.peer_id, 1 + work)
        finally:
            others.discard(channel)
            if not others:
                self._channels.pop(channel.peer_id, None)

    async def _pause(self, peer_id: str, work: int) -> None:
        """Charge a peer for work; if it exceeds its allowance, stop reading from it for a while."""
        wait_s = self._allowance.take(peer_id, work)
        if wait_s > 0:
            if peer_id not in self._slowed:
                self._slowed.add(peer_id)
                log.warning("peer %s floods the node table; slowing it down (logged once)", peer_id)
            await asyncio.sleep(wait_s)

    def _take(self, channel: Channel, frame: bytes) -> int | None:
        """Handle a frame; returns the number of records it concerned, or None if it was invalid."""
        try:
            if len(frame) > MAX_TABLE_FRAME_BYTES:
                raise ValueError(f"{len(frame)} bytes, limit {MAX_TABLE_FRAME_BYTES}")
            message = _decoder.decode(frame)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            log.warning("refused a table frame from peer %s: %s", channel.peer_id, error)
            return None
        if isinstance(message, Digest):
            return self._send(channel, self.table.newer_than(message.sequences))
        changes = []
        for signed in message.records:
            news = self.table.merge(signed, channel.peer_id)
            if news is not None:
                self._peers.learn(news.record.peer_id, news.record.addresses)
                if news.changed:
                    changes.append(signed)
        self._send_to_all(changes, but=channel.peer_id)
        self._defend()
        return len(message.records)

    def _send(self, channel: Channel, records: list[SignedRecord]) -> int:
        for start in range(0, len(records), RECORDS_A_FRAME):
            channel.send(_encoder.encode(RecordBatch(tuple(records[start : start + RECORDS_A_FRAME]))))
        return len(records)

    def _send_to_all(self, records: list[SignedRecord], but: str = "") -> None:
        for peer_id, channels in self._channels.items():
            if records and peer_id != but:
                for channel in channels:
                    self._send(channel, records)

    def _forgotten(self, peer_id: str, view: NodeView | None) -> None:
        """Forget nodes that the table has forgotten."""
        if view is None:
            self._peers.forget(peer_id)
            self._slowed.discard(peer_id)

    def _defend(self) -> None:
        """If peers have a record of this node from an earlier run, replace it with a newer one."""
        own = self.table.get(self._identity.peer_id)
        if self._running and own is not None and own.record.status != self._about.status:
            self.announce()

    # periodic work

    async def _keep_announcing(self) -> None:
        while True:
            await asyncio.sleep(ANNOUNCE_S * random.uniform(0.9, 1.1))
            self.announce()
            self.table.expire()
            self._allowance.forget()

    async def _keep_repairing(self) -> None:
        while True:
            await asyncio.sleep(DIGEST_S * random.uniform(0.9, 1.1))
            if self._channels:
                channels = random.choice(list(self._channels.values()))
                for channel in channels:
                    channel.send(_encoder.encode(Digest(self.table.sequences())))
            self._meet(self.table.snapshot())

    def _meet(self, nodes: Iterable[Any]) -> None:
        """Connect to one random node that is known and alive but not connected."""
        unmet = [
            node.record.peer_id
            for node in nodes
            if node.state not in ("left", "lost") and node.record.peer_id not in self._peers.connected
        ]
        unmet = [peer_id for peer_id in unmet if peer_id != self._peers.peer_id]
        if unmet:
            self._peers.connect(random.choice(unmet))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
