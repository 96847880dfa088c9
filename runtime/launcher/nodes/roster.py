"""Which nodes are there, as a head sees it: one channel to each node's agent, whose end is the node's."""

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
    """A node that is there: the peer that it is, and what its agent says of it."""

    peer_id: str
    target: str
    welcome: Welcome


class Roster:
    """Asks every peer that it learns of whether it is a node.

    The first peer with a name has it for good, and no other one: no other member of the network can take a
    node's place, or that of nodes to come, one after the other.

    Parameters
    ----------
    addresses : multiaddrs of peers to ask beside those that are connected, and those that were nodes before
    report : takes lines for the operator
    cluster : names of the placement's nodes, so that others are reported as such; empty: not known

    Attributes
    ----------
    departures : how often a node that was there has gone
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
        """The nodes that are there, by name."""
        return dict(self._nodes)

    def start(self) -> None:
        """Begin to look for nodes."""
        self._looking = asyncio.create_task(self._look())

    async def stop(self) -> None:
        """Look no more."""
        tasks = [*self._asking.values(), *([self._looking] if self._looking else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def missing(self, names: Collection[str]) -> list[str]:
        """Those of the named nodes that are not there."""
        return sorted(set(names) - self._nodes.keys())

    async def wait(self, names: Collection[str]) -> None:
        """Until all of these nodes are there."""
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
        """Be acquainted with a peer for as long as it is there; it is asked again some time after the end."""
        try:
            channel = await self._peers.open(target, NODE_SERVICE)
            try:
                async with asyncio.timeout(WELCOME_S):
                    welcome = await self._welcome(channel)
                if welcome is not None and self._admits(peer_id, welcome):
                    await self._while_there(JoinedNode(peer_id, target, welcome), channel)
            finally:
                channel.close()
        except BadFrame as error:
            self._suspect(peer_id, str(error))
        except (OSError, TimeoutError) as error:
            log.debug("peer %s is no node, or gone: %s", peer_id, error)
        await asyncio.sleep(ASK_AGAIN_S)
        del self._asking[peer_id]

    async def _welcome(self, channel: Channel) -> Welcome | None:
        frame = await channel.receive()
        message = None if frame is None else decode(frame)
        if message is not None and not isinstance(message, Welcome):
            raise BadFrame(f"an unexpected {type(message).__name__}")
        return message

    def _admits(self, peer_id: str, welcome: Welcome) -> bool:
        name = welcome.node
        if welcome.protocol != AGENT_PROTOCOL:
            self._suspect(peer_id, f"node {name} speaks protocol {welcome.protocol}, not {AGENT_PROTOCOL}")
            return False
        if (known_as := self._names.get(peer_id, name)) != name:
            self._suspect(peer_id, f"it calls itself node {name}, and was node {known_as}")
            return False
        if (owner := self._owners.setdefault(name, peer_id)) != peer_id:
            self._suspect(peer_id, f"it calls itself node {name}, which is peer {owner}")
            return False
        self._names[peer_id] = name
        return True

    def _suspect(self, peer_id: str, why: str) -> None:
        """Log once why a peer is not taken for a node."""
        if peer_id not in self._suspects:
            self._suspects.add(peer_id)
            log.warning("refused peer %s as a node: %s (logged once)", peer_id, why)

    async def _while_there(self, node: JoinedNode, channel: Channel) -> None:
        name = node.welcome.node
        self._nodes[name] = node
        self._changed.set()
        known = not self._cluster or name in self._cluster
        note = "" if known else "; the placement has no node of this name"
        self._report(f"node {name} is there (peer {node.peer_id}){note}")
        try:
            while await channel.receive() is not None:
                pass
            self.departures += 1
            self._report(f"node {name} is gone")
        finally:
            del self._nodes[name]
