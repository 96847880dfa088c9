"""A fleet of real worker processes whose front end runs in the test: requests, kills and new placements."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from hexgen2.checks import violations
from hexgen2.placement import Placement
from runtime.frontend.coordinator import Coordinator
from runtime.frontend.replanner import Replanner
from runtime.frontend.replica import make_replicas
from runtime.frontend.request import Request
from runtime.frontend.supervisor import Supervisor
from runtime.launcher.configure import configurations
from runtime.launcher.local import LocalLauncher
from runtime.options import DEFAULTS, FRONT_DEFAULTS, TORCH, EngineOptions
from runtime.protocol.message import Sampling
from runtime.protocol.to_workers import Configure
from runtime.routing.reflow import Reflow
from runtime.routing.router import Router
from runtime.serve import _successors

LIMIT_S = 300.0


@dataclass
class LiveFleet:
    """What a test asks of the fleet."""

    coordinator: Coordinator
    launcher: LocalLauncher
    replanner: Replanner
    said: list[str]
    requests: list[Request] = field(default_factory=list)

    @property
    def pids(self) -> dict[str, int | None]:
        """Process ids by worker."""
        return {name: each.pid for name, each in self.launcher._processes._processes.items()}

    def kill(self, worker: str) -> None:
        """Kill a worker with SIGKILL."""
        self.launcher._processes.kill([worker])

    def submit(self, prompt: list[int], tokens: int) -> Request:
        request = self.coordinator.submit(prompt, Sampling(max_tokens=tokens, ignore_eos=True))
        self.requests.append(request)
        return request

    async def take_up(self, placement: Placement) -> None:
        """Switch to a placement, as after a search."""
        assert violations(placement) == []
        await self.replanner._take_up(placement)

    async def until(self, what: Any) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not what():
            assert time.monotonic() < deadline_s, self.said
            await asyncio.sleep(0.005)

    async def settle(self) -> None:
        """Wait until no replica holds anything."""
        await self.until(lambda: not any(each.held for each in self.coordinator.replicas.values()))


@asynccontextmanager
async def live_fleet(
    placement: Placement,
    folder: Path,
    restarts: int = 0,
    options: EngineOptions = DEFAULTS,
    engine: str = TORCH,
    kv_tokens: int = 0,
    change: Callable[[Configure], Configure] = lambda each: each,
) -> AsyncIterator[LiveFleet]:
    """The fleet of a placement, on this machine; `kv_tokens` replaces the KV budget of every replica, and
    `change` changes what workers are told."""
    configure = partial(
        configurations, checkpoint=folder, gpu_dtype="bfloat16", options=options, engine=engine
    )
    workers, launcher, said = configure(placement), LocalLauncher(), list[str]()
    workers = {name: change(each) for name, each in workers.items()}
    if kv_tokens:
        workers = {
            k: msgspec.structs.replace(each, kv_budget_tokens=kv_tokens) for k, each in workers.items()
        }
    try:
        links = await launcher.start(workers, said.append)
        plan = Reflow(placement)
        replicas = make_replicas(placement, workers, links)
        coordinator = Coordinator(Router(plan.routes(())), replicas, plan=plan)
        supervisor = Supervisor(coordinator, launcher, restarts, said.append)
        configured = _successors(workers, configure, FRONT_DEFAULTS)
        replanner = Replanner(placement, coordinator, launcher, supervisor, configured, LIMIT_S, said.append)
        coordinator.start(supervisor.lost, supervisor.forgive, supervisor.lost_attention_worker)
        fleet = LiveFleet(coordinator, launcher, replanner, said)
        try:
            yield fleet
        finally:
            await supervisor.stop()
            await coordinator.stop()
    finally:
        await launcher.stop()


async def tokens_of(request: Request) -> list[int]:
    """All tokens of a request."""
    return [output.token async for output in request]
