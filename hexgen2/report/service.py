"""What replicas and their flows mean: the times of service, and what limits the throughput."""

from __future__ import annotations

from collections.abc import Sequence

from cost_model.base import CostModel, Phase
from cost_model.pipeline import (
    Pace,
    PhaseTimes,
    PipelineSemantics,
    colocated_pace,
    decode_pace,
    micro_batch,
    prefill_pace,
)
from hexgen2.checks import traffic_of
from hexgen2.cluster import Cluster
from hexgen2.network.shared_links import Links
from hexgen2.placement import Latency, Replica, Route
from hexgen2.simulator.timing import ReplicaTimes

FULL = 1 - 1e-6


def latency_of(
    replicas: Sequence[Replica], cluster: Cluster, costs: CostModel, semantics: PipelineSemantics
) -> Latency:
    """Means over requests, by what each replica carries: the time of a prefill step and of a decode step, the
    latter stretched by the prefills of a colocated replica. Zeros if nothing is carried."""
    first_s = token_s = served = 0.0
    for replica in replicas:
        pace = _pace(replica, ReplicaTimes(replica, cluster, costs, semantics))
        load = replica.utilisation * replica.capacity_req_s
        if replica.role == "decode":
            token_s += load * pace.latency_s
            continue
        served += load
        first_s += load * pace.latency_s
        token_s += load * pace.token_s
    served = served or 1.0
    return Latency(ttft_ms=first_s / served * 1e3, tpot_ms=token_s / served * 1e3)


def _pace(replica: Replica, times: ReplicaTimes) -> Pace:
    batch, semantics, osl = replica.max_batch, times.semantics, times.costs.osl
    if replica.role == "prefill":
        prefill = _phase_times(times, "prefill", batch)
        return prefill_pace(semantics, prefill.stage_s, prefill.hop_s, batch)
    running = _phase_times(times, "decode", micro_batch(semantics, batch, times.stages))
    decode = PhaseTimes(running.stage_s, running.hop_s, batch)
    if replica.role == "decode":
        return decode_pace(semantics, decode.stage_s, decode.hop_s, batch, osl)
    prompts = min(batch, times.costs.prefill_batch())
    return colocated_pace(semantics, _phase_times(times, "prefill", prompts), decode, osl)


def _phase_times(times: ReplicaTimes, phase: Phase, batch: float) -> PhaseTimes:
    costs, last = times.costs, times.stages - 1
    stage_s = [
        layers * costs.layer_s(phase, group, batch) + costs.edge_s(phase, group, batch, j == last)
        for j, (layers, group) in enumerate(zip(times.layers, times.groups, strict=True))
    ]
    return PhaseTimes(stage_s, [costs.hop_s(phase, hop, batch) for hop in times.hops], batch)


def bottlenecks_of(
    replicas: Sequence[Replica],
    routes: Sequence[Route],
    idle: Sequence[str],
    cluster: Cluster,
    costs: CostModel,
    links: Links,
) -> list[str]:
    """What limits the throughput, in words; idle are GPUs that are there and serve nothing."""
    found = []
    for role in ("prefill", "decode", "colocated"):
        side = [r for r in replicas if r.role == role]
        if side and all(r.utilisation >= FULL for r in side):
            found.append(f"all {role} replicas are at capacity")
        else:
            found += [f"{r.id} is at capacity" for r in side if r.utilisation >= FULL]
    found += [f"route {r.from_} -> {r.to} is full" for r in routes if r.flow_req_s >= r.capacity_req_s * FULL]
    if links == "shared":
        traffic = traffic_of(cluster, costs, replicas, routes)
        found += [f"{name} is full" for name, _ in traffic.at_least(FULL)]
    if idle:
        found.append(f"{len(idle)} GPUs are idle: " + ", ".join(idle))
    return found
