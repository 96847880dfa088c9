"""Placements made by hand for tests, without a search."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from cluster_specs.schema import AcceleratorSpec, ClusterSpec
from cost_model.architecture import ModelArchitecture
from hexgen2.network.shared_links import Links
from hexgen2.placement import (
    BoundRecord,
    CostModelName,
    Latency,
    Placement,
    Replica,
    Route,
    SearchRecord,
    Stage,
    Throughput,
)
from hexgen2.search.build import build_placement
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.problem import Group, Solution, make_problem
from hexgen2.workload.lengths import Workload

CORE = AcceleratorSpec(memory_gib=2, bf16_dense_tflops=0.2, memory_bandwidth_gbyte_s=10, kind="cpu")


def replica_of(
    name: str,
    stages: Sequence[tuple[str, int]],
    *,
    max_batch: int = 8,
    capacity_req_s: float = 2.0,
    utilisation: float = 0.0,
    region: Sequence[tuple[float, float]] | None = None,
) -> Replica:
    """A replica whose role is the start of its name.

    Parameters
    ----------
    stages : each stage's GPUs ("a/0 a/1") and number of layers
    region : of a mixed replica; None: both phases take it as long
    """
    if name.startswith("mixed"):
        region = region or [(0.0, 2 * capacity_req_s), (2 * capacity_req_s, 0.0)]
    first, parts = 0, []
    for gpus, count in stages:
        parts.append(Stage(gpus=gpus.split(), layers=(first, first + count)))
        first += count
    return Replica(
        id=name,
        role=name.partition("-")[0],
        stages=parts,
        max_batch=max_batch,
        capacity_req_s=capacity_req_s,
        utilisation=utilisation,
        region=region,
    )


def placement_of(
    cluster: ClusterSpec,
    model: ModelArchitecture,
    workload: Workload,
    replicas: list[Replica],
    routes: list[Route],
    links: Links = "pairwise",
) -> Placement:
    """An unverified placement. Its throughput and its bound are what the routes and colocated replicas
    carry."""
    carried = sum(route.flow_req_s for route in routes)
    carried += sum(each.capacity_req_s * each.utilisation for each in replicas if each.role == "colocated")
    return Placement(
        strategy="by-hand",
        cluster=cluster,
        model=model,
        workload=workload,
        cost_model=CostModelName(name="calibrated", calibration="none", pipeline="pipelined", links=links),
        replicas=replicas,
        routes=routes,
        throughput=Throughput(req_s=carried, output_tok_s=carried * workload.osl),
        latency=Latency(ttft_ms=10.0, tpot_ms=10.0),
        price_per_hour=0.0,
        bound=BoundRecord(req_s=carried, gap=0.0, assumptions=[]),
        bottlenecks=[],
        search=SearchRecord(seconds=0.0, seed=0, evaluations=0),
    )


@functools.cache
def one_of_each_role() -> Placement:
    """Two prefill replicas, one that decodes, and one that decodes for others and itself, at full scale."""
    groups = (
        Group("colocated", ((0, 4),)),
        Group("decode", ((1, 2), (2, 2))),
        Group("prefill", ((3, 3), (4, 1), (5, 2))),
        Group("prefill", ((3, 1), (4, 3), (6, 2))),
    )
    problem = make_problem("hexgen2-setting-3", "llama-2-70b", "online", phases="flexible")
    evaluator = Evaluator(problem)
    found = evaluator.evaluate(Solution(groups))
    # With the chunks that suit its own requests, it can do either phase for others.
    usual = tuple(replace(r, plan=r.own or r.plan, own=None) for r in found.colocated)
    evaluated = evaluator.with_plans(found.solution, found.prefill, found.decode, usual)
    return build_placement(problem, evaluated, "by-hand", SearchRecord(seconds=0.0, seed=0, evaluations=1))
