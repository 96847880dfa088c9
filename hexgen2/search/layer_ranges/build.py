"""From ranges and their flow to the placement."""

from __future__ import annotations

import math

from cost_model.hardware import Link
from hexgen2.costs import CostModelName
from hexgen2.layer_ranges import LayerRanges
from hexgen2.placement import BoundRecord, Latency, Placement, Replica, Route, SearchRecord, Stage, Throughput
from hexgen2.prediction.bottlenecks import FULL
from hexgen2.search.layer_ranges.bounds import Bound
from hexgen2.search.layer_ranges.instance import NOTHING, Ranges
from hexgen2.search.layer_ranges.max_flow import Flow
from hexgen2.search.layer_ranges.nodes import RangeNodes
from hexgen2.search.layer_ranges.paths import paths_of
from hexgen2.search.layer_ranges.service import Service
from hexgen2.search.problem import Problem

UNLIMITED_TOK_S = 1e15
"""In place of an infinite capacity."""
_METHODS = {
    "paper": "rates",
    "work": "rates",
    "covering": "linear program",
    "integer program": "integer program",
}
_ASSUMPTIONS = {
    "paper": "layers are divided among nodes without a remainder",
    "work": "no node passes more than the whole flow",
    "covering": "the nodes that hold a layer pass the whole flow together, for each layer",
    "integer program": "the integer program of ranges and flows",
}


def build_placement(
    problem: Problem,
    nodes: RangeNodes,
    ranges: Ranges,
    flow: Flow,
    bound: Bound,
    strategy: str,
    search: SearchRecord,
) -> Placement:
    """A replica for each node that holds layers, a route for each edge of the flow."""
    instance, cluster = nodes.instance, problem.cluster
    tokens = problem.workload.isl + problem.workload.osl
    held = [v for v, each in enumerate(ranges) if each != NOTHING]
    replicas = [_replica(problem, nodes, ranges, flow, v, tokens) for v in held]
    routes = [_route(problem, nodes, a, b, tok_s, tokens) for (a, b), tok_s in sorted(flow.edges.items())]
    req_s = flow.tok_s / tokens
    cards = {cluster.accelerators[gpu] for v in held for gpu in nodes.gpus[v]}
    idle = [cluster.gpu_ids[g] for v in range(instance.nodes) if v not in held for g in nodes.gpus[v]]
    partial = instance.partial and any(ranges[a][1] != ranges[b][0] for a, b in flow.edges)
    return Placement(
        strategy=strategy,
        cluster=problem.spec,
        model=problem.model,
        workload=problem.workload,
        cost_model=CostModelName.of(
            problem.costs, problem.pipeline, "pairwise", () if nodes.tables else cards
        ),
        goal=problem.goal,
        lost=sorted(problem.lost, key=cluster.index),
        replicas=replicas,
        routes=routes,
        layer_ranges=LayerRanges(
            partial_inference=partial,
            latency_aware=problem.latency_aware,
            kept_up_req_s=req_s * Service(problem, nodes).share(flow, ranges),
            tables=dict(nodes.tables) if nodes.tables is not None else None,
        ),
        throughput=Throughput(req_s=req_s, output_tok_s=req_s * problem.workload.osl, total_tok_s=flow.tok_s),
        latency=_latency(problem, nodes, ranges, flow, replicas, held),
        price_per_hour=float(cluster.price_per_hour.sum()),
        bound=BoundRecord(
            req_s=bound.tok_s / tokens,
            gap=max(0.0, 1 - flow.tok_s / bound.tok_s),
            method=_METHODS[bound.method],  # type: ignore[arg-type]
            assumptions=[_ASSUMPTIONS[bound.method], "links carry whatever nodes pass"],
            total_tok_s=bound.tok_s,
        ),
        bottlenecks=_bottlenecks(replicas, routes, idle),
        search=search,
    )


def _replica(
    problem: Problem, nodes: RangeNodes, ranges: Ranges, flow: Flow, node: int, tokens: float
) -> Replica:
    instance, held = nodes.instance, ranges[node]
    capacity = instance.tok_s(node, held)
    return Replica(
        id=nodes.names[node],
        role="colocated",
        stages=[Stage(gpus=[problem.cluster.gpu_ids[g] for g in nodes.gpus[node]], layers=held)],
        max_batch=nodes.most_requests(node, held),
        capacity_req_s=capacity / tokens,
        utilisation=min(1.0, flow.node_tok_s[node] / capacity),
    )


def _route(problem: Problem, nodes: RangeNodes, a: int, b: int, tok_s: float, tokens: float) -> Route:
    """An edge of the flow; its capacity is that of the link between the two nodes."""
    bytes_ = tokens * problem.costs.activation_bytes_per_token
    capacity = min(float(nodes.instance.link_tok_s[a, b]), UNLIMITED_TOK_S)
    ends = [problem.cluster.gpu_ids[nodes.gpus[v][0]] for v in (a, b)]
    return Route.model_validate(
        {
            "from": nodes.names[a],
            "to": nodes.names[b],
            "flow_req_s": tok_s / tokens,
            "capacity_req_s": capacity / tokens,
            "kv_bytes_per_req": bytes_,
            "links": [{"from": ends[0], "to": ends[1], "bytes_per_req": bytes_}],
        }
    )


def _latency(
    problem: Problem, nodes: RangeNodes, ranges: Ranges, flow: Flow, replicas: list[Replica], held: list[int]
) -> Latency:
    """Means over the paths of the flow, without queueing: a prompt alone, and a decode step of the requests
    that nodes hold, divided among the nodes of the path, with every hop on the way."""
    costs, cluster, total = problem.costs, problem.cluster, flow.tok_s or 1.0
    batches = {v: replica.max_batch for v, replica in zip(held, replicas, strict=True)}
    groups = {
        v: replica.stages[0].tensor_group(cluster.accelerators[nodes.gpus[v][0]], _inside(problem, nodes, v))
        for v, replica in zip(held, replicas, strict=True)
    }
    first_s = token_s = 0.0
    for path in paths_of(flow, ranges):
        least = min(batches[v] for v in path.nodes)
        batch = max(1.0, least / len(path.nodes))
        for phase, requests in (("prefill", 1.0), ("decode", batch)):
            spent = [
                layers * costs.layer_s(phase, groups[v], requests)  # type: ignore[arg-type]
                + costs.edge_s(phase, groups[v], requests, v == path.nodes[-1])  # type: ignore[arg-type]
                for v, layers in zip(path.nodes, path.layers, strict=True)
            ]
            spent += [
                costs.hop_s(phase, _link(problem, nodes, a, b), requests)  # type: ignore[arg-type]
                for a, b in zip(path.nodes, path.nodes[1:], strict=False)
            ]
            share = math.fsum(spent) * path.tok_s / total
            if phase == "prefill":
                first_s += share
            else:
                token_s += share
    return Latency(ttft_ms=first_s * 1e3, tpot_ms=token_s * 1e3)


def _inside(problem: Problem, nodes: RangeNodes, node: int) -> Link:
    machine = int(problem.cluster.node_of[nodes.gpus[node][0]])
    return problem.node_links[machine][machine]


def _link(problem: Problem, nodes: RangeNodes, a: int, b: int) -> Link:
    cluster, i, j = problem.cluster, nodes.gpus[a][0], nodes.gpus[b][0]
    return Link(float(cluster.bandwidth_bytes_s[i, j]), float(cluster.latency_s[i, j]))


def _bottlenecks(replicas: list[Replica], routes: list[Route], idle: list[str]) -> list[str]:
    """Every full replica and route, and the idle GPUs, one line each."""
    full = [r.id for r in replicas if r.utilisation >= FULL]
    found = [f"at capacity: {', '.join(full)}"] if full else []
    found += [f"route {r.from_} -> {r.to} is full" for r in routes if r.flow_req_s >= r.capacity_req_s * FULL]
    if idle:
        found.append(f"{len(idle)} GPUs are idle: " + ", ".join(idle))
    return found
