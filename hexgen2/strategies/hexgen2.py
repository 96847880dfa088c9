"""HexGen-2's two-phase search (section 3): partition, coarsen, assign phases, plan, flow, refine.

The number of groups is not trusted to one estimate: a linear program gives the first start, the paper's
K (total memory over the memory of one replica) the second, smaller numbers the others, and each is
refined on its own. Beyond the paper, small clusters are then settled by enumeration, and elsewhere the
best is perturbed and refined again.
"""

from __future__ import annotations

import itertools

import numpy as np

from hexgen2.goal import OBJECTIVES
from hexgen2.placement import Placement
from hexgen2.search.columns import linear_start
from hexgen2.search.enumeration import enumerate_all
from hexgen2.search.kick import kick
from hexgen2.search.metis import metis_partition
from hexgen2.search.partition import initial_solution, spectral_and_swaps, start_sizes
from hexgen2.search.problem import Problem
from hexgen2.search.refine import SearchState, refine
from hexgen2.strategies import exact
from hexgen2.strategies.base import SearchOptions, run_search
from hexgen2.strategies.latency import explore_latency
from hexgen2.strategies.renting.budget import explore_budget
from hexgen2.strategies.renting.cost import explore_cost
from hexgen2.strategies.renting.frontier import explore_frontier

NAME = "hexgen2"

PARTITIONERS = (spectral_and_swaps, metis_partition)
"""They take turns over the numbers of groups, the paper's first. On settings 1, 2, 3 and 5 of HexGen-2 (both
models, four workloads, three seeds: 96 searches) this found the better answer in 92, and the paper's alone
in 76, with the same effort."""

MAX_KICKS = 100
EFFORT = 5000
"""Effort (see SearchState) for clusters of up to LARGE GPUs; larger ones get more in proportion."""
LARGE = 32
ENUMERATION = 40_000
"""Branches of the exhaustive search that are tried on small clusters before the perturbations begin:
enough to settle most of them."""


def search(problem: Problem, options: SearchOptions) -> Placement:
    """The best placement found; see SearchOptions and run_search for limits and errors."""

    def explore_all(state: SearchState) -> None:
        goal = problem.goal
        if goal.objective == "latency":
            explore_latency(state, options.seed, explore)
        elif goal.objective == "cost":
            explore_cost(state, options.seed)
        elif goal.frontier is not None:
            explore_frontier(state, options.seed, explore)
        elif goal.rents:
            explore_budget(state, options.seed, explore)
        else:
            explore(state, options.seed)

    return run_search(NAME, problem, options, explore_all, rents=True, objectives=OBJECTIVES)


def explore(state: SearchState, seed: int) -> None:
    """Offer the best solution of a cluster whose GPUs are all there to use."""
    state.effort_limit = EFFORT * max(1.0, len(state.evaluator.problem.usable) / LARGE)
    climb_from_starts(state)
    settle(state, seed)


def climb_from_starts(state: SearchState) -> None:
    """Refine the linear program's start and the paper's, each on its own."""
    linear = linear_start(state.evaluator)
    if linear.groups:
        refine(state, linear, "start from the linear program")
    sizes = start_sizes(state.evaluator.problem)
    for groups, partitioner in zip(sizes, itertools.cycle(PARTITIONERS), strict=False):
        if state.finished():
            return
        start = initial_solution(state.evaluator, groups, partitioner)
        refine(state, start, f"start with {groups} groups")


def settle(state: SearchState, seed: int) -> None:
    """Enumerate a small cluster; else, or if that is too much, perturb the best and refine it again."""
    problem = state.evaluator.problem
    if len(problem.usable) <= exact.MAX_GPUS and not state.finished():
        state.proved = enumerate_all(state, ENUMERATION)
    if state.proved or state.best is None:
        return
    rng = np.random.default_rng(seed)
    for _ in range(MAX_KICKS):
        if state.finished():
            return
        name, solution = kick(rng, state.best.solution, problem)
        refine(state, solution, name)
