"""Placements of overlapping ranges of layers on CPU workers, and a fleet that serves one, driven from the
test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
from live_fleet import LIMIT_S
from placements import CORE, placement_of, replica_of

from cluster_specs.schema import ClusterSpec, NodeSpec
from cost_model.config import architecture_from_folder
from hexgen2.layer_ranges import LayerRanges
from hexgen2.placement import Placement, Route
from hexgen2.workload.lengths import RequestClass, Workload
from runtime.frontend.coordinator import Coordinator
from runtime.frontend.replica import make_replicas
from runtime.frontend.request import Request
from runtime.frontend.supervisor import Supervisor
from runtime.launcher.configure import configurations
from runtime.launcher.local import LocalLauncher
from runtime.options import FRONT_DEFAULTS
from runtime.protocol.message import Sampling
from runtime.protocol.to_workers import Configure
from runtime.routing.output_lengths import make_predictor
from runtime.routing.paths.range_plan import RangePlan
from runtime.serve import router_of

REQ_S = 1.0
Ranges = Mapping[str, tuple[int, int]]
Flows = Mapping[tuple[str, str], float]


def ranges_placement(
    folder: Path,
    ranges: Ranges,
    flows: Flows,
    partial: bool,
    gpus: Mapping[str, int] | None = None,
    osl: int = 16,
) -> Placement:
    """A placement of the model in a folder by hand, with one node for each replica.

    Parameters
    ----------
    ranges : the layers [first, end) of each replica
    flows : requests/s of each route; what enters at a replica with the first layer is what leaves it
    partial : whether requests may enter a replica after its first layer
    gpus : of replicas with more than one
    """
    count = dict.fromkeys(ranges, 1) | dict(gpus or {})
    model = architecture_from_folder(folder).model_copy(update={"name": "tiny"})
    replicas, routes = [], []
    for name, held in ranges.items():
        out = sum(flow for (source, _), flow in flows.items() if source == name)
        into = sum(flow for (_, target), flow in flows.items() if target == name)
        own = " ".join(f"{name}/{k}" for k in range(count[name]))
        replica = replica_of(
            "colocated", [(own, 1)], utilisation=max(out, into) / (4 * REQ_S), capacity_req_s=4 * REQ_S
        )
        stages = [replica.stages[0].model_copy(update={"layers": held})]
        replicas.append(replica.model_copy(update={"id": name, "stages": stages}))
    for (source, target), flow in flows.items():
        ends = {"from": source, "to": target, "flow_req_s": flow, "capacity_req_s": 100.0}
        routes.append(Route.model_validate(ends | {"kv_bytes_per_req": 1.0}))
    nodes = [
        NodeSpec(name=name, accelerators=f"Core:{count[name]}", interconnect="shared-memory")
        for name in ranges
    ]
    placement = placement_of(
        ClusterSpec(name="ranges", nodes=nodes, accelerators={"Core": CORE}),
        model,
        Workload(name="short", classes=(RequestClass(name="short", isl=16, osl=osl),)),
        replicas,
        routes,
    )
    carried = sum(
        replica.utilisation * replica.capacity_req_s
        for replica in replicas
        if not replica.stages[0].layers[0]
    )
    bound = sum(replica.capacity_req_s for replica in replicas)
    return placement.model_copy(
        update={
            "layer_ranges": LayerRanges(partial_inference=partial),
            "throughput": placement.throughput.model_copy(
                update={"req_s": carried, "output_tok_s": carried * osl}
            ),
            "bound": placement.bound.model_copy(update={"req_s": bound, "gap": 1 - carried / bound}),
        }
    )


class RangeFleet:
    """A served placement of ranges of layers, and its front end."""

    def __init__(
        self,
        placement: Placement,
        coordinator: Coordinator,
        launcher: LocalLauncher,
        supervisor: Supervisor,
    ) -> None:
        self.placement, self.coordinator = placement, coordinator
        self.launcher, self.supervisor = launcher, supervisor

    def submit(self, prompt: Sequence[int], tokens: int, **sampling: object) -> Request:
        wanted = Sampling(max_tokens=tokens, **({"ignore_eos": True} | sampling))
        return self.coordinator.submit(list(prompt), wanted)

    def kill(self, replica: str) -> None:
        """Kill the first worker of a replica with SIGKILL."""
        self.launcher._processes.kill([self.placement.replica(replica).gpus[0]])

    async def until(self, what) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not what():
                await asyncio.sleep(0.005)

    async def settle(self) -> None:
        """Wait until no replica holds anything, by the front end's and the router's accounts, and by the
        workers' own blocks."""
        replicas, router = self.coordinator.replicas, self.coordinator._admission.router
        await self.until(lambda: not any(each.held for each in replicas.values()))
        assert not any(router.on.values()) and not any(router._expected.values())
        assert not self.coordinator._in_flight.requests


@asynccontextmanager
async def range_fleet(
    placement: Placement,
    folder: Path,
    restarts: int = 0,
    kv_tokens: int = 0,
    change: Callable[[Configure], Configure] = lambda each: each,
    **front: object,
) -> AsyncIterator[RangeFleet]:
    """The fleet of a placement; `kv_tokens` replaces the KV budget of every replica, and `change` changes
    what workers are told."""
    workers, launcher = configurations(placement, folder, "bfloat16"), LocalLauncher()
    workers = {name: change(each) for name, each in workers.items()}
    if kv_tokens:
        workers = {
            k: msgspec.structs.replace(each, kv_budget_tokens=kv_tokens) for k, each in workers.items()
        }
    options = replace(FRONT_DEFAULTS, **front)
    lengths = make_predictor(None, placement.workload)
    try:
        links = await launcher.start(workers, lambda _: None)
        coordinator = Coordinator(
            router_of(placement, workers, options, lengths),
            make_replicas(placement, workers, links),
            queue_limit=options.queue_limit,
            queue_timeout_s=options.queue_timeout_s,
            plan=RangePlan(placement),
            lengths=lengths,
        )
        supervisor = Supervisor(coordinator, launcher, restarts, lambda _: None)
        coordinator.start(supervisor.lost, supervisor.forgive)
        try:
            yield RangeFleet(placement, coordinator, launcher, supervisor)
        finally:
            await supervisor.stop()
            await coordinator.stop()
    finally:
        await launcher.stop()
