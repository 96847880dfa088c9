"""DistServe's planner on a mixed cluster: one GPU type per phase (Zhong et al., OSDI 2024, section 4).

DistServe plans for like GPUs: for each phase it enumerates tensor x pipeline degrees, and copies the
best replica. So each pair of types, one to prefill and one to decode, is a case of its own, and GPUs
of other types stay idle. A replica takes the same number of GPUs from each of its nodes. Where both
phases share a type, they are placed apart, or side by side in each node, as its two algorithms do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from hexgen2.placement import Placement
from hexgen2.search.problem import Problem
from hexgen2.search.state import SearchState
from hexgen2.search.ties import exceeds
from hexgen2.strategies.base import SearchOptions, run_search
from hexgen2.strategies.baselines.paper import require_found
from hexgen2.strategies.baselines.uniform import (
    Candidate,
    Replicas,
    UniformPlanner,
    as_solution,
    copies,
    fill,
    free_gpus,
    keep_best,
    nodes_by_type,
)

NAME = "distserve"


@dataclass(frozen=True)
class _Layout:
    """A replica takes `gpus` of each of `nodes` nodes; alone in its pool it is copied to `replicas`, of
    which the best has this capacity."""

    gpus: int
    nodes: int
    replicas: Replicas
    capacity_req_s: float

    @property
    def size(self) -> int:
        return self.gpus * self.nodes


def search(problem: Problem, options: SearchOptions) -> Placement:
    """The best pair of types, shapes and numbers of replicas, by enumeration. The seed changes nothing."""

    def explore(state: SearchState) -> None:
        keep_best(state, _candidates(state))
        require_found(state, f"no pools of one type, with the uniform shapes of {NAME},")

    return run_search(NAME, problem, options, explore, evaluator=UniformPlanner.evaluator)


def _candidates(state: SearchState) -> Iterator[Candidate]:
    types = nodes_by_type(state.evaluator.problem)
    layouts = {(t, role): _layouts(state, types[t], role) for t in types for role in ("prefill", "decode")}
    for one, two in itertools.product(types, types):
        for p, d in itertools.product(layouts[one, "prefill"], layouts[two, "decode"]):
            name = f"{one.name} prefill {p.gpus}x{p.nodes}, {two.name} decode {d.gpus}x{d.nodes}"
            if one == two:
                for prefill, decode in _divisions(state, types[one], p, d):
                    yield name, as_solution(prefill, decode)
            else:
                yield name, as_solution(p.replicas, d.replicas)


def _layouts(state: SearchState, nodes: list[int], role: str) -> list[_Layout]:
    """All layouts that hold the model in that role."""
    planner, found = state.evaluator.planner, []
    for gpus, across, replicas in copies(state.evaluator.problem, nodes):
        plans = [plan for plan in (planner.plan(role, counts) for counts in replicas) if plan]
        if plans:
            capacity = max(plan.capacity_req_s for plan in plans)
            found.append(_Layout(gpus, across, replicas, capacity))
    return found


def _divisions(
    state: SearchState, nodes: list[int], p: _Layout, d: _Layout
) -> Iterator[tuple[Replicas, Replicas]]:
    """Every number of prefill replicas, the rest of the pool filled with decode replicas; those whose
    count alone falls short of the best so far are left out."""
    problem = state.evaluator.problem
    total = sum(len(problem.node_gpus[node]) for node in nodes)
    for count in range(1, len(p.replicas) + 1):
        left = (total - count * p.size) // d.size
        best = state.incumbent.best.req_s if state.incumbent.best else 0.0
        if not exceeds(min(count * p.capacity_req_s, left * d.capacity_req_s), best):
            continue
        for spread in (False, True):
            free = free_gpus(problem, nodes)
            prefill = fill(problem, free, p.gpus, p.nodes, spread, count)
            yield prefill, fill(problem, free, d.gpus, d.nodes, spread)
