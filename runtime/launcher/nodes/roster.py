"""The nodes that a head is connected to: one channel to each agent; when it ends, the node is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from runtime.frames import BadFrame
from runtime.launcher.nodes.agent_messages import AGENT_PROTOCOL, NODE_SERVICE, Welcome, decode
from runtime.p2p.host import Peers
from runtime.p2p.transport.channel import Channel

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
ASK_AGAIN_S = 2.0
WELCOME_S = 10.0


@dataclass(frozen=True, slots=True)
class JoinedNode:
    """A connected node: its peer id and its agent's Welcome; `target` is what `Peers.open` takes."""

    peer_id: str
    target: str
    welcome: Welcome


class Roster:
    """Asks every known peer whether it is a node, and tracks which nodes are connected.

    A name belongs to the first peer that uses it, and a peer keeps its first name. So no member of the
    network can take the place of another node, or collect the names of nodes that have not joined yet.

    Parameters
    ----------
    addresses : multiaddrs of peers to ask in addition to connected peers and former nodes
    report : receives lines for the operator
    cluster : names of the placement's nodes, so that unknown nodes are reported as such; empty: not known

    Attributes
    ----------
    departures : how many times a connected node has gone
    """

    def __init__(
        self,
        peers: Peers,
        addresses: Sequence[str],
        report: Callable[[str], None],
        cluster: Collection[str] = (),
    ) -> None:
        self.departures = 0
        self._peers, self._report, self._cluster = peers, report, cluster
        self._addresses = {address.rpartition("/p2p/")[2]: address for address in addresses}
        self._nodes: dict[str, JoinedNode] = {}
        self._owners: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._suspects: set[str] = set()
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    @property
    def nodes(self) -> dict[str, JoinedNode]:
        """The connected nodes, by name."""
        return dict(self._nodes)

    def start(self) -> None:
        """Begin to look for nodes."""
        self._looking = asyncio.create_task(self._look())

    async def stop(self) -> None:
        """Stop looking for nodes, and close their channels."""
        tasks = [*self._asking.values(), *([self._looking] if self._looking else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def missing(self, names: Collection[str]) -> list[str]:
        """The nodes among these that are not connected."""
        return sorted(set(names) - self._nodes.keys())

    async def wait(self, names: Collection[str]) -> None:
        """Wait until all of these nodes are connected."""
        while self.missing(names):
            self._changed.clear()
            await self._changed.wait()

    async def _look(self) -> None:
        while True:
            known = self._peers.connected.union(self._addresses, self._owners.values())
            for peer_id in known.difference(self._asking, [self._peers.peer_id]):
                target = self._addresses.get(peer_id, peer_id)
                self._asking[peer_id] = asyncio.create_task(self._ask(peer_id, target))
            await asyncio.sleep(LOOK_EVERY_S)

    async def _ask(self, peer_id: str, target: str) -> None:
        """Ask a peer whether it is a node; if so, follow it until it is gone. It may be asked again later."""
        try:
            channel = await self._peers.open(target, NODE_SERVICE)
            try:
                async with asyncio.timeout(WELCOME_S):
                    welcome = await self._welcome(channel)
                if welcome is not None and self._admits(peer_id, welcome):
                    await self._follow(JoinedNode(peer_id, target, welcome), channel)
            finally:
                channel.close()
        except BadFrame as error:
            self._suspect(peer_id, str(error))
        except (OSError, TimeoutError) as error:
            log.debug("peer %s is not a node, or is gone: %s", peer_id, error)
        await asyncio.sleep(ASK_AGAIN_S)
        del self._asking[peer_id]

    async def _welcome(self, channel: Channel) -> Welcome | None:
        frame = await channel.receive()
        message = None if frame is None else decode(frame)
        if message is not None and not isinstance(message, Welcome):
            raise BadFrame(f"unexpected message {type(message).__name__}")
        return message

    def _admits(self, peer_id: str, welcome: Welcome) -> bool:
        name = welcome.node
        if welcome.protocol != AGENT_PROTOCOL:
            self._suspect(peer_id, f"node {name} speaks protocol {welcome.protocol}, not {AGENT_PROTOCOL}")
            return False
        if (earlier := self._names.get(peer_id, name)) != name:
            self._suspect(peer_id, f"it calls itself node {name}, but was node {earlier} before")
            return False
        if (owner := self._owners.setdefault(name, peer_id)) != peer_id:
            self._suspect(peer_id, f"it calls itself node {name}, which is peer {owner}")
            return False
        self._names[peer_id] = name
        return True

    def _suspect(self, peer_id: str, why: str) -> None:
        """Log, once per peer, why it is not accepted as a node."""
        if peer_id not in self._suspects:
            self._suspects.add(peer_id)
            log.warning("refused peer %s as a node: %s (logged once)", peer_id, why)

    async def _follow(self, node: JoinedNode, channel: Channel) -> None:
        name = node.welcome.node
        self._nodes[name] = node
        self._changed.set()
        known = not self._cluster or name in self._cluster
        note = "" if known else "; the placement has no node of this name"
        self._report(f"node {name} joined (peer {node.peer_id}){note}")
        try:
            while await channel.receive() is not None:
                pass
            self.departures += 1
            self._report(f"node {name} is gone")
        finally:
            del self._nodes[name]
