"""The agent of a node: introduces the node to heads, and starts and ends workers for them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from cost_model.errors import InputError
from hexgen2.devices import node_of
from runtime.frames import BadFrame
from runtime.launcher.nodes.agent_messages import (
    AGENT_PROTOCOL,
    NODE_SERVICE,
    WORKERS_SERVICE,
    StartFailed,
    StartWorkers,
    Welcome,
    decode,
    encode,
)
from runtime.launcher.nodes.digest import checkpoint_digest
from runtime.launcher.nodes.session import WorkerSession
from runtime.launcher.processes import WorkerProcesses
from runtime.options import EMULATED, TORCH
from runtime.p2p.host import Peers
from runtime.p2p.membership.record import Device
from runtime.p2p.transport.channel import Channel

log = logging.getLogger(__name__)

FIRST_FRAME_S = 10.0
WORKER_ENGINES = (TORCH, EMULATED)
LEASE_S = 10.0
"""How long a head waits for workers that another head holds; they are free as soon as that head is gone."""


class _Refused(Exception):
    """The agent will not start the workers that a head asked for."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.problem = StartFailed(kind=kind, text=text)


class NodeAgent:
    """Serves the heads that connect to this node.

    Parameters
    ----------
    name : the node's name in placements
    address : where this node's workers listen for workers of other nodes
    model_path : folder of the checkpoint on this node; None: the folder that the head names (shared storage)
    gpus : the GPUs that workers may use, by index
    on_workers : called with the number of running workers whenever it changes
    report : receives lines for the operator
    """

    def __init__(
        self,
        name: str,
        peers: Peers,
        address: str,
        model_path: Path | None,
        gpus: tuple[Device, ...],
        on_workers: Callable[[int], None],
        report: Callable[[str], None],
    ) -> None:
        self._name, self._peers, self._address, self._model_path = name, peers, address, model_path
        self._gpus, self._on_workers, self._report = gpus, on_workers, report
        self._processes = WorkerProcesses()
        self._sessions: set[WorkerSession] = set()

    def start(self) -> None:
        """Begin to answer heads."""
        self._peers.serve(NODE_SERVICE, self._serve_node)
        self._peers.serve(WORKERS_SERVICE, self._serve_workers)

    async def stop(self) -> None:
        """End every worker and wait until all have ended."""
        sessions = list(self._sessions)
        for session in sessions:
            session.end()
        await asyncio.gather(*(session.ended.wait() for session in sessions))
        await self._processes.stop()

    def kill(self) -> None:
        """Kill every worker, without waiting."""
        self._processes.kill()

    async def _serve_node(self, channel: Channel) -> None:
        welcome = Welcome(
            protocol=AGENT_PROTOCOL,
            node=self._name,
            address=self._address,
            model_path=str(self._model_path or ""),
            cores=tuple(sorted(os.sched_getaffinity(0))),
            gpus=self._gpus,
        )
        channel.send(encode(welcome))
        while await channel.receive() is not None:
            log.warning("ignored an unexpected message from peer %s on the node channel", channel.peer_id)

    async def _serve_workers(self, channel: Channel) -> None:
        try:
            async with asyncio.timeout(FIRST_FRAME_S):
                frame = await channel.receive()
            if frame is None:
                return
            request = self._request(frame)
            await self._check_checkpoint(request)
            session = WorkerSession(channel, request, self._processes)
            await self._take_over(session)
        except (BadFrame, TimeoutError) as error:
            log.warning("closed the workers channel of peer %s: no valid request: %s", channel.peer_id, error)
            channel.close()
            return
        except _Refused as refused:
            self._report(f"refused to start workers for head {channel.peer_id}: {refused}")
            channel.send(encode(refused.problem))
            channel.close()
            return
        self._report(f"starting {len(request.workers)} workers of replica {request.replica}")
        self._count()
        try:
            await session.run()
        finally:
            self._sessions.discard(session)
            self._count()
            self._report(f"the workers of replica {request.replica} have ended")

    def _count(self) -> None:
        self._on_workers(sum(len(session.workers) for session in self._sessions))

    def _request(self, frame: bytes) -> StartWorkers:
        request = decode(frame)
        if not isinstance(request, StartWorkers):
            raise BadFrame(f"unexpected message {type(request).__name__}")
        if request.protocol != AGENT_PROTOCOL:
            problem = f"it speaks protocol {AGENT_PROTOCOL}, but the head speaks {request.protocol}"
            raise _Refused("input", f"{problem}; install the same version of hexgen2 on both")
        if request.engine not in WORKER_ENGINES:
            choices = ", ".join(WORKER_ENGINES)
            raise _Refused("input", f"it has no engine {request.engine}; use one of {choices}")
        for worker in request.workers:
            if node_of(worker) != self._name:
                raise BadFrame(f"worker {worker} does not belong to node {self._name}")
        return request

    async def _check_checkpoint(self, request: StartWorkers) -> None:
        if not request.digest:
            return
        folder = self._model_path or Path(request.checkpoint)
        try:
            found = await asyncio.to_thread(checkpoint_digest, folder)
        except InputError as error:
            raise _Refused("input", f"{error.problem}; {error.remedy}") from error
        if found != request.digest:
            problem = f"the checkpoint {folder} differs from the head's (digest {found[:12]}, not"
            raise _Refused(
                "input", f"{problem} {request.digest[:12]}); give both the same one with --model-path"
            )

    async def _take_over(self, session: WorkerSession) -> None:
        """Wait until no other session has these workers; end older sessions of the same head."""
        for other in [each for each in self._sessions if each.workers & session.workers]:
            if other.head == session.head:
                other.end()
        try:
            async with asyncio.timeout(LEASE_S):
                while others := [each for each in self._sessions if each.workers & session.workers]:
                    await others[0].ended.wait()
                    self._sessions.discard(others[0])
        except TimeoutError:
            raise _Refused("busy", f"another head holds these workers ({others[0].head})") from None
        self._sessions.add(session)
