"""Iterated local search: perturb the best solution at random and refine it, again and again.

Beyond the paper, whose refinement ends in the first local optimum.
"""

from __future__ import annotations

import numpy as np

from hexgen2.search.budget import Budget, trades
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.local_search import refine
from hexgen2.search.operators import flips, idle_gpus, merges, moves, recruits, splits, swaps
from hexgen2.search.problem import Solution
from hexgen2.search.state import SearchState
from hexgen2.search.steps import Neighbour, Perturb

MANY_GROUPS = 40


def perturb_and_refine(state: SearchState, seed: int, rounds: int) -> None:
    """Refine perturbations of the best solution, until the state is finished or so many rounds are done."""
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        if state.finished() or state.incumbent.best is None:
            return
        step, start = perturbed(rng, state.incumbent.best.solution, state.evaluator, state.budget)
        refine(state, start, step)


def perturbed(
    rng: np.random.Generator, solution: Solution, evaluator: Evaluator, budget: Budget | None = None
) -> Neighbour:
    """A solution two or three random steps of random kinds away; with a budget, steps that keep to it."""
    roles = evaluator.problem.roles
    # Of many groups most are alike, and to list all pairs of them would take long.
    alike = evaluator.alike if len(solution.groups) > MANY_GROUPS else None
    sizes = tuple(len(gpus) for gpus in evaluator.problem.node_gpus)
    done = []
    for _ in range(int(rng.integers(2, evaluator.params.perturbation_steps + 1))):
        everyone = list(range(len(solution.groups)))
        kinds = [
            lambda s, e: list(moves(s, e, e, alike)),
            lambda s, e: list(swaps(s, e, e, alike)),
            lambda s, e: list(flips(s, e, alike, roles)),
            lambda s, e: list(merges(s, alike, roles)),
            lambda s, e: list(splits(s, alike, roles)),
            lambda s, e: list(
                trades(budget, s, e, e) if budget else recruits(s, idle_gpus(s, sizes), alike, roles)
            ),
        ]
        steps = kinds[int(rng.integers(len(kinds)))](solution, everyone)
        if steps:
            step, solution = steps[int(rng.integers(len(steps)))]
            done.append(step.kind)
    return Perturb(tuple(done)), solution
