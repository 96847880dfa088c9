"""The p2p launcher: starts workers on other machines through the agent of each node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from cost_model.errors import HexGen2Error, InputError
from hexgen2.devices import node_of
from hexgen2.placement import Placement
from runtime.launcher.nodes.agent_messages import (
    AGENT_PROTOCOL,
    NODE_PROTOCOL,
    WORKERS_SERVICE,
    StartWorkers,
)
from runtime.launcher.nodes.digest import checkpoint_digest
from runtime.launcher.nodes.node_configuration import check_hardware, on_node
from runtime.launcher.nodes.roster import JoinedNode, Roster
from runtime.launcher.nodes.workers_channel import WorkersChannel
from runtime.launcher.worker_link import WorkerLink
from runtime.launcher.workers import START_TIMEOUT_S, WorkersLauncher
from runtime.options import EMULATED
from runtime.p2p.membership.membership import Membership
from runtime.protocol.to_workers import Configure, Shutdown

JOIN_TIMEOUT_S = 120.0
STOP_GRACE_S = 10.0
START_ATTEMPTS = 3
SETTLE_S = 0.5  # time for a node's departure to show in the roster as well as in its channels


class P2pLauncher(WorkersLauncher):
    """Asks each node's agent to start workers; one channel per replica and node carries their messages.

    When a node is gone, so are its replicas; nothing can start on it until it is back.
    """

    def __init__(
        self,
        membership: Membership,
        join_timeout_s: float = JOIN_TIMEOUT_S,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        super().__init__(start_timeout_s)
        self._membership, self._join_timeout_s = membership, join_timeout_s
        self._member = membership.member("head", "head", protocol=NODE_PROTOCOL)
        self._roster: Roster | None = None
        self._started = False
        self._channels: dict[str, WorkersChannel] = {}
        self._checkpoint, self._digest = "", ""
        self._real: Placement | None = None
        self._cluster: list[str] = []

    def check(self, placement: Placement, source: str, emulated: bool = False) -> None:
        """Accept any placement: nothing is known of its nodes until they have joined."""
        self._real = None if emulated else placement
        self._cluster = [node.name for node in placement.cluster.nodes]

    async def start(
        self, configurations: Mapping[str, Configure], report: Callable[[str], None]
    ) -> dict[str, WorkerLink]:
        self._configurations = dict(configurations)
        first = next(iter(configurations.values()))
        self._checkpoint = first.checkpoint
        if first.engine != EMULATED:
            self._digest = await asyncio.to_thread(checkpoint_digest, Path(self._checkpoint))
        self._started = True
        peers = self._member.peers
        peers.on_not_joined(lambda line: None if peers.refused_by_all else report(line))
        await self._member.start()
        self._roster = Roster(self._member.peers, self._membership.join, report, self._cluster)
        self._roster.start()
        return await self._start_on_nodes(self._roster, list(configurations), report)

    def unreachable(self, workers: Collection[str]) -> list[str]:
        assert self._roster is not None
        gone = set(self._roster.missing({node_of(worker) for worker in workers}))
        return [worker for worker in workers if node_of(worker) in gone]

    async def until_reachable(self, workers: Collection[str]) -> None:
        assert self._roster is not None
        await self._roster.wait({node_of(worker) for worker in workers})

    async def stop(self) -> None:
        for link in self._links.values():
            link.send(Shutdown())
        await asyncio.gather(*(channel.stop(STOP_GRACE_S) for channel in set(self._channels.values())))
        self._channels.clear()
        self._links.clear()
        if self._roster is not None:
            await self._roster.stop()
        if self._started:
            self._started = False
            await self._member.stop()

    def kill(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def views(self) -> dict[str, Callable[[], Any]]:
        return {"/nodes": self._member.show_nodes, "/peers": self._member.show_peers}

    async def _start_on_nodes(
        self, roster: Roster, workers: Sequence[str], report: Callable[[str], None]
    ) -> dict[str, WorkerLink]:
        """Start workers once all their nodes have joined, and try again if a node was lost meanwhile.

        The loss may be this process's own doing: while it imports packages it may not answer in time.
        """
        attempts = 0
        while True:
            await self._join(roster, {node_of(worker) for worker in workers}, report)
            departures = roster.departures
            try:
                return await self._start(workers, report)
            except InputError:
                raise
            except HexGen2Error as error:
                attempts += 1
                await asyncio.sleep(SETTLE_S)
                if roster.departures == departures or attempts == START_ATTEMPTS:
                    raise
                report(f"{error}; starting again")
                self._forget(workers)

    async def _join(self, roster: Roster, names: Collection[str], report: Callable[[str], None]) -> None:
        if missing := roster.missing(names):
            report(f"waiting for nodes: {', '.join(missing)}")
        joined = asyncio.ensure_future(roster.wait(names))
        refused = asyncio.ensure_future(self._member.peers.until_refused_by_all())
        waiting: set[asyncio.Future[Any]] = {joined, refused}
        try:
            await asyncio.wait(waiting, timeout=self._join_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if joined.done():
                return
            if refused.done():
                problem, _, remedy = refused.result()[0].partition("; ")
                raise InputError("--join", "", problem, remedy)
        finally:
            for each in waiting:
                each.cancel()
        missing, there = roster.missing(names), sorted(roster.nodes.keys() - set(names))
        others = f" (nodes that did: {', '.join(there)})" if there else ""
        problem = f"{', '.join(missing)} did not join within {self._join_timeout_s:.0f} s{others}"
        remedy = f"run `hexgen2 node --name {missing[0]}` on that machine and give its address with --join"
        raise InputError("--launcher p2p", "nodes", problem, remedy)

    async def _connect(self, workers: Sequence[str]) -> None:
        assert self._roster is not None
        nodes = self._roster.nodes
        for name in {node_of(worker) for worker in workers}:
            if name not in nodes:
                raise HexGen2Error(f"node {name} is gone")
            self._settle(name, nodes[name])
        groups: dict[tuple[str, str], list[str]] = {}
        for worker in workers:
            groups.setdefault((self._configurations[worker].replica, node_of(worker)), []).append(worker)
        for (replica, name), own in groups.items():
            await self._open(replica, nodes[name], name, own)

    def _settle(self, name: str, node: JoinedNode) -> None:
        """Check that a node has the hardware its workers need, and adapt their configurations to it."""
        own = {worker: each for worker, each in self._configurations.items() if node_of(worker) == name}
        if self._real is not None:
            check_hardware(self._real, own, node.welcome)
        self._configurations |= on_node(own, node.welcome, self._checkpoint)

    async def _open(self, replica: str, node: JoinedNode, name: str, workers: Sequence[str]) -> None:
        """Open a channel to a node's agent and ask it to start the replica's workers."""
        try:
            opened = await self._member.peers.open(node.target, WORKERS_SERVICE)
        except ConnectionError as error:
            raise HexGen2Error(f"node {name} cannot be reached: {error}") from error
        channel = WorkersChannel(opened, name, workers)
        self._channels |= dict.fromkeys(workers, channel)
        self._links |= channel.links
        request = StartWorkers(
            protocol=AGENT_PROTOCOL,
            replica=replica,
            workers=tuple(workers),
            engine=self._configurations[workers[0]].engine,
            checkpoint=self._checkpoint,
            digest=self._digest,
        )
        channel.send(request)

    def _end(self, workers: Sequence[str]) -> None:
        """Close the channels of these workers; their agents kill whatever is still running."""
        for worker in workers:
            self._links.pop(worker, None)
            if channel := self._channels.pop(worker, None):
                channel.close()
