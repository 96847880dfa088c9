"""Large clusters part by part: which nodes are near each other, a part by itself, and neighbourhoods."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster.hierarchy import linkage
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from benchmarks.search.ordinary import FAMILIES, drawn
from cluster_specs.schema import ClusterSpec
from hexgen2.checks import verify
from hexgen2.search.bounds import part_program
from hexgen2.search.bounds.part_program import PartProgram, candidates
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.linear_program import Optimum, solve_whole
from hexgen2.search.neighbourhoods import Neighbourhoods
from hexgen2.search.partition import by_parts
from hexgen2.search.partition.by_parts import groups_by_parts, groups_within
from hexgen2.search.partition.parts import ROOM, average_linkage, leaves_of, near_parts
from hexgen2.search.partition.whole_nodes import whole_nodes
from hexgen2.search.planning.classes import LARGE
from hexgen2.search.problem import Group, Problem, Solution, make_problem
from hexgen2.search.state import SearchState
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.exact import search as search_exactly
from hexgen2.strategies.hexgen2 import search


def _problem(family: str, gpus: int, seed: int, **options: Any) -> Problem:
    spec = ClusterSpec.model_validate(drawn(family, gpus, seed))
    return make_problem(spec, options.pop("model", "llama-2-70b"), "HPLD", **options)


def _used(solution: Solution) -> Counter[int]:
    return sum((Counter(dict(group.counts)) for group in solution.groups), Counter[int]())


def _within(problem: Problem, solution: Solution) -> bool:
    return all(count <= len(problem.node_gpus[node]) for node, count in _used(solution).items())


def test_racks_and_sites_are_parts() -> None:
    """Racks of four nodes, two of them in each of two places."""
    names = [f"n{k}" for k in range(16)]
    place = {name: k // 4 for k, name in enumerate(names)}
    links = [
        {"from": a, "to": b, "bandwidth_gbit_s": 100 if place[a] == place[b] else 10, "latency_us": 20}
        for a, b in itertools.combinations(names, 2)
        if place[a] // 2 == place[b] // 2
    ]
    spec = ClusterSpec.model_validate(
        {
            "name": "places",
            "nodes": [{"name": name, "accelerators": "A100-80GB:8"} for name in names],
            "network": {"default": {"bandwidth_gbit_s": 1, "latency_us": 10_000}, "links": links},
        }
    )
    parts = near_parts(make_problem(spec, "llama-2-70b", "HPLD"))
    assert parts == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]


def test_uplinks_part_nodes_whose_links_are_alike() -> None:
    names = [f"n{k}" for k in range(10)]
    uplinks = [{"name": f"rack-{k}", "nodes": names[k::2], "bandwidth_gbit_s": 20} for k in range(2)]
    spec = ClusterSpec.model_validate(
        {
            "name": "uplinks",
            "nodes": [{"name": name, "accelerators": "A100-80GB:8"} for name in names],
            "network": {"default": {"bandwidth_gbit_s": 100, "latency_us": 20}, "uplinks": uplinks},
        }
    )
    parts = near_parts(make_problem(spec, "llama-2-70b", "HPLD"))
    assert parts == [(0, 2, 4, 6, 8), (1, 3, 5, 7, 9)]


@settings(max_examples=25, deadline=None)
@given(family=st.sampled_from(sorted(FAMILIES)), gpus=st.integers(8, 128), seed=st.integers(0, 10**6))
def test_every_node_is_in_one_part_that_holds_the_model(family: str, gpus: int, seed: int) -> None:
    problem = _problem(family, gpus, seed, model="llama-3-8b")
    parts = near_parts(problem)
    assert sorted(itertools.chain.from_iterable(parts)) == list(range(len(problem.node_gpus)))
    memory = [
        sum(float(problem.cluster.memory_bytes[list(problem.node_gpus[node])].sum()) for node in part)
        for part in parts
    ]
    assert len(parts) == 1 or min(memory) >= ROOM * problem.model.total_bytes


@pytest.mark.parametrize(("family", "seed"), [("racks", 1), ("zoo", 2), ("patchy", 3), ("sites", 4)])
@pytest.mark.parametrize(
    ("phases", "share"), [("colocated", 0.99), ("disaggregated", 0.9), ("flexible", 0.9)]
)
def test_the_part_program_against_exhaustive_search(
    family: str, seed: int, phases: Any, share: float
) -> None:
    """It leaves out which layers a KV route moves; without KV routes it is exact up to its gap."""
    problem = _problem(family, 6, seed, model="llama-3-8b", phases=phases)
    evaluator, nodes = Evaluator(problem), range(len(problem.node_gpus))
    relaxed = evaluator.relaxed
    everyone = candidates(relaxed.columns, relaxed.classes, evaluator.planner)
    found = PartProgram(problem, nodes, everyone).solve()
    best = search_exactly(problem, SearchOptions(simulated=False)).throughput.req_s
    assert _within(problem, found)
    assert best * share <= evaluator.evaluate(found).req_s <= best * (1 + 1e-6)


@pytest.mark.parametrize(("gpus", "seed"), [(16, 2), (24, 11)])
def test_the_part_program_is_solved_as_by_scipy(gpus: int, seed: int) -> None:
    """HiGHS 1.12 took much worse solutions for the best where variables had no limits."""
    problem = _problem("racks", gpus, seed, model="opt-30b", phases="disaggregated")
    evaluator, nodes = Evaluator(problem), range(len(problem.node_gpus))
    relaxed = evaluator.relaxed
    everyone = candidates(relaxed.columns, relaxed.classes, evaluator.planner)
    program = PartProgram(problem, nodes, everyone)
    gain, matrix, low, high = program._arrays()
    most = {k: program._most(k) for k in range(len(everyone))}
    found = solve_whole(gain, matrix, low, high, most, 1e-3, 10_000, 30.0)
    limits = np.array([most.get(k, np.inf) for k in range(len(gain))])
    shape = matrix.count, matrix.width
    rows = csr_array((matrix.values, matrix.columns, matrix.starts), shape=shape)
    right = milp(
        -gain,
        integrality=[k in most for k in range(len(gain))],
        bounds=Bounds(0, limits),
        constraints=LinearConstraint(rows, low, high),
        options={"mip_rel_gap": 1e-3, "time_limit": 30.0},
    )
    assert found.value >= -right.fun * 0.998
    assert found.bound >= -right.fun * (1 - 1e-6)


@pytest.mark.parametrize(
    ("family", "gpus", "model", "share"), [("racks", 16, "llama-3-8b", 0.9), ("zoo", 9, "opt-30b", 0.5)]
)
@pytest.mark.parametrize("phases", ["colocated", "disaggregated", "flexible"])
def test_rounding_a_part_comes_close_to_its_integer_program(
    family: str, gpus: int, model: str, share: float, phases: Any
) -> None:
    problem = _problem(family, gpus, 1, model=model, phases=phases)
    evaluator, nodes = Evaluator(problem), range(len(problem.node_gpus))
    relaxed = evaluator.relaxed
    everyone = candidates(relaxed.columns, relaxed.classes, evaluator.planner)
    program = PartProgram(problem, nodes, everyone)
    rounded, best = program.solve(0.0), program.solve()
    assert _within(problem, rounded)
    assert evaluator.evaluate(rounded).req_s >= share * evaluator.evaluate(best).req_s > 0


def test_parts_are_rounded_where_time_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _problem("racks", 64, 5, model="llama-3-8b")
    evaluator = Evaluator(problem)
    monkeypatch.setattr(part_program, "solve_whole", lambda *_: pytest.fail("an integer program"))
    found = groups_by_parts(evaluator, lambda: False, lambda: 0.1, Solution())
    assert _within(problem, found)
    assert evaluator.evaluate(found).req_s > 0.7 * evaluator.relaxed.upper_bound().req_s


def test_an_integer_program_that_is_cut_short_is_no_worse_than_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = _problem("racks", 64, 5, model="llama-3-8b")
    evaluator = Evaluator(problem)
    rounded = groups_by_parts(evaluator, lambda: False, lambda: 0.0, Solution())
    nothing = Optimum(0.0, math.inf, np.zeros(5000), np.zeros(0))
    monkeypatch.setattr(part_program, "solve_whole", lambda *_: nothing)
    assert groups_by_parts(evaluator, lambda: False, lambda: 100.0, Solution()) == rounded


def test_parts_without_time_get_the_groups_of_another_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that do not reach into a part that has its own."""
    problem = _problem("racks", 64, 5, model="llama-3-8b")
    evaluator = Evaluator(problem)
    first, *rest = evaluator.parts
    left = [node for part in rest for node in part]
    inside = Group("colocated", ((left[0], 1), (left[1], 1)))
    across = Group("colocated", ((first[0], 1), (left[2], 1)))
    own = groups_within(evaluator, first)
    monkeypatch.setattr(by_parts, "groups_within", lambda *_: done.append(own) or own)
    done = list[Solution]()
    found = groups_by_parts(evaluator, lambda: bool(done), lambda: 0.0, Solution((inside, across)))
    assert inside in found.groups and across not in found.groups
    others = [each for each in found.groups if each is not inside]
    assert others and all(node in first for each in others for node, _ in each.counts)


@pytest.mark.parametrize("family", ["racks", "boxes"])
@pytest.mark.parametrize("phases", ["colocated", "disaggregated", "flexible"])
def test_groups_of_a_part_stay_on_its_nodes(family: str, phases: Any) -> None:
    problem = _problem(family, 24, 11, model="llama-3-8b", phases=phases)
    nodes = range(1, len(problem.node_gpus), 2)
    found = groups_within(Evaluator(problem), nodes)
    assert found.groups
    assert set(_used(found)) <= set(nodes)
    assert _within(problem, found)


def test_parts_that_correspond_have_the_same_groups() -> None:
    names = [f"n{k}" for k in range(12)]
    links = [
        {"from": a, "to": b, "bandwidth_gbit_s": 100, "latency_us": 20}
        for k in range(0, 12, 4)
        for a, b in itertools.combinations(names[k : k + 4], 2)
    ]
    nodes = [{"name": name, "accelerators": "H100:8" if k % 2 else "L40S:8"} for k, name in enumerate(names)]
    spec = ClusterSpec.model_validate(
        {
            "name": "alike",
            "nodes": nodes,
            "network": {"default": {"bandwidth_gbit_s": 1, "latency_us": 50}, "links": links},
        }
    )
    problem = make_problem(spec, "llama-2-70b", "HPLD", phases="flexible")
    found = groups_by_parts(Evaluator(problem), lambda: False, lambda: None, Solution())
    shifted = [
        sorted(
            (g.role, tuple((n - k, c) for n, c in g.counts))
            for g in found.groups
            if g.counts[0][0] // 4 == k // 4
        )
        for k in (0, 4, 8)
    ]
    assert shifted[0] and shifted[0] == shifted[1] == shifted[2]
    assert _within(problem, found)


def test_fewer_gpus_of_a_problem() -> None:
    """Groups are worth the same whether the other GPUs can be used or not."""
    problem = _problem("racks", 40, 4, phases="flexible")
    evaluator = Evaluator(problem)
    solution = whole_nodes(evaluator)
    kept = Solution(solution.groups[: len(solution.groups) // 2])
    used = _used(kept)
    part = evaluator.of_part(used)
    assert [len(gpus) for gpus in part.problem.node_gpus] == [
        used[node] for node in range(len(problem.node_gpus))
    ]
    fresh = Evaluator(problem.only(used))
    assert part.evaluate(kept).req_s == pytest.approx(evaluator.evaluate(kept).req_s)
    assert fresh.evaluate(kept).req_s == pytest.approx(evaluator.evaluate(kept).req_s)


@pytest.mark.parametrize("family", ["racks", "boxes"])
def test_neighbourhoods_only_improve(family: str) -> None:
    problem = _problem(family, 56, 6, model="llama-3-8b", phases="flexible")
    evaluator = Evaluator(problem)
    state = SearchState(evaluator)
    start = evaluator.evaluate(whole_nodes(evaluator))
    state.offer(start, "start with whole nodes")
    state.spend(200, stale_effort=100)
    Neighbourhoods(state, 0).improve(10**9)
    best = state.incumbent.best
    assert best is not None
    assert best.req_s >= start.req_s
    assert _within(problem, best.solution)
    assert state.elsewhere > 0


def test_a_large_cluster_is_searched_part_by_part() -> None:
    problem = _problem("sites", 64, 8, model="llama-3-8b", phases="flexible")
    assert len(problem.usable) > LARGE
    by_parts: list[bool] = []
    options = SearchOptions(
        simulated=False, time_limit_s=20, progress=lambda state: by_parts.append(state.started_by_parts)
    )
    placement = search(problem, options)
    verify(placement)
    assert any(by_parts)
    first = Evaluator(problem)
    assert placement.throughput.req_s >= first.evaluate(whole_nodes(first)).req_s


@given(st.integers(2, 30), st.integers(0, 10**6))
def test_average_linkage_is_that_of_scipy(count, seed):
    """Distances that all differ have one tree only."""
    points = np.random.default_rng(seed).random((count, 3))
    distance = np.sqrt(((points[:, None] - points[None]) ** 2).sum(axis=2))
    ours, left = set(), [average_linkage(distance)]
    while left:
        branch = left.pop()
        ours.add(frozenset(leaves_of(branch)))
        left += branch if isinstance(branch, tuple) else ()
    theirs = {frozenset([k]) for k in range(count)}
    members = [frozenset([k]) for k in range(count)]
    for a, b, *_ in linkage(distance[np.triu_indices(count, 1)], "average"):
        members.append(members[int(a)] | members[int(b)])
        theirs.add(members[-1])
    assert ours == theirs


def test_trees_of_equal_distances_have_all_leaves():
    """A deep tree must not be a deep recursion."""
    assert sorted(leaves_of(average_linkage(np.ones((1500, 1500))))) == list(range(1500))


@pytest.mark.parametrize(
    "cards", [["A100-80GB:2"], ["A100-80GB:2", "A100-80GB:2"], ["L40:1", "L40:1", "L40:2"]]
)
def test_a_first_answer_is_there_however_late_it_is(cards: list[str]) -> None:
    """One node is divided between the phases, and of several nodes no fewer than two are looked at."""
    nodes = [{"name": f"n{k}", "accelerators": card} for k, card in enumerate(cards)]
    network = {"default": {"bandwidth_gbit_s": 25, "latency_us": 20}}
    spec = ClusterSpec.model_validate({"name": "few", "nodes": nodes, "network": network})
    evaluator = Evaluator(make_problem(spec, "llama-3-8b", "HPLD"))
    solution = whole_nodes(evaluator, stop=lambda: True)
    assert {group.role for group in solution.groups} == {"prefill", "decode"}
    assert evaluator.evaluate(solution).req_s > 0
