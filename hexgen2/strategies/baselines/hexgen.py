"""HexGen: colocated replicas of mixed GPUs (Jiang et al., ICML 2024), HexGen-2's baseline in section 5.

Every replica runs both phases, on a pipeline whose stages may differ in GPU type, tensor degree and
layers. A genetic algorithm merges, splits and swaps groups; the fitness here is the throughput, the
sum of the replicas' capacities, as for all strategies, where HexGen's own is the share of requests
that meet a deadline.
"""

from __future__ import annotations

import numpy as np

from hexgen2.placement import Placement
from hexgen2.search.partition.initial import estimated_groups
from hexgen2.search.problem import Group, Problem, Solution, counts_of
from hexgen2.search.state import SearchState
from hexgen2.strategies.base import SearchOptions, run_search
from hexgen2.strategies.baselines.genetic import POPULATION, evolve

NAME = "hexgen"
ROLE = "colocated"


def search(problem: Problem, options: SearchOptions) -> Placement:
    """The fittest placement of the last generation."""

    def explore(state: SearchState) -> None:
        rng = np.random.default_rng(options.seed)
        drawn = [_random_partition(rng, problem) for _ in range(POPULATION - 2)]
        evolve(state, rng, [_one_group(problem), _group_per_node(problem), *drawn])

    return run_search(NAME, problem, options, explore, fewest_gpus=1, objectives=("throughput",))


def _one_group(problem: Problem) -> Solution:
    sizes = {node: len(gpus) for node, gpus in enumerate(problem.node_gpus)}
    return Solution((Group(ROLE, counts_of(sizes)),))


def _group_per_node(problem: Problem) -> Solution:
    return Solution(
        tuple(Group(ROLE, ((node, count),)) for node, count in _one_group(problem).groups[0].counts)
    )


def _random_partition(rng: np.random.Generator, problem: Problem) -> Solution:
    """GPUs drawn into at most as many groups as the memory estimate allows."""
    nodes = np.repeat(np.arange(len(problem.node_gpus)), [len(gpus) for gpus in problem.node_gpus])
    labels = rng.integers(rng.integers(1, estimated_groups(problem) + 1), size=len(nodes))
    drawn = (nodes[labels == label].tolist() for label in np.unique(labels))
    return Solution(tuple(Group(ROLE, counts_of({n: part.count(n) for n in part})) for part in drawn))
