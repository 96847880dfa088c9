"""A search ends within its time limit, whatever the cluster, by a clock that counts Python's calls."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.search.ordinary import drawn
from cluster_specs.schema import ClusterSpec
from cost_model.errors import InfeasibleError
from hexgen2.checks import verify
from hexgen2.goal import Goal
from hexgen2.placement import Placement
from hexgen2.search import stopping
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.partition.whole_nodes import whole_nodes
from hexgen2.search.planning.classes import few_classes, node_classes
from hexgen2.search.problem import Problem, make_problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.hexgen2 import search

CALLS_PER_S = 1e6


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Counts calls, and is the clock of searches: as many calls take as long on every machine."""
    count = itertools.count()
    seen = SimpleNamespace(made=0)

    def note(_frame: Any, event: str, _argument: Any) -> None:
        if event == "call":
            seen.made = next(count)

    clock = SimpleNamespace(monotonic=lambda: seen.made / CALLS_PER_S)
    monkeypatch.setattr(stopping, "time", clock)
    sys.setprofile(note)
    yield seen
    sys.setprofile(None)


def within_a_second(calls: SimpleNamespace, problem: Problem, late_s: float) -> Placement:
    """A search that is cut after a second, and no later than that and so much."""
    began = calls.made
    placement = search(problem, SearchOptions(time_limit_s=1.0))
    took_s = (calls.made - began) / CALLS_PER_S
    sys.setprofile(None)
    verify(placement)
    assert placement.search.cut == "time limit"
    assert took_s <= 1 + late_s
    return placement


@pytest.mark.parametrize(
    ("family", "gpus", "model"),
    [("racks", 64, "llama-2-70b"), ("boxes", 24, "llama-3-8b"), ("zoo", 40, "opt-30b")],
)
def test_ordinary_clusters(calls: SimpleNamespace, family: str, gpus: int, model: str) -> None:
    cluster = ClusterSpec.model_validate(drawn(family, gpus, 3))
    problem = make_problem(cluster, model, "HPLD", phases="flexible")
    within_a_second(calls, problem, late_s=0.1)


def test_many_replicas_that_might_work_for_one_another(calls: SimpleNamespace) -> None:
    """To find out what 190 of them do for one another takes as long as this search has."""
    cluster = ClusterSpec.model_validate(drawn("patchy", 192, 94022))
    problem = make_problem(cluster, "llama-3-8b", "LPHD", phases="flexible")
    within_a_second(calls, problem, late_s=0.1)


@pytest.mark.parametrize(
    "goal",
    [
        Goal(objective="cost", request_rate=3.0),
        Goal(budget_per_hour=10.0),
        Goal(budget_per_hour=10.0, frontier=3),
        Goal(objective="goodput", request_rate=3.0, ttft_ms=2000, tpot_ms=100),
        Goal(objective="latency", request_rate=0.3),
    ],
    ids=["cost", "budget", "frontier", "goodput", "latency"],
)
def test_every_goal_has_an_answer(calls: SimpleNamespace, goal: Goal) -> None:
    """All links are different, so that there is no time to look at all groups of these GPUs."""
    cluster = ClusterSpec.model_validate(drawn("boxes", 20, 3))
    problem = make_problem(cluster, "llama-3-8b", "HPLD", phases="flexible", goal=goal)
    placement = within_a_second(calls, problem, late_s=0.5)
    if goal.objective == "cost":
        assert placement.throughput.req_s >= 3.0
    if goal.budget_per_hour is not None:
        assert placement.price_per_hour <= goal.budget_per_hour


@pytest.mark.parametrize(
    "goal", [Goal(), Goal(objective="latency", request_rate=20.0)], ids=["throughput", "latency"]
)
def test_robust_searches_compare_finalists_in_time(calls: SimpleNamespace, goal: Goal) -> None:
    """Of latency, by simulations, which take longer than there is time here."""
    cluster = ClusterSpec.model_validate(drawn("racks", 24, 3))
    problem = make_problem(cluster, "llama-2-13b", "HPLD", phases="flexible", goal=goal)
    found = search(problem, SearchOptions(time_limit_s=2.0, robust=True))
    took_s = calls.made / CALLS_PER_S
    sys.setprofile(None)
    verify(found)
    assert found.robustness is not None and took_s <= 2.3
    if goal.objective == "throughput":
        assert found.robustness.perturbations > 0 and len(found.robustness.finalists) > 1


def test_a_large_cluster_is_rented_in_time(calls: SimpleNamespace) -> None:
    """Whole nodes go by halves, and nobody works for others."""
    cluster = ClusterSpec.model_validate(drawn("zoo", 160, 3))
    goal = Goal(objective="cost", request_rate=1.0)
    problem = make_problem(cluster, "llama-2-70b", "HPLD", phases="flexible", goal=goal)
    found = within_a_second(calls, problem, late_s=0.1)
    assert sum(rented.count for rented in found.rented) <= 8


@pytest.mark.parametrize("goal", [Goal(), Goal(objective="goodput", ttft_ms=1, tpot_ms=1)])
def test_too_short_a_limit_is_the_reason_that_is_given(goal: Goal, monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes together are no replica: it would have more stages than the model has layers."""
    monkeypatch.setattr(stopping, "GRACE_S", -math.inf)
    cluster = ClusterSpec.model_validate(drawn("boxes", 64, 3))
    problem = make_problem(cluster, "llama-3-8b", "HPLD", phases="flexible", goal=goal)
    with pytest.raises(InfeasibleError, match="within the time limit on boxes-64-3; raise --time-limit"):
        search(problem, SearchOptions(time_limit_s=1e-3))


def test_a_load_that_no_rental_carries_is_the_reason_that_is_given(calls: SimpleNamespace) -> None:
    """No time is left for a search once that is proved. All boxes together are no replica: 80 layers are not
    enough for them."""
    cluster = ClusterSpec.model_validate(drawn("boxes", 96, 3))
    goal = Goal(objective="cost", request_rate=1000.0)
    problem = make_problem(cluster, "llama-2-70b", "HPLD", phases="colocated", goal=goal)
    began = calls.made
    with pytest.raises(InfeasibleError, match=r"carries 1000 requests/s.* none carries more than"):
        search(problem, SearchOptions(time_limit_s=1.0))
    assert (calls.made - began) / CALLS_PER_S <= 1.1


def test_a_load_near_the_most_is_carried_in_time(calls: SimpleNamespace) -> None:
    """Small budgets are not tried for so long that nothing is found."""
    cluster = ClusterSpec.model_validate(drawn("boxes", 40, 3))
    goal = Goal(objective="cost", request_rate=4.4)
    problem = make_problem(cluster, "llama-2-70b", "HPLD", phases="colocated", goal=goal)
    assert within_a_second(calls, problem, late_s=0.1).throughput.req_s >= 4.4


def test_within_a_time_limit_the_tightest_targets_of_latency_come_first(calls: SimpleNamespace) -> None:
    cluster = ClusterSpec.model_validate(drawn("racks", 24, 2))
    goal = Goal(objective="latency", request_rate=1.0)
    problem = make_problem(cluster, "llama-2-70b", "HPHD", phases="flexible", goal=goal)
    trace = [each["step"] for each in search(problem, SearchOptions(time_limit_s=4.0)).search.trace]
    sys.setprofile(None)
    greatest, least = (float(step.split(" s on average")[0]) for step in (trace[-2], trace[-1]))
    assert least < 0.7 * greatest


def test_whole_nodes_are_quick_where_no_replica_meets_the_targets(calls: SimpleNamespace) -> None:
    """Targets let replicas span all nodes, and replicas of ever more nodes would be planned."""
    goal = Goal(objective="goodput", request_rate=10.0, ttft_ms=2000, tpot_ms=100)
    cluster = ClusterSpec.model_validate(drawn("racks", 64, 3))
    evaluator = Evaluator(make_problem(cluster, "llama-2-70b", "online", phases="flexible", goal=goal))
    began = calls.made
    whole_nodes(evaluator, "colocated")
    took_s = (calls.made - began) / CALLS_PER_S
    solution = whole_nodes(evaluator, "decode", stop=lambda: True)
    sys.setprofile(None)
    assert took_s <= 4.0
    kinds = {(evaluator.problem.node_kind[n], c) for group in solution.groups for n, c in group.counts}
    assert len(kinds) <= 2


def test_nodes_of_a_kind_are_one_class_where_all_links_differ() -> None:
    cluster = ClusterSpec.model_validate(drawn("boxes", 48, 5))
    problem = make_problem(cluster, "llama-3-8b", "HPLD")
    classes = node_classes(problem)
    assert len(classes.nodes) == len(problem.node_gpus)
    few = few_classes(problem, classes)
    kinds = [{(problem.node_kind[n], len(problem.node_gpus[n])) for n in nodes} for nodes in few.nodes]
    assert all(len(kind) == 1 for kind in kinds)
    assert sorted(n for nodes in few.nodes for n in nodes) == list(range(len(problem.node_gpus)))
    assert len(few.nodes) < len(classes.nodes) / 2
