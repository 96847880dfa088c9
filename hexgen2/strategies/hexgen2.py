"""HexGen-2's two-phase search (section 3): partition, coarsen, assign phases, plan, flow, refine.

The number of groups is not trusted to one estimate: a linear program gives the first start, the paper's
K (total memory over the memory of one replica) the second, smaller numbers the others, and each is
refined on its own. Beyond the paper, small clusters are then settled by enumeration, and elsewhere the
best is perturbed and refined again.
"""

from __future__ import annotations

import numpy as np

from cost_model.base import TensorGroup
from cost_model.hardware import NO_LINK
from hexgen2.goal import OBJECTIVES
from hexgen2.placement import Placement
from hexgen2.search.coarsen import coarsen, gpu_graph, project
from hexgen2.search.columns import linear_start
from hexgen2.search.enumeration import enumerate_all
from hexgen2.search.kernighan_lin import kernighan_lin
from hexgen2.search.kick import kick
from hexgen2.search.problem import Problem, Solution
from hexgen2.search.refine import SearchState, refine
from hexgen2.search.secondary import secondary_partition
from hexgen2.search.spectral import spectral_partition
from hexgen2.strategies import exact
from hexgen2.strategies.base import SearchOptions, run_search
from hexgen2.strategies.latency import explore_latency
from hexgen2.strategies.renting.budget import explore_budget
from hexgen2.strategies.renting.cost import explore_cost
from hexgen2.strategies.renting.frontier import explore_frontier

NAME = "hexgen2"

BATCH_PER_REPLICA = 32
"""Concurrent requests assumed when the number of groups is estimated (Appendix A)."""

MAX_STARTS = 4
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
    for groups in start_sizes(state.evaluator.problem):
        if state.finished():
            return
        refine(state, initial_solution(state, groups), f"start with {groups} groups")


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


def estimated_groups(problem: Problem) -> int:
    """K of section 3.2: the cluster's memory over that of one replica (parameters and the KV cache of 32
    requests, Appendix A), at least 2 and at most one group per GPU."""
    costs, available = problem.costs, problem.cluster.memory_bytes[problem.usable]
    memory = costs.stage_memory(
        "decode", TensorGroup(problem.node_accelerator[0], 1, NO_LINK), first=True, last=True
    )
    replica = memory.needed(problem.model.layers, BATCH_PER_REPLICA)
    return max(2, min(int(float(available.sum()) // replica), len(available)))


def start_sizes(problem: Problem) -> list[int]:
    """Numbers of groups to start from: the estimate first, then fewer, evenly down to 2."""
    estimate = estimated_groups(problem)
    sizes = np.unique(np.linspace(2, estimate, min(MAX_STARTS, estimate - 1)).round().astype(int))
    return [int(size) for size in sizes[::-1]]


def initial_solution(state: SearchState, groups: int) -> Solution:
    """Phase one: the partition into `groups` groups. The secondary partition does not say which side
    prefills; the flow does."""
    problem = state.evaluator.problem
    weights, memory = gpu_graph(problem)
    labels = spectral_partition(weights, memory, groups)
    labels = kernighan_lin(weights, memory, labels)
    graph = coarsen(weights, memory, labels)
    side = secondary_partition(graph)
    both = [
        project(problem, graph, ["prefill" if s == first else "decode" for s in side])
        for first in (True, False)
    ]
    return max(both, key=lambda solution: state.evaluator.evaluate(solution).score)
