"""The relaxation: patterns over alike nodes, valid bounds, and a starting solution on real GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from problems import MODELS, clusters, problem_from, problems

from cluster_specs.loader import parse_cluster
from cost_model.errors import InfeasibleError
from hexgen2.search.bounds.columns import Column, list_columns, undominated
from hexgen2.search.bounds.configuration_lp import ConfigurationLP
from hexgen2.search.bounds.relaxations import Relaxations
from hexgen2.search.bounds.upper_bounds import rates_bound
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.local_search import refine
from hexgen2.search.planning import classes
from hexgen2.search.planning.classes import node_classes, widest_span
from hexgen2.search.planning.plan import Planner
from hexgen2.search.problem import ROLES, Problem, Solution, make_problem
from hexgen2.search.state import SearchState
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy
from hexgen2.workload.lengths import RequestClass, Workload


def check_layout(problem: Problem, evaluator: Evaluator, solution: Solution) -> None:
    """Each GPU is used at most once, and each group can hold the model."""
    used = [0] * len(problem.node_gpus)
    for group in solution.groups:
        assert evaluator.planner.plan(group.role, group.counts) is not None
        for node, count in group.counts:
            used[node] += count
    assert all(n <= len(gpus) for n, gpus in zip(used, problem.node_gpus, strict=True))


def many_nodes(cards: list[str], bandwidth_gbit_s: float = 100) -> dict:
    nodes = [
        {"name": f"n{i}", "accelerators": card, "interconnect": "nvlink"} for i, card in enumerate(cards)
    ]
    network = {"default": {"bandwidth_gbit_s": bandwidth_gbit_s, "latency_us": 20}}
    return {"name": "many", "nodes": nodes, "network": network}


@pytest.mark.parametrize("phases", ["colocated", "disaggregated"])
def test_pure_phases_are_rounded_with_the_planner_of_a_flexible_search(phases, monkeypatch):
    """A planner of all phases knows what colocated groups could do for others; those programs do not. Kinds
    of nodes stand for classes, as in large clusters."""
    monkeypatch.setattr(classes, "PATTERNS_LISTED", 0)
    spec = parse_cluster(many_nodes(["A6000:2", "L40:2", "A6000:2", "A100-40GB:2"]), "test", Path())
    flexible = make_problem(spec, "llama-2-70b", "HPLD", phases="flexible")
    relaxed = Relaxations(Planner(flexible), replace(flexible, phases=phases))
    start = relaxed.start()
    assert {group.role for group in start.groups} <= set(ROLES[phases])
    check_layout(flexible, Evaluator(flexible), start)


@settings(max_examples=20, deadline=None)
@given(problems(max_gpus=6))
def test_every_bound_holds_against_exhaustive_search(problem):
    check_bounds(problem)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(problems(max_gpus=7))
def test_every_bound_holds_on_larger_clusters(problem):
    check_bounds(problem)


def check_bounds(problem: Problem) -> None:
    """Exhaustive search finds nothing above the bounds, and tighter methods give tighter ones."""
    try:
        best = find_strategy("exact")(problem, SearchOptions(simulated=False)).throughput.req_s
    except InfeasibleError:
        return
    evaluator = Evaluator(problem)
    relaxed = evaluator.relaxed
    limit = relaxed.upper_bound()
    solution, whole = relaxed.whole()
    assert best <= whole.req_s * (1 + 1e-6)
    assert whole.req_s <= limit.req_s * (1 + 1e-6)
    assert limit.req_s <= limit.kv_free_req_s * (1 + 1e-6)
    assert limit.kv_free_req_s <= rates_bound(problem).req_s * (1 + 1e-6)
    check_layout(problem, evaluator, solution)
    check_layout(problem, evaluator, relaxed.start())
    hurried = Evaluator(problem).relaxed
    assert hurried.list_columns() and hurried.columns
    hurried.stop = lambda: True
    early = hurried.upper_bound()
    hurried.stop = lambda: False
    assert best <= hurried.tighten().req_s * (1 + 1e-6) <= early.req_s * (1 + 2e-6)


@settings(max_examples=25, deadline=None)
@given(problems(max_gpus=6), st.sampled_from(["disaggregated", "flexible"]))
def test_the_bound_holds_where_nodes_of_all_sizes_are_one_class(problem, phases):
    problem = replace(problem, phases=phases)
    try:
        best = find_strategy("exact")(problem, SearchOptions(simulated=False)).throughput.req_s
    except InfeasibleError:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classes, "LARGE", 0)
        patch.setattr(classes, "LARGE_LISTED", 0)
        relaxed = Evaluator(problem).relaxed
        kinds = len({(problem.node_kind[n], problem.node_price[n]) for n in range(len(problem.node_gpus))})
        assert len(relaxed.classes.nodes) == kinds
        assert best <= relaxed.upper_bound().req_s * (1 + 1e-6)
        check_layout(problem, Evaluator(problem), relaxed.start())


@pytest.mark.parametrize("bandwidth_gbit_s", [1, 10, 100])
def test_a_slow_link_between_two_gpus_bounds_the_throughput(bandwidth_gbit_s):
    spec = many_nodes(["H100:1", "H100:1"], bandwidth_gbit_s)
    problem = problem_from(spec, "opt-13b", "HPLD")
    kv_bytes = problem.costs.kv_bytes_per_layer * problem.model.layers
    link = bandwidth_gbit_s * 1e9 / 8 / kv_bytes
    limit = Evaluator(problem).relaxed.upper_bound()
    # Both GPUs can prefill or decode, but no node can do both with whole groups; the link works both ways.
    _, whole = Evaluator(problem).relaxed.whole()
    fast = problem_from(many_nodes(["H100:1", "H100:1"], 1e6), "opt-13b", "HPLD")
    _, free = Evaluator(fast).relaxed.whole()
    assert whole.req_s == pytest.approx(min(link, free.req_s), rel=1e-3)
    assert limit.req_s >= whole.req_s * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["H100", "L4", "Core"]),
    st.integers(8, 600),
    st.integers(2, 64),
    st.sampled_from(["vllm", "calibrated"]),
)
def test_a_device_alone_serves_no_more_than_its_rate(card, isl, osl, cost_model):
    """Where prompts fill every step, first tokens come with them, which counts for short answers."""
    core = {"memory_gib": 30, "bf16_dense_tflops": 0.05, "memory_bandwidth_gbyte_s": 8, "kind": "cpu"}
    spec = {
        "name": "one",
        "nodes": [{"name": "a", "accelerators": f"{card}:1"}],
        "accelerators": {"Core": core},
    }
    cluster = parse_cluster(spec, "test", Path())
    workload = Workload(name="short", classes=(RequestClass(name="short", isl=isl, osl=osl),))
    problem = make_problem(cluster, "llama-3-8b", workload, cost_model=cost_model, phases="colocated")
    plan = Evaluator(problem).planner.plan("colocated", ((0, 1),))
    assume(plan is not None)
    assert plan.capacity_req_s <= rates_bound(problem, colocated=True).req_s * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(clusters(max_gpus=8), st.sampled_from(MODELS))
def test_patterns_are_counted_and_no_dominated_column_matters(spec, model):
    problem = problem_from(spec, model, "LPLD")
    alike = node_classes(problem)
    for nodes in range(1, len(problem.node_gpus) + 1):
        patterns = list(alike.patterns(nodes))
        assert len(set(patterns)) == len(patterns) == alike.count_patterns(nodes)
    columns, all_of_them = list_columns(Evaluator(problem).planner, problem, alike, lambda listed: False)
    assume(columns)
    assert all_of_them
    for with_kv in (True, False):
        master = ConfigurationLP(alike, with_kv)
        assert master.solve(undominated(columns, lambda: False)).value == pytest.approx(
            master.solve(columns).value
        )


def test_alike_nodes_are_one_class_and_uplinks_tell_them_apart():
    cards = ["H100:2"] * 8 + ["A100-80GB:2"] * 8
    spec = many_nodes(cards)
    assert [len(nodes) for nodes in node_classes(problem_from(spec, "opt-30b", "LPLD")).nodes] == [8, 8]
    uplink = {"name": "west", "nodes": [f"n{i}" for i in range(6)], "bandwidth_gbit_s": 40}
    spec["network"]["uplinks"] = [uplink]
    classes = node_classes(problem_from(spec, "opt-30b", "LPLD"))
    assert sorted(len(nodes) for nodes in classes.nodes) == [2, 6, 8]
    # Pairs use two nodes on the same side, where links are faster.
    spec["network"]["links"] = [
        {"from": f"n{i}", "to": f"n{j}", "bandwidth_gbit_s": 400} for i in range(6) for j in range(i)
    ]
    problem = problem_from(spec, "opt-30b", "LPLD")
    fast = next(c for c, nodes in enumerate(node_classes(problem).nodes) if 0 in nodes)
    assert {node for node, _ in node_classes(problem).counts(((fast, 2), (fast, 2)))} <= set(range(6))


def test_groups_share_nodes_and_not_only_gpus():
    """Of three nodes of eight GPUs and one of four, each has room for one group of five, or of four twice."""
    spec = parse_cluster(many_nodes(["A100-80GB:8"] * 3 + ["A100-80GB:4"]), "slots.yaml", Path())
    problem = make_problem(spec, "llama-2-70b", "HPLD")
    nodes = classes.kinds_of_nodes(problem, of_any_size=True)
    assert nodes.gpus == (28,)
    program = ConfigurationLP(nodes, with_kv=False)

    def served(*sizes: int) -> float:
        return program.solve([Column("colocated", ((0, size),), 1.0) for size in sizes]).value

    assert served(5) == pytest.approx(3.0)
    assert served(4) == pytest.approx(7.0)
    assert served(5, 3) == pytest.approx(7.0)
    assert served(6, 3) == pytest.approx(7.0)
    assert served(6, 5) == pytest.approx(3.0)
    assert [nodes.most_groups(((0, size),)) for size in (5, 4, 3)] == [3, 7, 7]
    assert nodes.most_groups(((0, 5), (0, 4))) == 3


def test_a_span_leaves_few_patterns_but_room_for_the_model():
    few = problem_from(many_nodes(["H100:2"] * 4), "llama-2-70b", "LPLD")
    assert widest_span(few) == 4
    # 70B needs many 24 GB cards: the span grows beyond what the number of patterns alone would allow.
    many = problem_from(many_nodes(["L4:1", "A10G:1", "RTX3090:1", "RTX4090:1"] * 8), "llama-2-70b", "LPLD")
    span = widest_span(many)
    assert span > 8
    assert Evaluator(many).planner.plan("decode", tuple((node, 1) for node in range(span))) is not None


@pytest.mark.parametrize(
    ("model", "workload"),
    [
        ("llama-2-70b", "LPHD"),
        pytest.param("opt-30b", "HPLD", marks=pytest.mark.slow),
        pytest.param("llama-2-70b", "HPLD", marks=pytest.mark.slow),
        pytest.param("opt-30b", "LPHD", marks=pytest.mark.slow),
    ],
)
def test_many_gpus_come_close_to_the_bound(model, workload):
    cards = ["H100:4", "A100-80GB:4", "L40:4", "A6000:4"] * 4
    problem = problem_from(many_nodes(cards, bandwidth_gbit_s=400), model, workload)
    evaluator = Evaluator(problem)
    relaxed = evaluator.relaxed
    start = relaxed.start()
    check_layout(problem, evaluator, start)
    state = SearchState(evaluator)
    refine(state, start, "start")
    assert state.incumbent.best is not None
    assert state.incumbent.best.req_s >= 0.9 * relaxed.upper_bound().req_s
