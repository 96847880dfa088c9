"""The bound over partitions, and branch and bound with it, compared with exhaustive search."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problems

from benchmarks.search.ordinary import drawn
from cluster_specs.schema import ClusterSpec
from cost_model.errors import InfeasibleError
from hexgen2.goal import Goal
from hexgen2.search.bounds.partitions import PartitionBound
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.partition_tree import PartitionTree
from hexgen2.search.problem import ROLES, Problem, make_problem
from hexgen2.search.state import SearchState
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.partitions import search_partitions
from hexgen2.strategies.registry import find_strategy


def never(_share: float = 0.0) -> bool:
    return False


def exhaustive(problem: Problem) -> float:
    """Requests/s of the best placement; 0 if there is none."""
    try:
        return find_strategy("exact")(problem, SearchOptions(simulated=False)).throughput.req_s
    except InfeasibleError:
        return 0.0


def check_against_exhaustive_search(problem: Problem) -> None:
    """The bound holds at any time, and branch and bound with it finds the best and proves it."""
    best, evaluator = exhaustive(problem), Evaluator(problem)
    bound = PartitionBound(evaluator.planner, problem)
    assert bound.look(never)
    for solution in bound.tightened(never, lambda: 0.0, 1000):
        assert best <= bound.req_s * (1 + 1e-9)
        assert evaluator.evaluate(solution).req_s <= bound.req_s * (1 + 1e-9)
    assert best <= bound.req_s * (1 + 1e-9)
    state = SearchState(evaluator)
    PartitionTree(state, bound).search()
    assert state.best_req_s == pytest.approx(best, rel=1e-6)
    if best:
        assert state.bound_req_s == pytest.approx(best, rel=1e-6)


@settings(max_examples=15, deadline=None)
@given(problems(max_gpus=6), st.sampled_from(list(ROLES)))
def test_on_random_clusters(problem, phases):
    check_against_exhaustive_search(replace(problem, phases=phases))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("model", "workload"), [("opt-13b", "HPHD"), ("llama-3-8b", "HPLD")])
def test_on_single_machines(seed, model, workload):
    cluster = ClusterSpec.model_validate(drawn("boxes", 5, seed))
    check_against_exhaustive_search(make_problem(cluster, model, workload, phases="flexible"))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(problems(max_gpus=7), st.sampled_from(list(ROLES)))
def test_on_larger_random_clusters(problem, phases):
    check_against_exhaustive_search(replace(problem, phases=phases))


def test_a_bound_that_is_cut_short_is_still_one():
    cluster = ClusterSpec.model_validate(drawn("boxes", 5, 1))
    problem = make_problem(cluster, "llama-3-8b", "HPLD", phases="flexible")
    best, state = exhaustive(problem), SearchState(Evaluator(problem))
    bound = PartitionBound(state.evaluator.planner, problem)
    assert bound.look(never)
    PartitionTree(state, bound).search(most=3)
    assert state.bound_req_s is not None and best <= state.bound_req_s * (1 + 1e-9)
    assert not PartitionBound(state.evaluator.planner, problem).look(lambda looked: True)


def test_a_search_beside_another_reports_what_it_finds_and_leaves_the_other_alone():
    cluster = ClusterSpec.model_validate(drawn("boxes", 5, 1))
    problem = make_problem(cluster, "llama-3-8b", "HPLD", phases="flexible")
    best, state, reported = exhaustive(problem), SearchState(Evaluator(problem)), []
    found = search_partitions(state, reported.append)
    assert found.best.req_s == pytest.approx(best, rel=1e-6) == found.bound.req_s
    assert state.best_req_s == state.effort == 0 and state.bound_req_s is None
    values = [each.best.req_s for each in reported if each.best]
    assert values == sorted(values) and values[-1] == found.best.req_s
    for each in reported:
        assert each.bound is None or best <= each.bound.req_s * (1 + 1e-9)


def test_prices_bound_parts_of_all_groups():
    cluster = ClusterSpec.model_validate(drawn("boxes", 6, 2))
    problem = make_problem(cluster, "llama-3-8b", "HPLD", phases="flexible")
    bound = PartitionBound(Evaluator(problem).planner, problem)
    assert bound.look(never)
    prices, worth, best = bound.at_prices(never)
    assert prices[0] == 0 and prices[-1] == 1 and (np.diff(prices) > 0).all()
    assert worth.shape == (len(prices), len(bound.roles), len(bound.subsets))
    assert best.shape == (len(prices), len(bound.subsets))
    assert bound.req_s == pytest.approx(min(bound.req_s, best[:, -1].min()))


@pytest.mark.parametrize(
    ("cluster", "model", "fits"),
    [
        ("boxes-16", "llama-3-8b", True),
        ("boxes-16", "opt-30b", True),
        ("boxes-40", "opt-30b", False),
        ("hexgen2-setting-1", "llama-2-70b", False),
        ("helix-geo-24", "llama-2-70b", False),
    ],
)
def test_few_nodes_with_different_links_fit(cluster, model, fits):
    family, *size = cluster.split("-")
    spec = ClusterSpec.model_validate(drawn(family, int(size[0]), 3)) if family == "boxes" else cluster
    problem = make_problem(spec, model, "HPLD", phases="flexible")
    planner = Evaluator(problem).planner
    assert PartitionBound.fits(planner, problem) == fits
    late = replace(problem, goal=Goal(ttft_ms=2000, tpot_ms=100, objective="goodput"))
    assert not PartitionBound.fits(planner, late)
