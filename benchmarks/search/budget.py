"""What each budget of the HexGen-2 paper can rent, of the four GPU types that the paper uses.

    python -m benchmarks.search.budget [--workloads HPLD,HPHD,LPHD,LPLD] [--csv FILE]

Covers both budgets of the paper (the price of 8 H100, and 70 % of it), both of its models and its four
offline workloads. Prints what `hexgen2 search --cluster hexgen2-offers --budget` rents, and its requests/s;
the ratios to 8 H100 and to the best of the paper's own settings for that budget (1 to 4, or 5), searched the
same way; the gap to the bound; and the search time. The paper's settings span data centres with slow links
between them, while all rented GPUs are in one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import cache
from pathlib import Path

from benchmarks.search.csv_file import write_csv
from hexgen2.goal import make_goal
from hexgen2.placement import Placement
from hexgen2.report.placement import rented_text
from hexgen2.search.problem import make_problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy

BUDGETS = {29.52: [f"hexgen2-setting-{k}" for k in range(1, 5)], 20.66: ["hexgen2-setting-5"]}
"""$ per hour, and the settings that the paper rents for about that price."""
MODELS = ("llama-2-70b", "opt-30b")
WORKLOADS = ("HPLD", "HPHD", "LPHD", "LPLD")


@cache
def place(cluster: str, model: str, workload: str, budget: float | None = None) -> Placement:
    """The placement that the search finds, with or without a budget."""
    problem = make_problem(cluster, model, workload, goal=make_goal(budget_per_hour=budget))
    return find_strategy("hexgen2")(problem, SearchOptions())


def measure(budget: float, model: str, workload: str) -> dict:
    """One cell of the table."""
    started = time.perf_counter()
    rental = place("hexgen2-offers", model, workload, budget)
    seconds = time.perf_counter() - started
    settings = {name: place(name, model, workload).throughput.req_s for name in BUDGETS[budget]}
    best = max(settings, key=lambda name: settings[name])
    req_s = rental.throughput.req_s
    return {
        "budget": budget,
        "model": model,
        "workload": workload,
        "rented": rented_text(rental.rented),
        "price": round(rental.price_per_hour, 2),
        "req_s": round(req_s, 2),
        "over_8_h100": round(req_s / place("hexgen2-homogeneous", model, workload).throughput.req_s, 3),
        "over_best_setting": round(req_s / settings[best], 3),
        "best_setting": best,
        "gap": round(rental.bound.gap, 3),
        "seconds": round(seconds, 2),
    }


def main() -> None:
    """Measure every cell and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    rows = []
    for budget in BUDGETS:
        for model in MODELS:
            for workload in arguments.workloads.split(","):
                rows.append(measure(budget, model, workload))
                print(*rows[-1].values(), sep="\t", flush=True)
    for budget in BUDGETS:
        cells = [row for row in rows if row["budget"] == budget]
        for key in ("over_8_h100", "over_best_setting"):
            ratios = [row[key] for row in cells]
            print(
                f"{budget} $/h {key}: mean {statistics.mean(ratios):.3f}, "
                f"from {min(ratios):.3f} to {max(ratios):.3f}"
            )
    seconds = [row["seconds"] for row in rows]
    print(f"seconds: median {statistics.median(seconds)}, worst {max(seconds)}")
    if arguments.csv:
        write_csv(arguments.csv, rows)


if __name__ == "__main__":
    main()
