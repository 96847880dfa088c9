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
from hexgen2.search.problem import Problem, blocks_of
from hexgen2.search.refine import SearchState
from hexgen2.strategies.base import SearchOptions, run_search
from hexgen2.strategies.paper import require_found
from hexgen2.strategies.splitwise import (
    Replicas,
    Step,
    UniformPlanner,
    as_solution,
    keep_best,
    nodes_by_type,
)

NAME = "distserve"
MAX_NODES = 16
"""Most nodes that one replica's pipeline crosses."""


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
        state.evaluator.planner = UniformPlanner(problem)
        keep_best(state, _candidates(state))
        require_found(state, f"no pools of one type, with the uniform shapes of {NAME},")

    return run_search(NAME, problem, options, explore)


def _candidates(state: SearchState) -> Iterator[Step]:
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
    problem, planner = state.evaluator.problem, state.evaluator.planner
    largest = max(len(problem.node_gpus[node]) for node in nodes)
    found = []
    for gpus, across in itertools.product(range(1, largest + 1), range(1, min(len(nodes), MAX_NODES) + 1)):
        replicas = _fill(problem, _free(problem, nodes), gpus, across, spread=False)
        plans = [plan for plan in (planner.plan(role, blocks) for blocks in replicas) if plan]
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
        best = state.best.req_s if state.best else 0.0
        if min(count * p.capacity_req_s, left * d.capacity_req_s) <= best:
            continue
        for spread in (False, True):
            free = _free(problem, nodes)
            prefill = _fill(problem, free, p.gpus, p.nodes, spread, count)
            yield prefill, _fill(problem, free, d.gpus, d.nodes, spread)


def _free(problem: Problem, nodes: list[int]) -> dict[int, int]:
    return {node: len(problem.node_gpus[node]) for node in nodes}


def _fill(
    problem: Problem, free: dict[int, int], gpus: int, nodes: int, spread: bool, most: int | None = None
) -> Replicas:
    """As many like replicas as `free` holds, at most `most`, taken out of it: each from the emptiest node
    that has room (or the fullest, to spread them) and the nodes with the fastest links to it."""
    found: Replicas = []
    while most is None or len(found) < most:
        room = [node for node in free if free[node] >= gpus]
        if len(room) < nodes:
            break
        first = min(room, key=lambda node: (-free[node] if spread else free[node], node))
        links = problem.node_links[first]
        others = sorted((n for n in room if n != first), key=lambda n: -links[n].bandwidth_bytes_s)
        taken = [first, *others[: nodes - 1]]
        for node in taken:
            free[node] -= gpus
        found.append(blocks_of(dict.fromkeys(taken, gpus)))
    return found
