"""Steps that are ruled out: bounds by duality, and one step for all that are equivalent."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from problems import clusters, problem_from

from hexgen2.search.evaluation import Evaluation
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.flow.max_flow import Flow, FlowNetwork, capacity_duals, few_routes, solve
from hexgen2.search.local_search import all_steps
from hexgen2.search.operators import flips, merges, moves, splits, swaps
from hexgen2.search.partition.initial import initial_solution
from hexgen2.search.problem import Solution


@st.composite
def kv_bound(draw: st.DrawFn) -> tuple[Evaluator, Evaluation]:
    """A solution that its KV routes limit."""
    problem = problem_from(draw(clusters(max_gpus=10)), draw(st.sampled_from(["opt-13b", "opt-30b"])), "LPLD")
    evaluator = Evaluator(problem)
    groups = draw(st.integers(2, min(5, len(problem.cluster))))
    evaluation = evaluator.reordered(evaluator.evaluate(initial_solution(evaluator, groups)))
    assume(evaluator.duals(evaluation) is not None)
    return evaluator, evaluation


@settings(max_examples=40, deadline=None)
@given(kv_bound())
def test_no_step_gains_more_than_its_prices_promise(case):
    evaluator, current = case
    duals = evaluator.duals(current)
    # Decode replicas may do less beside the prompts of these prefill replicas than beside those of others.
    here = evaluator.limit_by_duals(current.solution, current, duals)
    beside = sum(r.plan.capacity_req_s - r.capacity_req_s for r in current.decode)
    assert current.score * (1 - 1e-6) <= here <= (current.score + beside) * (1 + 1e-6)
    for _, solution in list(all_steps(evaluator, current))[:60]:
        limit = evaluator.limit_by_duals(solution, current, duals)
        # Evaluate again, because the memo may have the solution with other stage orders.
        sides = [evaluator._replicas(solution, role, current.plans) for role in ("prefill", "decode")]
        assert evaluator.with_plans(solution, *sides).score <= limit * (1 + 1e-6) + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 5))
def test_prices_without_sharing_are_a_minimum_cut(seed, p, d):
    draw = np.random.default_rng(seed)
    network = FlowNetwork(draw.uniform(1, 9, p), draw.uniform(1, 9, d), draw.uniform(0.1, 3, (p, d)))
    y_prefill, y_decode, _ = capacity_duals(network)
    unpaid = np.maximum(0.0, 1 - y_prefill[:, None] - y_decode[None, :])
    value = y_prefill @ network.prefill + y_decode @ network.decode + (unpaid * network.routes).sum()
    graph = nx.DiGraph()
    for i in range(p):
        graph.add_edge("s", ("p", i), capacity=network.prefill[i])
        for j in range(d):
            graph.add_edge(("p", i), ("d", j), capacity=network.routes[i, j])
    for j in range(d):
        graph.add_edge(("d", j), "t", capacity=network.decode[j])
    assert value == pytest.approx(nx.minimum_cut_value(graph, "s", "t"))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(1, 8))
def test_few_routes_carry_the_same_loads(seed, p, d):
    draw = np.random.default_rng(seed)
    wide = FlowNetwork(draw.uniform(1, 9, p), draw.uniform(1, 9, d), np.full((p, d), 100.0))
    flow = solve(wide)
    few = few_routes(wide, flow)
    assert few.routes.sum(axis=1) == pytest.approx(flow.routes.sum(axis=1))
    assert few.routes.sum(axis=0) == pytest.approx(flow.routes.sum(axis=0))
    assert np.count_nonzero(few.routes) <= p + d - 1
    # If so few routes cannot carry the flow, it stays unchanged.
    narrow = FlowNetwork(wide.prefill, wide.decode, np.maximum(flow.routes, 1e-9))
    kept = few_routes(narrow, Flow(flow.value, flow.routes))
    assert narrow.carries(kept.routes * (1 - 1e-12))


@settings(max_examples=30, deadline=None)
@given(clusters(max_gpus=8), st.integers(2, 4))
def test_steps_left_out_are_worth_what_their_like_is_worth(spec, groups):
    """Without the network, nodes of one kind are interchangeable."""
    spec["network"] = {"default": {"bandwidth_gbit_s": 400, "latency_us": 10}}
    problem = problem_from(spec, "opt-13b", "LPHD")
    assume(groups <= len(problem.cluster))
    evaluator = Evaluator(problem)
    solution = initial_solution(evaluator, groups)
    everyone = list(range(len(solution.groups)))
    for listed, whole in (
        (moves(solution, everyone, everyone, evaluator.alike), moves(solution, everyone, everyone)),
        (swaps(solution, everyone, everyone, evaluator.alike), swaps(solution, everyone, everyone)),
        (flips(solution, everyone, evaluator.alike), flips(solution, everyone)),
        (merges(solution, evaluator.alike), merges(solution)),
        (splits(solution, evaluator.alike), splits(solution)),
    ):
        assert values(evaluator, listed) == values(evaluator, whole)


def values(evaluator: Evaluator, steps) -> set[float]:
    """The capacities of each solution's replicas, ignoring KV routes."""

    def capacity(solution: Solution) -> float:
        evaluation = evaluator.evaluate(solution)
        return float(evaluation.network.prefill.sum() - 7 * evaluation.network.decode.sum())

    return {round(capacity(solution), 6) for _, solution in steps}
