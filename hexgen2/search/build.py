"""From an evaluated solution to a placement: GPUs by name, layers by range, flows by route."""

from __future__ import annotations

import math

import numpy as np

from hexgen2.placement import (
    CostModelName,
    Latency,
    Placement,
    Replica,
    Route,
    SearchRecord,
    Stage,
    Throughput,
)
from hexgen2.prediction.bottlenecks import bottlenecks_of
from hexgen2.region import Region
from hexgen2.search.bounds.upper_bounds import UpperBound, rates_bound
from hexgen2.search.evaluation import Evaluation, PlannedReplica
from hexgen2.search.flow.max_flow import balance, few_routes
from hexgen2.search.naming import Name, fresh_names
from hexgen2.search.problem import Problem

MANY_ROUTES = 400
"""Beyond so many pairs of replicas, only as many routes as the load needs."""
ROUNDED_UP = 0.01
"""Steps hold whole tokens, so that a step of one prompt may hold a little more than that."""
NEGLIGIBLE = 1e-6
"""A route that carries less than this share of the throughput is rounding, and left out."""


def build_placement(
    problem: Problem,
    evaluation: Evaluation,
    strategy: str,
    search: SearchRecord,
    limit: UpperBound | None = None,
    names: list[Name] | None = None,
) -> Placement:
    """The placement of an evaluated solution, its flow spread evenly over the replicas (colocated ones keep
    what they carry). Without a limit, that of the GPUs' rates is its bound. Names, if given, are those of the
    prefill, decode and colocated replicas, in this order."""
    even = balance(evaluation.network, evaluation.flow)
    carried = (few_routes(evaluation.network, even) if even.routes.size > MANY_ROUTES else even).routes
    carried = np.where(carried > carried.sum() * NEGLIGIBLE, carried, 0.0)
    carried = np.minimum(carried, evaluation.network.routes)  # which it may exceed by rounding
    names = names or fresh_names(problem, evaluation)
    alone = dict(zip((r.index for r in evaluation.colocated), evaluation.alone.tolist(), strict=True))
    prompts, answers = dict(alone), dict(alone)
    for side, work, loads in (
        (evaluation.senders, prompts, carried.sum(axis=1)),
        (evaluation.receivers, answers, carried.sum(axis=0)),
    ):
        for each, load in zip(side, loads.tolist(), strict=True):
            work[each.index] = work.get(each.index, 0.0) + load
    made = {
        replica.index: _replica(
            problem,
            replica,
            name,
            prompts.get(replica.index, 0.0),
            answers.get(replica.index, 0.0),
            evaluation.region_of(replica),
        )
        for replica, name in zip(evaluation.replicas, names, strict=True)
    }
    replicas = list(made.values())
    routes = [
        Route.between(
            made[sender.index],
            made[receiver.index],
            problem.costs.kv_bytes_per_layer,
            capacity_req_s=float(evaluation.network.routes[i, j]),
            flow_req_s=float(carried[i, j]),
            to_every_rank=problem.costs.kv_to_every_rank,
        )
        for i, sender in enumerate(evaluation.senders)
        for j, receiver in enumerate(evaluation.receivers)
        if carried[i, j] > 0
    ]
    routes += [
        Route.within(made[r.index], flow_req_s=alone[r.index])
        for r in evaluation.colocated
        if r.index in evaluation.mixed and alone[r.index] > 0
    ]
    served = math.fsum(
        [
            *(route.flow_req_s for route in routes),
            *(own for index, own in alone.items() if index not in evaluation.mixed),
        ]
    )
    used = {gpu for name in names for stage in name.gpus for gpu in stage}
    cards = {problem.cluster.accelerators[gpu] for gpu in used}
    idle = [problem.cluster.gpu_ids[gpu] for gpu in problem.usable.tolist() if gpu not in used]
    return Placement(
        strategy=strategy,
        cluster=problem.spec,
        model=problem.model,
        workload=problem.workload,
        cost_model=CostModelName.of(problem.costs, problem.pipeline, problem.links, cards),
        goal=problem.goal,
        lost=sorted(problem.lost, key=problem.cluster.index),
        replicas=replicas,
        routes=routes,
        throughput=Throughput(req_s=served, output_tok_s=served * problem.costs.osl),
        latency=_latency(evaluation, carried),
        price_per_hour=float(problem.cluster.price_per_hour.sum()),
        bound=(limit or rates_bound(problem, bool(evaluation.colocated))).record(served),
        bottlenecks=bottlenecks_of(replicas, routes, idle, problem.cluster, problem.costs, problem.links),
        search=search,
    )


def _replica(
    problem: Problem,
    replica: PlannedReplica,
    name: Name,
    prompts: float,
    answers: float,
    region: Region | None,
) -> Replica:
    """A replica that computes so many prompts/s and decodes so many answers/s; with its region if it is
    mixed."""
    stages, layer = [], 0
    for stage, gpus in zip(replica.stages, name.gpus, strict=True):
        ids = [problem.cluster.gpu_ids[gpu] for gpu in gpus]
        stages.append(
            Stage(
                gpus=ids,
                layers=(layer, layer + stage.layers),
                attention_data_parallel=stage.attention_dp,
                expert_parallel=stage.expert_parallel,
            )
        )
        layer += stage.layers
    capacity = replica.capacity_req_s
    return Replica(
        id=name.id,
        role="mixed" if region else replica.group.role,  # type: ignore[arg-type]
        stages=stages,
        max_batch=max(1, math.ceil(replica.plan.batch - ROUNDED_UP)),
        capacity_req_s=capacity,
        utilisation=region.busy(prompts, answers) if region else min(1.0, max(prompts, answers) / capacity),
        engine=replica.plan.engine,
        region=list(region.corners) if region else None,
    )


def _latency(evaluation: Evaluation, routes: np.ndarray) -> Latency:
    """Means over requests: a prefill step's time and a decode step's time where each request goes, the latter
    stretched by the prefills of a colocated replica."""
    alone = [(r.plan, float(w)) for r, w in zip(evaluation.colocated, evaluation.alone, strict=True)]
    colocated = {r.index for r in evaluation.colocated}
    total = math.fsum([float(routes.sum()), *(w for _, w in alone)]) or 1.0
    first = zip(evaluation.senders, routes.sum(axis=1).tolist(), strict=True)
    rest = zip(evaluation.receivers, routes.sum(axis=0).tolist(), strict=True)
    ttft = [*(r.plan.latency_s * w for r, w in first), *(plan.latency_s * w for plan, w in alone)]
    tpot = [
        *((r.plan.token_s if r.index in colocated else r.plan.latency_s) * w for r, w in rest),
        *(plan.token_s * w for plan, w in alone),
    ]
    return Latency(ttft_ms=math.fsum(ttft) / total * 1e3, tpot_ms=math.fsum(tpot) / total * 1e3)
