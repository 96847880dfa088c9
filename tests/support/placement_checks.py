"""Invariants of every placement, checked from its JSON without any code of the search."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import networkx as nx

from hexgen2.checks import violations
from hexgen2.placement import Placement

SLACK = 1e-6
"""Relative tolerance, for rates that were summed in floating point."""


def each_gpu_at_most_once(placement: dict[str, Any]) -> None:
    there: set[str] = set()
    for node in placement["cluster"]["nodes"]:
        count = int(node["accelerators"].partition(":")[2] or 1)
        there |= {f"{node['name']}/{index}" for index in range(count)}
    used = Counter(gpu for replica in placement["replicas"] for gpu in _gpus(replica))
    assert set(used) <= there - set(placement["lost"])
    assert set(used.values()) == {1}


def each_layer_once(placement: dict[str, Any]) -> None:
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
        for stage in replica.stages:
            share = stage.layer_count / stage.tensor_parallel
            needed = share * model.layer_bytes
            needed += share / model.layers * replica.max_batch * prompt * model.kv_bytes_per_token
            for gpu in stage.gpus:
                assert needed < own[cards[gpu.partition("/")[0]]].memory_gib * 2**30, gpu


def flow_is_conserved_within_capacity(placement: dict[str, Any]) -> None:
    """Each request enters at one prefill replica and leaves at one decode replica, or stays in a colocated
    one; nothing carries more than its capacity, and networkx finds a flow that is at least as large."""
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
