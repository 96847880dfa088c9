"""HexGen's genetic algorithm in HexGen-2's place, as section 5.3 describes it.

It stands in for the generation of groups and for the refinement: a population of partitions, changed
by merging, splitting and swapping (and moving GPUs), of which the best survive. Phases of the first
generation come from the secondary partition; merges and splits choose them afterwards. Plans, KV
routes and the max flow are HexGen-2's.
"""

from __future__ import annotations

import numpy as np

from hexgen2.placement import Placement
from hexgen2.search.evaluation import Evaluation
from hexgen2.search.operators import merges, moves, splits, swaps
from hexgen2.search.partition.coarsen import coarsen, gpu_graph, project
from hexgen2.search.partition.initial import estimated_groups
from hexgen2.search.partition.secondary import secondary_partition
from hexgen2.search.problem import Problem, Solution
from hexgen2.search.state import SearchState
from hexgen2.search.ties import greatest_first
from hexgen2.strategies.base import SearchOptions, run_search
from hexgen2.strategies.baselines.paper import require_found

NAME = "genetic"
POPULATION = 20
GENERATIONS = 100


def search(problem: Problem, options: SearchOptions) -> Placement:
    """The fittest placement of the last generation."""

    def explore(state: SearchState) -> None:
        rng = np.random.default_rng(options.seed)
        starts = list[Solution]()
        while len(starts) < POPULATION and not (starts and state.stopping.out_of_time()):
            starts += _random_partition(rng, problem)
        evolve(state, rng, starts)
        require_found(state, f"too few groups of any partition that {NAME} came across")

    return run_search(NAME, problem, options, explore)


def evolve(state: SearchState, rng: np.random.Generator, population: list[Solution]) -> None:
    """Generations of mutated partitions: each survivor has one child, and the fittest of all live on."""
    for generation in range(GENERATIONS):
        population = _survivors(state, population, f"generation {generation}")
        if state.stopping.out_of_time():
            break
        population += [_mutated(rng, parent) for parent in population if not state.stopping.out_of_time()]


def _survivors(state: SearchState, population: list[Solution], step: str) -> list[Solution]:
    """The best of the population, no two alike; only they have their stages ordered for the KV routes."""
    evaluated: dict[tuple, Evaluation] = {}
    for solution in population:
        if evaluated and state.stopping.out_of_time():
            break
        evaluated.setdefault(solution.key, state.evaluator.evaluate(solution))
    best = greatest_first(evaluated.values(), lambda evaluation: evaluation.score)[:POPULATION]
    for evaluation in best:
        # Unordered if that is all there is time for.
        late = state.stopping.out_of_time()
        state.offer(evaluation if late else state.evaluator.reordered(evaluation), step)
    return [evaluation.solution for evaluation in best]


def _random_partition(rng: np.random.Generator, problem: Problem) -> list[Solution]:
    """GPUs drawn into at most the paper's K groups; the secondary partition does not say which of its
    sides prefills, so both ways around."""
    weights, memory = gpu_graph(problem)
    groups = int(rng.integers(2, estimated_groups(problem) + 1))
    labels = rng.integers(groups, size=len(memory))
    graph = coarsen(weights, memory, labels)
    side = secondary_partition(graph)
    return [
        project(problem, graph, ["prefill" if s == first else "decode" for s in side])
        for first in (True, False)
    ]


def _mutated(rng: np.random.Generator, solution: Solution) -> Solution:
    """One random step of a random kind (swaps and moves between two random groups); the solution itself
    where there is none."""
    pair = rng.permutation(len(solution.groups))[:2].tolist()
    kinds = (
        lambda: list(merges(solution)),
        lambda: list(splits(solution)),
        lambda: list(swaps(solution, pair[:1], pair[1:])),
        lambda: list(moves(solution, pair[:1], pair[1:])),
    )
    steps = kinds[int(rng.integers(len(kinds)))]()
    return steps[int(rng.integers(len(steps)))][1] if steps else solution
