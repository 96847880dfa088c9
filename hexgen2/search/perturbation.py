"""Random perturbations that carry an iterated local search out of a local optimum."""

from __future__ import annotations

import numpy as np

from hexgen2.search.budget import Budget, trades
from hexgen2.search.operators import Step, flips, idle_gpus, merges, moves, recruits, splits, swaps
from hexgen2.search.problem import Problem, Solution

KICK_STEPS = 3


def kick(
    rng: np.random.Generator, solution: Solution, problem: Problem, budget: Budget | None = None
) -> Step:
    """Two or three random steps of random kinds away from `solution`; with a budget, within its budget."""
    sizes = tuple(len(gpus) for gpus in problem.node_gpus)
    names = []
    for _ in range(int(rng.integers(2, KICK_STEPS + 1))):
        everyone = list(range(len(solution.groups)))
        kinds = [
            lambda s, e: list(moves(s, e, e)),
            lambda s, e: list(swaps(s, e, e)),
            lambda s, e: list(flips(s, e)),
            lambda s, e: list(merges(s)),
            lambda s, e: list(splits(s)),
            lambda s, e: list(trades(budget, s, e, e) if budget else recruits(s, idle_gpus(s, sizes))),
        ]
        steps = kinds[int(rng.integers(len(kinds)))](solution, everyone)
        if steps:
            name, solution = steps[int(rng.integers(len(steps)))]
            names.append(name.split()[0])
    return "kick: " + ", ".join(names), solution
