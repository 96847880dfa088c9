"""Large neighbourhood search: one neighbourhood of nodes at a time is searched as if there were no other.

A step of the local search costs as much as the flow through all replicas, and most steps of a large cluster
concern few of them. So the groups on some nodes that are near each other are taken out, improved by the same
local search with as little to look at as in a small cluster, and put back if the whole is better for it
(Shaw, 1998). Beyond the paper."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from hexgen2.search.evaluator import Evaluator
from hexgen2.search.local_search import refine
from hexgen2.search.partition.parts import bandwidth_between
from hexgen2.search.perturbation import perturb_and_refine
from hexgen2.search.problem import Group, Problem, Solution
from hexgen2.search.state import SearchState

GPUS = 32
"""A neighbourhood has at least so many."""
EFFORT, STALE, ROUNDS = 200.0, 60.0, 20
"""Of the search in one, in all and without an improvement, and its perturbations at most."""
MANY_GROUPS, CHANGES = 150, 8
"""Of more groups, so many neighbourhoods are changed at a time."""


class Neighbourhoods:
    """Improves the best solution of a state, a neighbourhood at a time. Of very many groups, several
    neighbourhoods that have no node in common change before the whole is evaluated.

    Attributes
    ----------
    exhausted : whether all parts and as many neighbourhoods drawn at random in a row brought nothing
    """

    def __init__(self, state: SearchState, seed: int) -> None:
        self._state, self._rng = state, np.random.default_rng(seed)
        self._left = _neighbourhoods(state.evaluator, self._rng)
        self._idle, self._most_idle = 0, 2 * len(state.evaluator.parts)

    @property
    def exhausted(self) -> bool:
        return self._idle >= self._most_idle

    def begin_again(self) -> None:
        """Now that the best is another one, nothing is exhausted."""
        self._idle = 0

    def improve(self, effort: float) -> bool:
        """Improve neighbourhoods until the state is finished, or so much effort brought nothing; whether it
        brought something."""
        state, changes, gained, since = self._state, list[_Change](), False, self._state.effort
        while not state.finished() and (best := state.incumbent.best) is not None:
            nodes = next(self._left)
            if any(node in changed.nodes for changed in changes for node in nodes) and self._make(changes):
                gained, since = True, state.effort
            found = _change(state, nodes, int(self._rng.integers(2**31)))
            self._idle += 1
            if found is not None:
                changes.append(found)
            at_once = 1 if len(best.solution.groups) <= MANY_GROUPS else CHANGES
            if len(changes) >= at_once and self._make(changes):
                gained, since = True, state.effort
            if state.effort - since >= effort or self.exhausted:
                break
        return self._make(changes) or gained

    def _make(self, changes: list[_Change]) -> bool:
        """Make these changes, and forget them; whether the best solution is better with them."""
        made = _made(self._state, changes)
        changes.clear()
        if made:
            self._idle = 0
        return made


class _Change(NamedTuple):
    """Groups on some nodes that others may take the place of."""

    nodes: tuple[int, ...]
    before: tuple[Group, ...]
    after: tuple[Group, ...]


def _made(state: SearchState, changes: list[_Change]) -> bool:
    """Whether the best solution is better with these changes; they are made then."""
    best = state.incumbent.best
    if best is None or not changes or state.stopping.out_of_time():
        return False
    groups = list(best.solution.groups)
    for change in changes:
        for group in change.before:
            groups.remove(group)
        groups += change.after
    tried = state.evaluator.evaluate(Solution(tuple(groups)), best)
    around = ", ".join(str(change.nodes[0]) for change in changes)
    state.offer(state.evaluator.reordered(tried, state.stopping.out_of_time), f"search around node {around}")
    return state.incumbent.best is not best


def _neighbourhoods(evaluator: Evaluator, rng: np.random.Generator) -> Iterator[tuple[int, ...]]:
    """Every part of the cluster once, then nodes around one drawn at random, for ever: in turns the nearest,
    and any."""
    parts, problem = evaluator.parts, evaluator.problem
    for k in rng.permutation(len(parts)).tolist():
        yield parts[k]
    near = bandwidth_between(problem)
    sizes = np.array([len(gpus) for gpus in problem.node_gpus])
    nodes = np.flatnonzero(sizes)
    for turn in itertools.count():
        first = int(rng.choice(nodes))
        others = rng.permutation(nodes[nodes != first])
        if turn % 2 == 0:
            others = others[np.argsort(-near[first, others], kind="stable")]
        reached = sizes[first] + np.cumsum(sizes[others])
        enough = int(np.searchsorted(reached, GPUS)) + 1
        yield tuple(sorted([first, *others[:enough].tolist()]))


def _change(state: SearchState, nodes: tuple[int, ...], seed: int) -> _Change | None:
    """What a search finds on these nodes that is better there, if there is anything; groups that also stand
    on other nodes stay as they are."""
    evaluator, best = state.evaluator, state.incumbent.best
    assert best is not None
    inside = tuple(group for group in best.solution.groups if all(node in nodes for node, _ in group.counts))
    outside = [group for group in best.solution.groups if group not in inside]
    part = SearchState(
        evaluator.of_part(_free_beside(outside, evaluator.problem, nodes)), state.stopping.again()
    )
    planned = evaluator.planner.computed
    part.spend(EFFORT, stale_effort=STALE)
    start = part.evaluator.evaluate(Solution(inside), best)
    refine(part, start.solution, "start")
    perturb_and_refine(part, seed, ROUNDS)
    state.elsewhere += part.effort - evaluator.params.effort_per_plan * planned
    found = part.incumbent.best
    if found is None or not found.better_than(start):
        return None
    return _Change(nodes, inside, found.solution.groups)


def _free_beside(groups: list[Group], problem: Problem, nodes: tuple[int, ...]) -> dict[int, int]:
    """The GPUs of these nodes that the groups do not have."""
    free = {node: len(problem.node_gpus[node]) for node in nodes}
    for group in groups:
        for node, count in group.counts:
            if node in free:
                free[node] -= count
    return free
