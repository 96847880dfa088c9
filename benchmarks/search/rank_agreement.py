"""Whether formulas and simulator rank placements alike: Kendall's tau between planned and simulated figures.

    python -m benchmarks.search.rank_agreement [--clusters N] [--fixed N] [--placements N] [--seed S]

For each case, placements of its GPUs drawn at random: half are the search's answer after one to six random
changes, half have groups of random GPUs and roles (one in four of these all colocated). Goodput is what the
formulas plan within the targets, and what the simulator finds; throughput is the same without targets, with
1.15 times as many arrivals as are planned. "top" is tau among the better half by simulation, where a search
decides, and "best" what the placement that the formulas rank first has in the simulator, over the most.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import kendalltau

import hexgen2
from benchmarks.search.promises import FIXED, Case, drawn
from hexgen2.goal import Goal
from hexgen2.placement import SearchRecord
from hexgen2.promise.finalists import Effort
from hexgen2.promise.keep import with_promise
from hexgen2.search.build import build_placement
from hexgen2.search.evaluation import Evaluation
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.perturbation import perturbed
from hexgen2.search.problem import Group, Problem, Solution, counts_of, make_problem
from hexgen2.search.state import SearchState
from hexgen2.simulator.run import steady_requests
from hexgen2.strategies.base import SearchOptions, run_search
from hexgen2.strategies.hexgen2 import explore

BEYOND = 1.15
CHANGES = 6
TRIES = 40
"""Draws for each placement wanted: most groups at random cannot hold the model."""
COLOCATED = 0.25
AS_PLANNED = Effort(final=2000, final_runs=3, most=6000, challengers=0, challengers_per_gpu=0)
"""Other engine settings than those planned are not tried."""


class Agreement(NamedTuple):
    """How two orders of placements agree."""

    placements: int
    tau: float
    top: float
    best: float

    @classmethod
    def of(cls, planned: Sequence[float], simulated: Sequence[float]) -> Agreement:
        """Of planned figures with simulated ones."""
        a, b = np.array(planned), np.array(simulated)
        better = np.argsort(-b)[: max(2, len(b) // 2)]
        return cls(
            len(a),
            float(kendalltau(a, b).statistic),
            float(kendalltau(a[better], b[better]).statistic),
            float(b[np.argmax(a)] / b.max()) if b.max() > 0 else math.nan,
        )

    def __str__(self) -> str:
        return f"{self.placements:>4}{self.tau:>7.2f}{self.top:>7.2f}{self.best:>7.1%}"


def main() -> None:
    """Print a row for each case, and the worst."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--clusters", type=int, default=10, help="clusters drawn at random")
    parser.add_argument("--fixed", type=int, default=len(FIXED), help="fixed cases to begin with")
    parser.add_argument("--placements", type=int, default=40, help="for each case")
    parser.add_argument("--requests", type=int, default=4000, help="of a run under full load, at least")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.placements} placements of each cluster")
    rest = f"{'top':>7}{'best':>7}"
    print(f"{'cluster, model, workload, TTFT/TPOT ms':66}{'goodput tau':>11}{rest} throughput{rest}")
    rng = random.Random(options.seed)
    lowest = []
    for case in (*(Case(*fixed) for fixed in FIXED[: options.fixed]), *drawn(rng, options.clusters)):
        seed = rng.randrange(10**6)
        try:
            goodput, throughput = of_goodput(case, options, seed), of_throughput(case, options, seed)
        except hexgen2.InfeasibleError as error:
            print(f"{case.name:66} {str(error)[:90]}", flush=True)
            continue
        lowest.append(min(goodput.tau, throughput.tau))
        print(f"{case.name:66}{goodput}{throughput}", flush=True)
    if lowest:
        print(f"lowest tau: {min(lowest):.2f}")


def of_goodput(case: Case, options: argparse.Namespace, seed: int) -> Agreement:
    """The agreement on goodput within the case's targets."""
    goal = Goal(objective="goodput", ttft_ms=case.ttft_ms, tpot_ms=case.tpot_ms)
    problem = make_problem(case.cluster, case.model, case.workload, goal=goal)
    placements = placed(problem, options.placements, seed)

    def simulated(placement: hexgen2.Placement) -> float:
        goodput = with_promise([placement], problem.cluster, seed, lambda: False, AS_PLANNED).goodput
        assert goodput is not None and goodput.goodput_req_s is not None
        return goodput.goodput_req_s

    return _agreement(placements, simulated)


def of_throughput(case: Case, options: argparse.Namespace, seed: int) -> Agreement:
    """The agreement on throughput without targets."""
    problem = make_problem(case.cluster, case.model, case.workload)
    placements = placed(problem, options.placements, seed)

    def simulated(placement: hexgen2.Placement) -> float:
        rate, count = placement.throughput.req_s * BEYOND, max(options.requests, steady_requests(placement))
        found = hexgen2.simulate(placement, request_rate=rate, num_requests=count, seed=seed)
        return found.steady_request_throughput

    return _agreement(placements, simulated)


def _agreement(
    placements: Sequence[hexgen2.Placement], simulated: Callable[[hexgen2.Placement], float]
) -> Agreement:
    return Agreement.of([p.throughput.req_s for p in placements], [simulated(p) for p in placements])


def placed(problem: Problem, count: int, seed: int) -> list[hexgen2.Placement]:
    """So many placements, no two of which have the same groups; fewer where most draws carry nothing."""
    found: dict[tuple, Evaluation] = {}

    def keep(solutions: Iterator[Solution], evaluator: Evaluator, most: int) -> None:
        for solution in solutions:
            if len(found) >= most:
                return
            evaluation = evaluator.evaluate(solution)
            if evaluation.req_s > 0:
                found[solution.key] = evaluation

    def explore_and_draw(state: SearchState) -> None:
        explore(state, seed)
        best = state.incumbent.best
        if best is not None:
            rng = np.random.default_rng(seed)
            keep(changed(rng, best.solution, state.evaluator), state.evaluator, count // 2)
            keep(at_random(rng, problem), state.evaluator, count)

    run_search("drawn at random", problem, SearchOptions(seed, simulated=False), explore_and_draw)
    record = SearchRecord(seconds=0, seed=seed, evaluations=0, trace=[], cut=None)
    return [build_placement(problem, each, "drawn at random", record) for each in found.values()]


def changed(rng: np.random.Generator, best: Solution, evaluator: Evaluator) -> Iterator[Solution]:
    """A solution after one to CHANGES random changes, again and again."""
    for _ in range(TRIES * CHANGES):
        solution = best
        for _ in range(int(rng.integers(1, CHANGES + 1))):
            _, solution = perturbed(rng, solution, evaluator)
        yield solution


def at_random(rng: np.random.Generator, problem: Problem) -> Iterator[Solution]:
    """Groups of random sizes from the GPUs in a random order of nodes, with random roles."""
    sizes = [len(gpus) for gpus in problem.node_gpus]
    for _ in range(TRIES * sum(sizes)):
        order = rng.permutation(len(sizes)).tolist()
        gpus = [node for node in order for _ in range(sizes[node])]
        cuts = rng.choice(len(gpus) - 1, size=int(rng.integers(0, min(12, len(gpus) - 1))), replace=False) + 1
        parts = np.split(np.array(gpus), np.sort(cuts))
        mixed = ("colocated",) if rng.random() < COLOCATED else ("prefill", "decode")
        yield Solution(
            tuple(
                Group(
                    mixed[int(rng.integers(len(mixed)))],
                    counts_of({int(node): int((part == node).sum()) for node in part}),
                )
                for part in parts
            )
        )


if __name__ == "__main__":
    main()
