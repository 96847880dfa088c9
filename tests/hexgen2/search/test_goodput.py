"""Goodput: plans meet their targets, searches agree, and predictions change in the right direction."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problems

from cost_model.errors import InfeasibleError, InputError
from hexgen2.checks import violations
from hexgen2.goal import Goal, make_goal
from hexgen2.placement import Placement, json_schema
from hexgen2.search.infeasible import soonest_s
from hexgen2.search.planning.plan import Planner
from hexgen2.search.problem import Problem, counts_of, make_problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy

SHARE = 0.9**0.5
TARGETS = {"objective": "goodput", "ttft_ms": 800.0, "tpot_ms": 60.0}


def run(problem: Problem, strategy: str = "hexgen2", simulated: bool = True) -> Placement:
    placement = find_strategy(strategy)(problem, SearchOptions(simulated=simulated))
    assert violations(placement) == []
    jsonschema.validate(json.loads(placement.to_json()), json_schema())
    return placement


def case_study(workload: str = "HPHD", **goal) -> Problem:
    """Targets in the tests are some that the engines of 2023 can just meet."""
    return make_problem(
        "hexgen2-case-study", "llama-2-70b", workload, cost_model="calibrated", goal=make_goal(**goal)
    )


@st.composite
def goals(draw: st.DrawFn, problem: Problem) -> Goal:
    """Random targets for TTFT and TPOT, from slightly too tight to loose."""
    ttft, tpot = (s * draw(st.floats(0.8, 20)) * 1e3 for s in soonest_s(problem))
    return Goal(objective="goodput", ttft_ms=ttft, tpot_ms=tpot)


@settings(max_examples=60, deadline=None)
@given(st.data(), problems(max_gpus=6))
def test_plans_keep_their_targets(data, problem):
    """At its capacity each replica serves its share in time, and so does its largest batch."""
    if soonest_s(problem)[0] == float("inf"):
        return
    goal = data.draw(goals(problem))
    bound = replace(problem, goal=goal)
    counts = counts_of({n: len(gpus) for n, gpus in enumerate(problem.node_gpus)})
    planner, free = Planner(bound), Planner(problem)
    for role in ("prefill", "decode"):
        plan, fastest = planner.plan(role, counts), free.plan(role, counts)
        if plan is None:
            continue
        assert fastest and plan.capacity_req_s <= fastest.capacity_req_s * (1 + 1e-9)
        rate = plan.capacity_req_s * (1 - 1e-6)
        if role == "prefill":
            assert planner.prefill_queue(plan).attained(rate, goal.ttft_ms / 1e3) >= SHARE - 1e-6
        else:
            assert plan.latency_s <= goal.tpot_ms / 1e3
            assert planner.decode_queue(plan).attained(rate, goal.tpot_ms / 1e3) >= SHARE - 1e-3


@settings(max_examples=15, deadline=None)
@given(st.data(), problems(max_gpus=5))
def test_hexgen2_equals_exact(data, problem):
    if soonest_s(problem)[0] == float("inf"):
        return
    bound = replace(problem, goal=data.draw(goals(problem)))
    try:
        best = run(bound, "exact", simulated=False)
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            run(bound)
        return
    found = run(bound, simulated=False)
    assert found.throughput.req_s == pytest.approx(best.throughput.req_s, rel=1e-6)


def test_looser_targets_serve_no_less_and_the_throughput_is_the_limit():
    most = run(case_study()).throughput.req_s
    flows = [
        run(case_study(objective="goodput", ttft_ms=ttft, tpot_ms=tpot), "exact").throughput.req_s
        for ttft, tpot in ((400, 45), (1500, 60), (1e6, 1e6))
    ]
    assert flows == sorted(flows)
    assert 0 < flows[0] < flows[-1] <= most
    # A target of minutes leaves only the probability that a replica is full.
    assert flows[-1] > 0.85 * most


def test_the_placement_of_greatest_throughput_is_not_that_of_greatest_goodput():
    targets = {"ttft_ms": 500.0, "tpot_ms": 60.0, "request_rate": 4.0}
    plain, kept = (run(case_study(objective=o, **targets)) for o in ("throughput", "goodput"))
    assert plain.throughput.req_s > kept.throughput.req_s
    assert plain.goodput and kept.goodput
    assert kept.goodput.goodput_req_s == 4.0 > plain.goodput.goodput_req_s
    assert kept.goodput.attainment > 0.9 > plain.goodput.attainment
    without = run(case_study())
    assert without.goodput is None
    same = plain.model_copy(update={"goal": without.goal, "goodput": None, "search": without.search})
    assert same.to_json() == without.to_json()


def test_more_requests_wait_longer_and_miss_more():
    records = [
        run(case_study(objective="goodput", ttft_ms=800, tpot_ms=60, request_rate=rate)).goodput
        for rate in (0.5, 3, 4)
    ]
    for less, more in itertools.pairwise(records):
        assert less.attainment >= more.attainment
        for time in ("mean_ttft_ms", "p90_ttft_ms", "mean_tpot_ms", "mean_e2el_ms"):
            assert getattr(less, time) < getattr(more, time)
    assert records[0].goodput_req_s == 0.5
    crowded = run(case_study(objective="goodput", ttft_ms=800, tpot_ms=60, request_rate=1000)).goodput
    assert crowded.attainment < 0.01 and crowded.mean_ttft_ms is None
    assert crowded.goodput_req_s < 20


def test_a_mixture_of_one_class_is_that_class():
    one, same = run(case_study("HPLD", **TARGETS)), run(case_study("HPLD:3", **TARGETS))
    assert one.replicas == same.replicas and one.goodput == same.goodput


def test_unlike_prompts_wait_longer_than_alike_ones():
    """The means are the same, but a third of the requests have prompts five times as long."""
    mixture = make_problem("hexgen2-case-study", "llama-2-70b", "HPHD:1,LPLD:2").workload
    goal = make_goal("goodput", ttft_ms=700)
    apart = make_problem("hexgen2-case-study", "llama-2-70b", "HPHD:1,LPLD:2", goal=goal)
    alike = make_problem(
        "hexgen2-case-study", "llama-2-70b", None, isl=mixture.isl, osl=mixture.osl, goal=goal
    )
    assert run(apart).throughput.req_s < run(alike).throughput.req_s


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"ttft_ms": 50}, r"--ttft 50 ms \(a first token takes \d+"),
        ({"tpot_ms": 3}, r"--tpot 3 ms \(a token takes \d+"),
        ({"ttft_ms": 50, "tpot_ms": 3}, "--ttft 50 .* or --tpot 3 "),
    ],
)
def test_targets_that_nothing_meets_are_named_with_the_best(targets, message):
    with pytest.raises(InfeasibleError, match=message):
        run(case_study(objective="goodput", **targets))


@pytest.fixture(scope="module")
def best_within_targets():
    return run(case_study(**TARGETS), "exact").throughput.req_s


@pytest.mark.parametrize("strategy", ["distserve", "splitwise", "hexgen2-paper", "random-swap"])
def test_other_strategies_keep_targets_too(strategy, best_within_targets):
    found = run(case_study(**TARGETS), strategy)
    assert found.goodput and found.goodput.attainment >= 0.9 - 1e-6
    assert found.throughput.req_s <= best_within_targets * (1 + 1e-6)


@pytest.mark.parametrize("strategy", ["hexgen", "vllm"])
def test_colocated_strategies_refuse_targets(strategy):
    with pytest.raises(InputError, match="use hexgen2"):
        run(case_study(objective="goodput", ttft_ms=800), strategy)
