"""Ruin and recreate: what fills a solution up again, and what it brings."""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest

from benchmarks.search.ordinary import drawn
from cluster_specs.schema import ClusterSpec
from cost_model.errors import InfeasibleError
from hexgen2.goal import Goal
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.partition.whole_nodes import whole_nodes
from hexgen2.search.planning.classes import LARGE
from hexgen2.search.problem import Group, Phases, Problem, Solution, make_problem
from hexgen2.search.ruin_and_recreate import RuinAndRecreate
from hexgen2.search.state import SearchState
from hexgen2.search.stopping import Stopping
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.hexgen2 import search


def _problem(family: str, gpus: int, seed: int, model: str, phases: Phases = "flexible") -> Problem:
    spec = ClusterSpec.model_validate(drawn(family, gpus, seed))
    return make_problem(spec, model, "HPLD", phases=phases)


def _fits(problem: Problem, solution: Solution) -> bool:
    used = sum((Counter(dict(group.counts)) for group in solution.groups), Counter[int]())
    return all(count <= len(problem.node_gpus[node]) for node, count in used.items())


@pytest.mark.parametrize(
    ("family", "model"), [("racks", "llama-2-70b"), ("boxes", "opt-30b"), ("mostly", "llama-3-8b")]
)
def test_filling_up_keeps_what_is_there(family: str, model: str) -> None:
    problem = _problem(family, 56, 11, model)
    evaluator, rng = Evaluator(problem), np.random.default_rng(3)
    start = whole_nodes(evaluator).groups
    repairs = evaluator.relaxed.repairs()
    for _ in range(12):
        kept = [group for group in start if rng.random() < 0.5]
        found = repairs.repaired(kept, rng)
        assert not Counter(kept) - Counter(found.groups)
        assert _fits(problem, found)
    # Nobody has to keep anything, and groups need not be among those that the linear program knows.
    assert repairs.repaired([], rng).groups
    odd = Group("prefill", tuple((node, 1) for node in range(3)))
    assert odd in repairs.repaired([odd], rng).groups


def test_random_worths_give_other_solutions() -> None:
    """Some of which are better than the linear program's own start."""
    evaluator = Evaluator(_problem("racks", 64, 5, "llama-2-70b", "disaggregated"))
    evaluator.relaxed.upper_bound()
    start = evaluator.evaluate(evaluator.relaxed.start())
    repairs, rng = evaluator.relaxed.repairs(), np.random.default_rng(0)
    found = [evaluator.evaluate(repairs.repaired([], rng)) for _ in range(25)]
    assert len({each.solution.key for each in found}) > 5
    assert max(each.req_s for each in found) > start.req_s


@pytest.mark.parametrize(("family", "model"), [("racks", "llama-2-70b"), ("boxes", "opt-30b")])
def test_it_only_improves_and_the_same_seed_gives_the_same(family: str, model: str) -> None:
    results = []
    for _ in range(2):
        problem = _problem(family, 64, 7, model)
        evaluator = Evaluator(problem)
        state = SearchState(evaluator)
        start = evaluator.evaluate(whole_nodes(evaluator))
        state.offer(start, "start with whole nodes")
        state.spend(400)
        gained = RuinAndRecreate(state, 1).improve(40)
        best = state.incumbent.best
        assert best is not None
        assert _fits(problem, best.solution)
        assert best.req_s >= start.req_s
        assert gained == (best.req_s > start.req_s)
        results.append((best.solution.key, best.req_s, state.effort))
    assert results[0] == results[1]


def test_it_ends_when_nothing_helps() -> None:
    """Two like GPUs, each of which holds the model: nothing is better than one of each role."""
    spec = ClusterSpec.model_validate({"name": "two", "nodes": [{"name": "n", "accelerators": "H100:2"}]})
    problem = make_problem(spec, "llama-3-8b", "HPLD", phases="disaggregated")
    assert len(problem.usable) < LARGE
    evaluator = Evaluator(problem)
    state = SearchState(evaluator)
    pair = Solution((Group("prefill", ((0, 1),)), Group("decode", ((0, 1),))))
    state.offer(evaluator.evaluate(pair), "start")
    ruins = RuinAndRecreate(state, 0)
    assert not ruins.improve(1e9)
    assert ruins.exhausted
    ruins.begin_again()
    assert not ruins.exhausted


@pytest.mark.parametrize("cores", [{0}, {0, 1, 2}])
def test_targets_that_no_replica_meets_are_an_error(cores: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no columns then, and nothing to fill up with."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    spec = ClusterSpec.model_validate(drawn("mostly", 56, 11))
    goal = Goal(objective="goodput", ttft_ms=1.0, tpot_ms=1.0)
    problem = make_problem(spec, "llama-2-70b", "HPLD", phases="flexible", goal=goal)
    with pytest.raises(InfeasibleError, match="meets --ttft 1 ms"):
        search(problem, SearchOptions())


def test_it_stops_in_time() -> None:
    evaluator = Evaluator(_problem("racks", 64, 5, "llama-2-70b"))
    state = SearchState(evaluator, Stopping(0.0))
    state.offer(evaluator.evaluate(whole_nodes(evaluator)), "start with whole nodes")
    assert not RuinAndRecreate(state, 0).improve(1e9)
    assert state.stopping.cut == "time limit"
