"""Max flow compared with networkx, KV routes with a count of every byte."""

from __future__ import annotations

import numpy as np
import pytest
from flows import check_flow, networks, with_networkx
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problem_from

from hexgen2.network.kv_parts import layer_overlaps
from hexgen2.search.flow.max_flow import FlowNetwork, balance, solve
from hexgen2.search.flow.routes import route_use
from hexgen2.search.planning.plan import PlannedStage


@settings(deadline=None)
@given(networks())
def test_max_flow_equals_networkx(network):
    flow = solve(network)
    check_flow(network, flow)
    assert flow.value == pytest.approx(with_networkx(network), rel=1e-6)


@settings(deadline=None)
@given(networks())
def test_balanced_flow_has_the_same_value_and_no_higher_peak(network):
    flow = solve(network)
    even = balance(network, flow)
    check_flow(network, even)
    assert even.value == pytest.approx(flow.value, rel=1e-6)
    # With routes to spare, all replicas of a role are equally used.
    free = FlowNetwork(network.prefill, network.decode, np.full(network.routes.shape, 1e6))
    spread = balance(free, solve(free))
    for used, capacity in (
        (spread.routes.sum(axis=1), free.prefill),
        (spread.routes.sum(axis=0), free.decode),
    ):
        assert np.allclose(used, capacity * spread.value / capacity.sum(), atol=1e-6 * spread.value)


def test_no_capacity_no_flow():
    network = FlowNetwork(np.array([0.0]), np.array([1.0]), np.array([[1.0]]))
    assert solve(network).value == 0


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5), st.lists(st.integers(1, 9), min_size=1, max_size=5)
)
def test_overlaps_count_every_layer_once(left, right):
    layers = max(sum(left), sum(right))
    left, right = [*left, layers - sum(left)], [*right, layers - sum(right)]
    left, right = [n for n in left if n], [n for n in right if n]
    owner_left = [i for i, n in enumerate(left) for _ in range(n)]
    owner_right = [j for j, n in enumerate(right) for _ in range(n)]
    expected: dict = {}
    for pair in zip(owner_left, owner_right, strict=True):
        expected[pair] = expected.get(pair, 0) + 1
    assert {(i, j): n for i, j, n in layer_overlaps(left, right)} == expected


@pytest.fixture
def pods():
    nodes = [
        {"name": "a", "accelerators": "H100:4", "interconnect": {"bandwidth_gbyte_s": 100, "latency_us": 0}},
        {
            "name": "b",
            "accelerators": "A100-80GB:4",
            "interconnect": {"bandwidth_gbyte_s": 100, "latency_us": 0},
        },
    ]
    network = {"default": {"bandwidth_gbit_s": 80, "latency_us": 0}}
    return problem_from({"name": "t", "nodes": nodes, "network": network}, "llama-2-70b", "HPLD")


def test_transfer_between_nodes_uses_the_one_link(pods):
    total = pods.model.kv_bytes_per_token * pods.costs.isl
    one = [PlannedStage(0, 2, 80)], [PlannedStage(1, 1, 40), PlannedStage(1, 1, 40)]
    assert route_use(pods, *one).transfer_s == pytest.approx(total / 10e9)


def test_transfer_inside_a_node_uses_the_ports_of_both_sides(pods):
    total = pods.model.kv_bytes_per_token * pods.costs.isl
    assert route_use(pods, [PlannedStage(0, 2, 80)], [PlannedStage(0, 2, 80)]).transfer_s == pytest.approx(
        total / 200e9
    )
    assert route_use(pods, [PlannedStage(0, 1, 80)], [PlannedStage(0, 2, 80)]).transfer_s == pytest.approx(
        total / 100e9
    )
    # Two stages on each side; each sends its half at the same time.
    halves = [PlannedStage(0, 1, 40), PlannedStage(0, 1, 40)]
    assert route_use(pods, halves, halves).transfer_s == pytest.approx(total / 200e9)


def test_stage_order_decides_what_crosses_the_network(pods):
    total = pods.model.kv_bytes_per_token * pods.costs.isl
    prefill = [PlannedStage(0, 1, 40), PlannedStage(1, 1, 40)]
    aligned = [PlannedStage(0, 1, 40), PlannedStage(1, 1, 40)]
    crossed = aligned[::-1]
    assert route_use(pods, prefill, aligned).transfer_s == pytest.approx(total / 2 / 100e9)
    assert route_use(pods, prefill, crossed).transfer_s == pytest.approx(total / 2 / 10e9)
