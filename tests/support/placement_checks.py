"""Invariants of every placement, checked from its JSON without any code of the search."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import networkx as nx

from hexgen2.checks import violations
from hexgen2.placement import Placement, Replica

SLACK = 1e-6
"""Relative tolerance, for rates that were summed in floating point."""


def each_gpu_at_most_once(placement: dict[str, Any]) -> None:
    there: set[str] = set()
    for node in placement["cluster"]["nodes"]:
        count = int(node["accelerators"].partition(":")[2] or 1)
        there |= {f"{node['name']}/{index}" for index in range(count)}
    used = Counter(gpu for replica in placement["replicas"] for gpu in _gpus(replica))
    used.update(worker["gpu"] for worker in placement["attention_workers"])
    assert set(used) <= there - set(placement["lost"])
    assert set(used.values()) == {1}


def each_layer_once(placement: dict[str, Any]) -> None:
    """Of ranges of layers each route goes on where the range before ends; see flow_is_conserved."""
    if ranges := placement.get("layer_ranges"):
        held = {replica["id"]: replica["stages"][0]["layers"] for replica in placement["replicas"]}
        assert all(0 <= first < end <= placement["model"]["layers"] for first, end in held.values())
        for route in placement["routes"]:
            (_, end), (first, last) = held[route["from"]], held[route["to"]]
            assert first <= end < last if ranges["partial_inference"] else first == end
        return
    for replica in placement["replicas"]:
        layers = [layer for stage in replica["stages"] for layer in range(*stage["layers"])]
        assert layers == list(range(placement["model"]["layers"])), replica["id"]


def weights_and_caches_fit(placement: dict[str, Any]) -> None:
    """Each GPU has memory for at least its share of the layers and of the KV caches of a full batch."""
    parsed = Placement.model_validate(placement)
    model, lengths = parsed.model, placement["workload"]["classes"]
    prompt = min(each["isl"] for each in lengths)
    cards = {node.name: node.accelerators.partition(":")[0] for node in parsed.cluster.nodes}
    own = parsed.cluster.accelerators
    for replica in parsed.replicas:
        if parsed.workers_of(replica.id):
            stages_and_workers_hold(parsed, replica, prompt * model.kv_bytes_per_token / model.layers)
            continue
        for stage in replica.stages:
            share = stage.layer_count / stage.tensor_parallel
            needed = share * model.layer_bytes
            needed += share / model.layers * replica.max_batch * prompt * model.kv_bytes_per_token
            for gpu in stage.gpus:
                assert needed < own[cards[gpu.partition("/")[0]]].memory_gib * 2**30, gpu


def stages_and_workers_hold(placement: Placement, replica: Replica, layer_bytes: float) -> None:
    """The GPUs of each stage have memory for its weights, and together with its part of the attention workers
    for its KV caches, each request taking `layer_bytes` of a layer."""
    own = placement.cluster.accelerators
    card_of = {node.name: node.accelerators.partition(":")[0] for node in placement.cluster.nodes}

    def memory(gpu: str) -> float:
        return own[card_of[gpu.partition("/")[0]]].memory_gib * 2**30

    workers = placement.workers_of(replica.id)
    assert all(math.fsum(worker.kv_shares) <= 1 + SLACK for worker in workers)
    for s, stage in enumerate(replica.stages):
        weights = stage.layer_count * placement.model.layer_bytes
        room = math.fsum(map(memory, stage.gpus)) - weights
        assert room > 0
        room += math.fsum(worker.kv_shares[s] * memory(worker.gpu) for worker in workers)
        assert replica.max_batch * stage.layer_count * layer_bytes < room


def flow_is_conserved_within_capacity(placement: dict[str, Any]) -> None:
    """Each request enters at one prefill replica and leaves at one decode replica, or stays in a colocated
    one; nothing carries more than its capacity, and networkx finds a flow that is at least as large."""
    if placement.get("layer_ranges"):
        _flow_through_ranges(placement)
        return
    graph = nx.DiGraph()
    graph.add_nodes_from(("source", "sink"))
    carried: dict[str, float] = defaultdict(float)
    for route in placement["routes"]:
        assert 0 <= route["flow_req_s"] <= route["capacity_req_s"] * (1 + SLACK)
        carried[route["from"]] += route["flow_req_s"]
        carried[route["to"]] += route["flow_req_s"]
        graph.add_edge((route["from"], "out"), (route["to"], "in"), capacity=route["capacity_req_s"])
    total = 0.0
    for replica in placement["replicas"]:
        name, role = replica["id"], replica["role"]
        graph.add_edge((name, "in"), (name, "out"), capacity=replica["capacity_req_s"])
        if role == "colocated":
            assert name not in carried
            carried[name] = replica["utilisation"] * replica["capacity_req_s"]
        if role != "decode":
            total += carried[name]
            graph.add_edge("source", (name, "in"))
        if role != "prefill":
            graph.add_edge((name, "out"), "sink")
        assert carried[name] <= replica["capacity_req_s"] * (1 + SLACK), name
    throughput = placement["throughput"]["req_s"]
    assert math.isclose(total, throughput, rel_tol=SLACK) and throughput > 0
    assert throughput <= nx.maximum_flow_value(graph, "source", "sink") * (1 + SLACK)


def _flow_through_ranges(placement: dict[str, Any]) -> None:
    """What enters a replica leaves it, except at the first and the last layer; networkx finds as large a
    flow on the routes, and none that is larger on all pairs of ranges that may follow each other and have a
    route."""
    graph = nx.DiGraph()
    into: dict[str, float] = defaultdict(float)
    out: dict[str, float] = defaultdict(float)
    for route in placement["routes"]:
        assert 0 < route["flow_req_s"] <= route["capacity_req_s"] * (1 + SLACK)
        out[route["from"]] += route["flow_req_s"]
        into[route["to"]] += route["flow_req_s"]
        graph.add_edge((route["from"], "out"), (route["to"], "in"), capacity=route["capacity_req_s"])
    entered = left = 0.0
    for replica in placement["replicas"]:
        name, (first, end) = replica["id"], replica["stages"][0]["layers"]
        through = replica["utilisation"] * replica["capacity_req_s"]
        assert through <= replica["capacity_req_s"] * (1 + SLACK)
        graph.add_edge((name, "in"), (name, "out"), capacity=replica["capacity_req_s"])
        if first == 0:
            entered += through - into[name]
            graph.add_edge("source", (name, "in"))
        else:
            assert math.isclose(through, into[name], rel_tol=SLACK, abs_tol=SLACK * replica["capacity_req_s"])
        if end == placement["model"]["layers"]:
            left += through - out[name]
            graph.add_edge((name, "out"), "sink")
        else:
            assert math.isclose(through, out[name], rel_tol=SLACK, abs_tol=SLACK * replica["capacity_req_s"])
    throughput = placement["throughput"]["req_s"]
    assert math.isclose(entered, throughput, rel_tol=SLACK) and throughput > 0
    assert math.isclose(left, throughput, rel_tol=SLACK)
    assert throughput <= nx.maximum_flow_value(graph, "source", "sink") * (1 + SLACK)
    lengths = placement["workload"]["classes"]
    weight = sum(each["weight"] for each in lengths)
    tokens = sum((each["isl"] + each["osl"]) * each["weight"] for each in lengths) / weight
    assert math.isclose(placement["throughput"]["total_tok_s"], throughput * tokens, rel_tol=SLACK)


def the_bound_holds(placement: dict[str, Any]) -> None:
    bound, req_s = placement["bound"], placement["throughput"]["req_s"]
    assert req_s <= bound["req_s"] * (1 + SLACK)
    assert -SLACK <= bound["gap"] < 1


def the_price_is_within_the_budget(placement: dict[str, Any]) -> None:
    own, total = placement["cluster"]["accelerators"], 0.0
    for node in placement["cluster"]["nodes"]:
        card, _, count = node["accelerators"].partition(":")
        price = node.get("price_per_gpu_hour")
        total += int(count or 1) * (own[card]["price_per_gpu_hour"] if price is None else price)
    assert math.isclose(placement["price_per_hour"], total, rel_tol=SLACK)
    budget = placement["goal"]["budget_per_hour"]
    if budget is not None:
        assert total <= budget * (1 + SLACK)


CHECKS: tuple[Callable[[dict[str, Any]], None], ...] = (
    each_gpu_at_most_once,
    each_layer_once,
    weights_and_caches_fit,
    flow_is_conserved_within_capacity,
    the_bound_holds,
    the_price_is_within_the_budget,
)


def check_placement(placement: Placement) -> None:
    """Run the project's own checkers and then those above on a placement as its file states it."""
    assert violations(placement) == []
    told = json.loads(placement.to_json())
    assert Placement.model_validate(told) == placement
    for check in CHECKS:
        check(told)


def _gpus(replica: dict[str, Any]) -> list[str]:
    return [gpu for stage in replica["stages"] for gpu in stage["gpus"]]
