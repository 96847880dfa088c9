"""Latency at a request rate, compared with every solution within many targets, and with what users see."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from problems import problem_from

import hexgen2
from cost_model.errors import InfeasibleError, InputError
from hexgen2.checks import violations
from hexgen2.goal import make_goal
from hexgen2.placement import Placement, SearchRecord
from hexgen2.search.build import build_placement
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.flow.max_flow import balance
from hexgen2.search.infeasible import soonest_s
from hexgen2.search.load_prediction import LoadedPlacement
from hexgen2.search.params import DEFAULT
from hexgen2.search.problem import Group, Problem, Solution, counts_of, make_problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.latency import for_latency
from hexgen2.strategies.registry import find_strategy


def run(problem: Problem, **options) -> Placement:
    placement = find_strategy("hexgen2")(problem, SearchOptions(**options))
    assert violations(placement) == []
    return placement


def small(rate: float) -> Problem:
    nodes = [{"name": name, "accelerators": cards} for name, cards in (("a", "H100:2"), ("b", "A100-80GB:2"))]
    problem = problem_from({"name": "small", "nodes": nodes}, "opt-30b", "HPHD")
    return replace(problem, goal=make_goal("latency", request_rate=rate))


def solutions() -> list[Solution]:
    """All ways to use nodes of two and two GPUs with one or two groups of each role."""
    parts = [counts_of({0: a, 1: b}) for a in range(3) for b in range(3) if a + b]
    found = []
    for p, d in itertools.product((1, 2), repeat=2):
        for chosen in itertools.product(parts, repeat=p + d):
            counts = [sum(dict(c).get(node, 0) for c in chosen) for node in (0, 1)]
            if max(counts) <= 2:
                roles = ["prefill"] * p + ["decode"] * d
                found.append(Solution(tuple(map(Group, roles, chosen))))
    return found


@pytest.mark.parametrize("phases", ["colocated", "flexible"])
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_formulas_know_the_latency_of_replicas_that_do_both(phases, share):
    """Two H100 that also prefill for two A100, or each pair for itself: beside the simulator."""
    problem = replace(small(1.0), phases=phases)
    evaluator = Evaluator(replace(problem, goal=make_goal("throughput")))
    parts = [counts_of({0: 2}), counts_of({1: 2})]
    roles = ["colocated", "decode" if phases == "flexible" else "colocated"]
    found = evaluator.at_full_load(evaluator.evaluate(Solution(tuple(map(Group, roles, parts)))))
    assert bool(found.mixed) == (phases == "flexible")
    loaded = LoadedPlacement.of(evaluator.planner, found, balance(found.network, found.flow).routes)
    assert loaded.limit_req_s == pytest.approx(found.req_s, rel=0.02)
    placement = build_placement(problem, found, "hexgen2", SearchRecord(seconds=0.0, seed=0, evaluations=1))
    rate = share * found.req_s
    shown = hexgen2.simulate(placement, request_rate=rate, num_requests=2000, seed=3)
    assert loaded.mean_e2el_s(rate) == pytest.approx(shown.mean_e2el_ms / 1e3, rel=0.25)
    assert loaded.mean_tpot_s(rate) == pytest.approx(shown.mean_tpot_ms / 1e3, rel=0.25)


@pytest.mark.parametrize("rate", [pytest.param(0.5, marks=pytest.mark.slow), 1.0])
def test_no_solution_within_any_targets_is_quicker(rate):
    """Repeating a search also gives the same bytes."""
    problem = small(rate)
    found, again = run(problem), run(problem)
    found.search.seconds = again.search.seconds = 0.0
    assert found.to_json() == again.to_json()
    assert found.goodput and found.goodput.mean_e2el_ms
    best = float("inf")
    for i, j in itertools.product(range(1, 20, 4), repeat=2):
        ttft, tpot = (s * 1.2**k * 1e3 for s, k in zip(soonest_s(problem), (i, j), strict=True))
        within = replace(problem, goal=make_goal("goodput", ttft_ms=ttft, tpot_ms=tpot))
        evaluator = Evaluator(within, for_latency(DEFAULT))
        for solution in solutions():
            tried = evaluator.evaluate(solution)
            if tried.req_s < rate:
                continue
            full = evaluator.at_full_load(tried)
            loaded = LoadedPlacement.of(evaluator.planner, full, balance(full.network, full.flow).routes)
            best = min(best, loaded.mean_e2el_s(rate))
    assert found.goodput.mean_e2el_ms / 1e3 <= best * 1.01 < math.inf


def test_it_is_quicker_than_the_greatest_throughput_and_says_so():
    rate = {"request_rate": 3.0}
    quick, wide = (
        run(make_problem("hexgen2-case-study", "llama-2-70b", "HPHD", goal=make_goal(o, **rate)))
        for o in ("latency", "throughput")
    )
    assert quick.goodput and wide.goodput
    assert quick.goodput.mean_e2el_ms < 0.8 * wide.goodput.mean_e2el_ms
    assert 3.0 < quick.throughput.req_s < wide.throughput.req_s
    assert quick.goodput.goodput_req_s is None
    assert quick.bound.req_s >= wide.throughput.req_s


@pytest.mark.slow
def test_own_targets_are_kept():
    goal = make_goal("latency", request_rate=3.0, ttft_ms=200, tpot_ms=60)
    found = run(make_problem("hexgen2-case-study", "llama-2-70b", "HPHD", goal=goal))
    assert found.goodput and found.goodput.attainment >= 0.9


def test_a_load_that_nothing_carries_is_refused_with_the_most():
    with pytest.raises(InfeasibleError, match=r"carries 1000 requests/s on small: the most is \d+"):
        run(small(1000.0))


def test_interrupted_the_quickest_so_far_is_kept():
    seen = []

    def interrupt(state):
        seen.append(state.incumbent.best)
        if "on average with" in state.incumbent.trace[-1]["step"]:
            raise KeyboardInterrupt

    found = run(small(0.5), progress=interrupt)
    assert found.search.cut == "interrupted"
    assert found.throughput.req_s == pytest.approx(seen[-1].req_s, rel=1e-6)


def test_options_that_do_not_go_together():
    with pytest.raises(InputError, match="--request-rate"):
        make_goal("latency")
    with pytest.raises(InputError, match="--budget"):
        make_goal("latency", request_rate=1.0, budget_per_hour=10.0)
    problem = small(1.0)
    with pytest.raises(InputError, match="use hexgen2"):
        find_strategy("exact")(problem, SearchOptions())
