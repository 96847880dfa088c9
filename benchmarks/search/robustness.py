"""Answers of searches where costs are off, beside the other finalists and placements for the true costs.

    python -m benchmarks.search.robustness [--settings 1 2 ...] [--clusters N] [--exact N] [--seed S]

The first table has a row for each of the paper's settings and each objective, and for random clusters: the
answer of `hexgen2 search`, and that of `hexgen2 search --robust`, among the same finalists under the same
perturbations. "best" is the share of perturbations in which no other finalist is better by more than 1 %,
"regret" how far it falls short of the best finalist, at worst; p10 is what nine of ten perturbations reach.

The second table asks how much an exact answer loses: on clusters small enough for exhaustive search, the
throughput of the placement that was found under perturbed costs, over that of the exact placement for these
very costs; for the strategies exact and hexgen2, without and with --robust.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from dataclasses import replace

import hexgen2
from benchmarks.search.promises import Case, drawn
from hexgen2.goal import Objective
from hexgen2.promise.cost_errors import CostErrors
from hexgen2.promise.planned import planned_req_s
from hexgen2.robustness import FinalistRobustness
from hexgen2.search.problem import Problem, make_problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy

OBJECTIVES: tuple[Objective, ...] = ("throughput", "goodput")
SETTINGS = {
    1: Case("hexgen2-setting-1", "llama-2-70b", "HPLD", 2000, 100),
    2: Case("hexgen2-setting-2", "llama-2-70b", "online", 2000, 100),
    3: Case("hexgen2-setting-3", "opt-30b", "HPHD", 1500, 100),
    4: Case("hexgen2-setting-4", "opt-30b", "LPHD", 1500, 100),
    5: Case("hexgen2-setting-5", "llama-2-70b", "HPHD", 3000, 120),
}
SMALL = (
    ("hexgen2-case-study", "llama-2-70b", "HPHD"),
    ("hexgen2-case-study", "llama-2-13b", "LPHD"),
    ("hexgen2-case-study", "opt-30b", "online"),
)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--settings", type=int, nargs="*", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--clusters", type=int, default=0, help="clusters drawn at random")
    parser.add_argument("--objectives", nargs="*", choices=OBJECTIVES, default=OBJECTIVES)
    parser.add_argument("--exact", type=int, default=20, help="perturbations of each small cluster")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--cost-model", default=None)
    options = parser.parse_args()
    print(f"seed {options.seed}\n")
    print(
        "| case | objective | answer | mean | p10 | best | regret "
        "| --robust | mean | p10 | best | regret | s |"
    )
    print("| --- | --- |" + " ---: |" * 11)
    rng = random.Random(options.seed)
    for case in (*(SETTINGS[k] for k in options.settings), *drawn(rng, options.clusters)):
        for objective in options.objectives:
            print_row(case, objective, options)
    if options.exact:
        print("\n| case | strategy | kept on average | at worst | perturbations with more than 5 % lost |")
        print("| --- | --- | ---: | ---: | ---: |")
        least = 1.0
        for small in SMALL:
            for strategy, shares in kept_by(small, options).items():
                lost = sum(share < 0.95 for share in shares) / len(shares)
                mean, least = math.fsum(shares) / len(shares), min(least, *shares)
                row = f"{', '.join(small)} | {strategy} | {mean:.1%} | {min(shares):.1%} | {lost:.0%}"
                print(f"| {row} |", flush=True)
        print(f"\nleast kept: {least:.1%}")


def print_row(case: Case, objective: Objective, options: argparse.Namespace) -> None:
    """Print one row of the first table."""
    asked = case._asdict()
    name = case.name
    if objective == "throughput":
        name = name.rpartition(", ")[0]
        asked.pop("ttft_ms"), asked.pop("tpot_ms")
    began = time.process_time()
    try:
        found = hexgen2.search(
            **asked, objective=objective, cost_model=options.cost_model, seed=options.seed, robust=True
        )
    except hexgen2.InfeasibleError as error:
        print(f"| {name} | {objective} | {str(error)[:90]} |", flush=True)
        return
    took_s, record = time.process_time() - began, found.robustness
    assert record is not None and record.chosen is not None
    answer, chosen = record.finalists[0], record.chosen
    robust = "same | | | | " if chosen is answer else cells(chosen)
    print(f"| {name} | {objective} | {cells(answer)} | {robust} | {took_s:.0f} |", flush=True)


def cells(one: FinalistRobustness) -> str:
    """A finalist's figures as cells of a table."""
    figures = " | ".join(f"{value or 0:.4g}" for value in (one.nominal, one.mean, one.p10))
    return f"{figures} | {one.best_share:.0%} | {one.worst_regret:.0%}"


def kept_by(small: tuple[str, str, str], options: argparse.Namespace) -> dict[str, list[float]]:
    """For each strategy, what its placement carries over what the best one for the true costs does, under
    each perturbation; both by formulas."""
    problem = make_problem(*small, cost_model=options.cost_model)
    by_formulas = SearchOptions(options.seed, simulated=False)
    asked = {
        "exact": ("exact", by_formulas),
        "hexgen2": ("hexgen2", by_formulas),
        "hexgen2 --robust": ("hexgen2", SearchOptions(options.seed, robust=True)),
    }
    placements = [find_strategy(strategy)(problem, how) for strategy, how in asked.values()]
    errors = CostErrors.of(problem.costs, problem.cluster)
    # Not the draws by which --robust has chosen.
    draws = errors.draws(problem.cluster, options.seed + 1, options.exact)
    kept: list[list[float]] = [[] for _ in placements]
    for draw in draws:
        true = replace(problem, costs=draw.costs(problem.costs), cluster=draw.cluster(problem.cluster))
        best = find_strategy("exact")(true, by_formulas).throughput.req_s
        for shares, carried in zip(kept, carried_by(placements, true), strict=True):
            shares.append(carried / best)
    return dict(zip(asked, kept, strict=True))


def carried_by(placements: list[hexgen2.Placement], problem: Problem) -> list[float]:
    """Requests/s of placements under the problem's costs."""
    return planned_req_s(placements, problem.cluster, problem.costs)


if __name__ == "__main__":
    main()
