"""Flow under shared resources, compared with scipy's LP, with max flow where nothing is shared, and with
cases by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
from flows import check_flow, networks, with_networkx
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problem_from, problems
from scipy.optimize import linprog
from scipy.sparse import csr_array

from cost_model.errors import InfeasibleError
from hexgen2.checks import violations
from hexgen2.network.kv_parts import layer_overlaps
from hexgen2.network.shared_links import Links
from hexgen2.placement import SearchRecord
from hexgen2.search.build import build_placement
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.flow import max_flow as flow
from hexgen2.search.flow.max_flow import FlowNetwork, balance, settled, solve, without_sharing
from hexgen2.search.flow.routes import route_use
from hexgen2.search.flow.shared_use import SharedUse
from hexgen2.search.local_search import guided_steps
from hexgen2.search.planning.plan import PlannedStage
from hexgen2.search.problem import Group, Solution, make_problem
from hexgen2.search.sparse_rows import SparseRows
from hexgen2.search.ties import spread
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy


@st.composite
def shared_networks(draw):
    """A flow network whose routes share up to six resources at random."""
    network = draw(networks())
    seconds = st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.5, 2.0])
    size, count = network.routes.size, draw(st.integers(1, 6))
    busy = np.array([draw(st.lists(seconds, min_size=size, max_size=size)) for _ in range(count)])
    resource, route = np.nonzero(busy)
    return replace(
        network, shared=SharedUse(network.routes.shape, count, resource, route, busy[resource, route])
    )


def dense(shared: SharedUse) -> np.ndarray:
    matrix = np.zeros((shared.count, shared.shape[0] * shared.shape[1]))
    np.add.at(matrix, (shared.resource, shared.route), shared.busy_s)
    return matrix


def with_linprog(network: FlowNetwork) -> float:
    p, d = network.routes.shape
    sides = [np.kron(np.eye(p), np.ones(d)), np.kron(np.ones(p), np.eye(d))]
    assert network.shared is not None
    rows = np.vstack([*sides, dense(network.shared)])
    limits = np.concatenate([network.prefill, network.decode, np.ones(network.shared.count)])
    bounds = np.column_stack([np.zeros(p * d), network.routes.ravel()])
    return -linprog(-np.ones(p * d), A_ub=rows, b_ub=limits, bounds=bounds).fun


@settings(deadline=None)
@given(shared_networks())
def test_shared_flow_equals_scipys_linear_program(network):
    flow = solve(network)
    check_flow(network, flow)
    assert (dense(network.shared) @ flow.routes.ravel() <= 1 + 1e-6).all()
    assert flow.value == pytest.approx(with_linprog(network), rel=1e-6)
    even = balance(network, flow)
    check_flow(network, even)
    assert (dense(network.shared) @ even.routes.ravel() <= 1 + 1e-6).all()
    assert even.value == pytest.approx(flow.value, rel=1e-6)


def weighed(network: FlowNetwork, routes: np.ndarray) -> float:
    """What the settled flow minimises: the transfer times, and a tenth of a weight for each route."""
    transfer_s = 1 / network.routes.ravel()
    weights = transfer_s / transfer_s.mean() + 0.1 * spread(transfer_s.size)
    return float((weights * routes.ravel()).sum())


@settings(deadline=None)
@given(shared_networks(), st.integers(0, 99))
def test_the_flow_to_read_does_not_depend_on_the_solvers_pivots(network, seed):
    """The flow stays the same when the program's rows and columns are reordered, so that the solver meets
    other vertices. It is a maximum flow, and no other maximum flow weighs less."""
    found = solve(network)
    expected, solver = settled(network, found), flow._solved
    check_flow(network, expected)
    assert expected.value == pytest.approx(found.value, rel=1e-8)
    in_proportion = flow._in_proportion(network).routes
    if not network.carries(in_proportion):
        assert weighed(network, expected.routes) <= weighed(network, found.routes) * (1 + 1e-6) + 1e-6
    draw = np.random.default_rng(seed)

    def shuffled(most, matrix, limits, weights=None):
        columns, rows = draw.permutation(len(most)), draw.permutation(len(limits))
        dense = csr_array((matrix.values, matrix.columns, matrix.starts), (matrix.count, matrix.width))
        moved = SparseRows.dense(dense.toarray()[rows][:, columns])
        weights = np.ones(len(most)) if weights is None else weights
        values = np.empty(len(most))
        values[columns] = solver(most[columns], moved, limits[rows], weights[columns]).x
        return SimpleNamespace(x=values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flow, "_solved", shuffled)
        for _ in range(3):
            other = settled(network, solve(network))
            assert np.allclose(other.routes, expected.routes, rtol=1e-5, atol=1e-5 * max(found.value, 1e-9))


@settings(deadline=None)
@given(networks())
def test_where_each_resource_has_one_route_it_is_a_max_flow(network):
    size = network.routes.size
    own = SharedUse(network.routes.shape, size, np.arange(size), np.arange(size), 1 / network.routes.ravel())
    unlimited = np.full(network.routes.shape, 1e9)
    flow = solve(replace(network, routes=unlimited, shared=own))
    assert flow.value == pytest.approx(with_networkx(network), rel=1e-6)


def star(card: float | None = None, centre: int = 4):
    """Node a between b and c; 10 Gbit/s between any two, KV caches of 1.45 GB each (OPT 30B)."""
    nodes = [
        {"name": "a", "accelerators": f"H100:{centre}", "interconnect": "nvlink"},
        {"name": "b", "accelerators": "H100:4", "interconnect": "nvlink"},
        {"name": "c", "accelerators": "H100:4", "interconnect": "nvlink"},
    ]
    if card:
        nodes[0]["network_gbit_s"] = card
    network = {"default": {"bandwidth_gbit_s": 10, "latency_us": 0}}
    return problem_from({"name": "star", "nodes": nodes, "network": network}, "opt-30b", "HPHD")


FROM_A = Solution(
    (
        Group("prefill", ((0, 2),)),
        Group("prefill", ((0, 2),)),
        Group("decode", ((1, 4),)),
        Group("decode", ((2, 4),)),
    )
)


def test_pairwise_counts_a_network_card_twice():
    problem = star()
    kv_bytes = problem.costs.kv_bytes_per_layer * problem.model.layers
    one_card = 10e9 / 8 / kv_bytes
    shared = Evaluator(problem).evaluate(FROM_A)
    assert shared.req_s == pytest.approx(one_card, rel=1e-6)
    # Two prefill replicas to each of two decode replicas: four routes, as if over four links.
    pairwise = Evaluator(replace(problem, links="pairwise")).evaluate(FROM_A)
    assert pairwise.network.routes == pytest.approx(np.full((2, 2), one_card))
    assert pairwise.req_s > 2 * one_card
    # A card that carries both links at full speed halves the loss.
    wide = Evaluator(star(card=20)).evaluate(FROM_A)
    assert wide.req_s == pytest.approx(2 * one_card, rel=1e-6)


def test_an_uplink_limits_what_leaves_several_nodes():
    problem = star()
    spec = problem.spec.model_dump(mode="json", by_alias=True)
    spec["network"]["uplinks"] = [{"name": "west", "nodes": ["a", "b"], "bandwidth_gbit_s": 1}]
    uplinked = problem_from(spec, "opt-30b", "HPHD")
    to_c = Solution(tuple(g for g in FROM_A.groups if g.counts[0][0] != 1))
    kv_bytes = problem.costs.kv_bytes_per_layer * problem.model.layers
    assert Evaluator(uplinked).evaluate(to_c).req_s == pytest.approx(1e9 / 8 / kv_bytes, rel=1e-6)
    # Traffic that stays within the uplink's nodes takes the link to b.
    assert Evaluator(uplinked).evaluate(FROM_A).req_s == pytest.approx(10e9 / 8 / kv_bytes, rel=1e-6)


def test_a_route_occupies_what_its_kv_cache_and_both_pipelines_cross():
    problem = star()
    shared, costs = problem.shared_links, problem.costs
    prefill = [PlannedStage(0, 1, 24), PlannedStage(1, 2, 24)]
    decode = [PlannedStage(1, 1, 12), PlannedStage(2, 1, 36)]
    traffic = np.zeros((3, 3))
    for i, j, layers in layer_overlaps([24, 24], [12, 36]):
        traffic[prefill[i].node, decode[j].node] += layers * costs.kv_bytes_per_layer
    activations = problem.model.hidden * problem.model.kv_value_bytes
    traffic[0, 1] += costs.isl * activations
    traffic[1, 2] += costs.osl * activations
    use = route_use(problem, prefill, decode)
    limited = np.isfinite(shared.capacity_bytes_s)
    busy = np.zeros(shared.count + 2 * problem.model.layers)
    busy[use.resources] = use.busy_s
    carried = busy[: shared.count][limited] * shared.capacity_bytes_s[limited]
    expected = np.zeros(shared.count)
    for a, b in np.argwhere(traffic):
        expected[list(shared.resources_between(a, b))] += traffic[a, b]
    assert np.allclose(carried, expected[limited])


def test_routes_of_a_replica_share_its_gpus_ports():
    """One GPU sends to three receivers in its node: more routes, but no more flow."""
    nodes = [
        {
            "name": "a",
            "accelerators": "A100-80GB:4",
            "interconnect": {"bandwidth_gbyte_s": 1, "latency_us": 0},
        }
    ]
    problem = problem_from({"name": "one", "nodes": nodes}, "opt-30b", "HPHD")
    solution = Solution((Group("prefill", ((0, 1),)), *[Group("decode", ((0, 1),))] * 3))
    kv_bytes = problem.costs.kv_bytes_per_layer * problem.model.layers
    assert Evaluator(problem).evaluate(solution).req_s == pytest.approx(1e9 / kv_bytes, rel=1e-6)


def test_replicas_around_a_full_card_are_tried_elsewhere():
    evaluator = Evaluator(star(card=5))
    evaluation = evaluator.evaluate(FROM_A)
    assert (evaluation.flow.routes < evaluation.network.routes).any()
    kinds = {step.kind for step, _ in guided_steps(evaluator, evaluation)}
    assert {"flip", "swap"} <= kinds


@settings(max_examples=15, deadline=None)
@given(problems(max_gpus=6))
def test_sharing_never_adds_throughput_and_a_search_respects_it(problem):
    evaluator = Evaluator(problem)
    halves = tuple(
        Group(role, ((node, 1),))
        for node, gpus in enumerate(problem.node_gpus)
        for role, _ in zip(("prefill", "decode"), gpus, strict=False)
    )
    evaluation = evaluator.evaluate(Solution(halves))
    assert evaluation.req_s <= without_sharing(evaluation.network).value * (1 + 1e-6)
    for links in ("shared", "pairwise"):
        placement = _searched(replace(problem, links=links))
        if placement is not None:
            assert placement.cost_model.links == links and violations(placement) == []


def _searched(problem, strategy="genetic"):
    try:
        return find_strategy(strategy)(problem, SearchOptions())
    except InfeasibleError:
        return None


def test_the_placement_names_the_card_that_is_full():
    problem = star()
    evaluation = Evaluator(problem).evaluate(FROM_A)
    record = SearchRecord(seconds=0, seed=0, evaluations=1)
    placement = build_placement(problem, evaluation, "by hand", record)
    assert violations(placement) == []
    assert "the network card of a (out) is full" in placement.bottlenecks
    assert not any("capacity" in text for text in placement.bottlenecks)


def test_pipelines_of_colocated_replicas_share_links_too():
    nodes = [{"name": n, "accelerators": "A100-80GB:4", "interconnect": "nvlink"} for n in "ab"]
    network = {"default": {"bandwidth_gbit_s": 1, "latency_us": 0}}
    problem = problem_from({"name": "two", "nodes": nodes, "network": network}, "opt-30b", "HPLD")
    across = Group("colocated", ((0, 2), (1, 2)))
    both = Solution((across, across))
    costs = problem.costs
    hop = (costs.isl + costs.osl) * costs.activation_bytes_per_token
    evaluation = Evaluator(problem).evaluate(both)
    pairwise = Evaluator(replace(problem, links="pairwise")).evaluate(both)
    assert pairwise.req_s > evaluation.req_s == pytest.approx(1e9 / 8 / hop, rel=1e-6)
    placement = build_placement(
        problem, evaluation, "by hand", SearchRecord(seconds=0, seed=0, evaluations=1)
    )
    assert violations(placement) == []
    assert "the link from a to b is full" in placement.bottlenecks


def test_the_whole_search_under_either_reading():
    problem = make_problem("hexgen2-setting-1", "opt-30b", "HPHD", phases="disaggregated")
    found = {links: _searched(replace(problem, links=links), "hexgen2") for links in get_args(Links)}
    for links, placement in found.items():
        assert placement.cost_model.links == links and violations(placement) == []
    assert 0 < found["shared"].throughput.req_s <= found["pairwise"].throughput.req_s * (1 + 1e-6)
