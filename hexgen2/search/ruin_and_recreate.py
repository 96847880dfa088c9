"""Ruin and recreate: some groups of the best solution are taken out, and the configuration LP, with the rest
fixed, says which to form instead (bounds/repairs.py).

What is put back is chosen with the whole cluster in view, in the time of a few small linear programs, where a
local search sees one step at a time (Schrimpf et al., 2000). Most of what comes out is ruled out by what its
groups could do at best, without routes or flow. Beyond the paper."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hexgen2.search.evaluation import Evaluation
from hexgen2.search.partition.parts import bandwidth_between
from hexgen2.search.problem import Group, Problem, Solution
from hexgen2.search.state import SearchState
from hexgen2.search.ties import exceeds

FEWEST, MOST = 16, 96
"""GPUs that are taken out at least, and at most, unless all are."""
TRIED = 4
"""A kind of ruin begins as if it had helped once in so many tries; those that help more often are then tried
more often."""
EFFORT, MOST_IDLE = 1.0, 100
"""Of filling up, besides the evaluation; and how often in a row it may bring nothing."""
Ruin = Callable[[np.random.Generator, tuple[Group, ...]], list[Group]]
"""Which of these groups stay."""


class RuinAndRecreate:
    """Takes groups out of a state's best solution, and fills it up again.

    Attributes
    ----------
    exhausted : whether that brought nothing MOST_IDLE times in a row
    """

    def __init__(self, state: SearchState, seed: int) -> None:
        self._state, self._rng = state, np.random.default_rng(seed)
        self._repairs = state.evaluator.relaxed.repairs()
        self._ruins = _ruins(state.evaluator.problem)
        self._tries = np.full(len(self._ruins), float(TRIED))
        self._gains, self._idle = np.ones(len(self._ruins)), 0

    @property
    def exhausted(self) -> bool:
        return self._idle >= MOST_IDLE

    def begin_again(self) -> None:
        """Now that the best is another one, nothing is exhausted."""
        self._idle = 0

    def improve(self, effort: float) -> bool:
        """Do so until the state is finished, or so much effort brought nothing; whether it brought
        something."""
        state, gained, since = self._state, False, self._state.effort
        while not state.finished() and (current := state.incumbent.best) is not None:
            share = self._gains / self._tries
            which = int(self._rng.choice(len(share), p=share / share.sum()))
            name, ruin = self._ruins[which]
            kept = ruin(self._rng, current.solution.groups)
            found = self._repairs.repaired(kept, self._rng, state.stopping.out_of_time)
            state.elsewhere += EFFORT
            self._tries[which] += 1
            self._idle += 1
            tried = _hopeful(state, found, current)
            if tried is not None:
                state.offer(tried, f"take out {name} and fill up")
            if state.incumbent.best is not current:
                self._gains[which] += 1
                gained, self._idle, since = True, 0, state.effort
            if state.effort - since >= effort or self.exhausted:
                break
        return gained


def _hopeful(state: SearchState, solution: Solution, current: Evaluation) -> Evaluation | None:
    """The solution's value, unless its groups alone say that it scores no more than the current one."""
    evaluator, threshold = state.evaluator, current.score
    if not exceeds(evaluator.limits.of_hopeful(solution, threshold), threshold):
        return None
    if not exceeds(evaluator.limit_by_links(solution, current), threshold):
        return None
    return evaluator.reordered(evaluator.evaluate(solution, current), state.stopping.out_of_time)


def _ruins(problem: Problem) -> list[tuple[str, Ruin]]:
    """The kinds of ruins, by what they take out."""
    near, sizes = bandwidth_between(problem), np.array([len(gpus) for gpus in problem.node_gpus])

    def any_groups(rng: np.random.Generator, groups: tuple[Group, ...]) -> list[Group]:
        order = rng.permutation(len(groups))
        taken = np.cumsum([sum(n for _, n in groups[k].counts) for k in order])
        left = order[1 + int(np.searchsorted(taken, _amount(rng))) :]
        return [groups[k] for k in sorted(left.tolist())]

    def near_groups(rng: np.random.Generator, groups: tuple[Group, ...]) -> list[Group]:
        first, shuffled = int(rng.integers(len(sizes))), rng.permutation(len(sizes))
        others = shuffled[shuffled != first]
        order = np.concatenate([[first], others[np.argsort(-near[first, others], kind="stable")]])
        reached = 1 + int(np.searchsorted(np.cumsum(sizes[order]), _amount(rng)))
        nodes = set(order[:reached].tolist())
        return [group for group in groups if not any(node in nodes for node, _ in group.counts)]

    return [
        ("all groups", lambda rng, groups: []),
        ("groups anywhere", any_groups),
        ("groups near each other", near_groups),
    ]


def _amount(rng: np.random.Generator) -> float:
    return float(rng.uniform(FEWEST, MOST))
