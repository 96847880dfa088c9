"""Exhaustive search, for small clusters: every partition into groups with roles, up to symmetry.

GPUs of one node are alike, so groups are counted per node. Each node in turn gives its GPUs to groups
that contain it, in non-rising order, or leaves them idle.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from cost_model.errors import InputError
from hexgen2.placement import Placement
from hexgen2.search.problem import Group, Problem, Solution, blocks_of
from hexgen2.search.refine import SearchState
from hexgen2.strategies.base import SearchOptions, run_search

NAME = "exact"
MAX_GPUS = 12

Counts = tuple[int, ...]


def search(problem: Problem, options: SearchOptions) -> Placement:
    """The best of all placements.

    Raises
    ------
    InputError : more than MAX_GPUS GPUs
    """
    count = len(problem.cluster.gpu_ids)
    if count > MAX_GPUS:
        raise InputError(
            "--strategy", "exact", f"{count} GPUs are too many to enumerate", "use --strategy hexgen2"
        )

    def explore(state: SearchState) -> None:
        _enumerate(state, problem)

    return run_search(NAME, problem, options, explore)


def _enumerate(state: SearchState, problem: Problem) -> None:
    planner = state.evaluator.planner
    sizes = tuple(len(gpus) for gpus in problem.node_gpus)

    def capacity(role: str, counts: Counts) -> float:
        plan = planner.plan(role, blocks_of(dict(enumerate(counts))))
        return plan.capacity_req_s if plan else 0.0

    def descend(
        free: Counts, node: int, below: Counts | None, groups: list[Group], p: float, d: float
    ) -> None:
        if state.out_of_time():
            return
        if node == len(free):
            best = state.best.req_s if state.best else 0.0
            if min(p, d) > best:
                evaluator = state.evaluator
                found = evaluator.reordered(evaluator.evaluate(Solution(tuple(groups))))
                state.offer(found, "enumerate")
            return
        descend(free, node + 1, None, groups, p, d)
        for counts in _groups_with(free, node):
            if below is not None and counts > below:
                continue
            rest = tuple(f - c for f, c in zip(free, counts, strict=True))
            blocks = blocks_of(dict(enumerate(counts)))
            for role in ("prefill", "decode"):
                gained = capacity(role, counts)
                if gained <= 0:
                    continue
                groups.append(Group(role, blocks))
                descend(
                    rest,
                    node,
                    counts,
                    groups,
                    p + gained * (role == "prefill"),
                    d + gained * (role == "decode"),
                )
                groups.pop()

    descend(sizes, 0, None, [], 0.0, 0.0)


def _groups_with(free: Counts, node: int) -> Iterator[Counts]:
    """Every group that takes at least one GPU of `node` and none of the nodes before it."""
    ranges = [range(0, 1)] * node + [range(1, free[node] + 1)] + [range(f + 1) for f in free[node + 1 :]]
    return itertools.product(*ranges)
