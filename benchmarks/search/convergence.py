"""Convergence of the search and of the alternatives in HexGen-2's Figures 10 and 11.

    python -m benchmarks.search.convergence [--seeds 15] [--workloads HPLD,...] [--time-limit S]
        [--csv FILE] [--plot FILE]

Covers setting 1, both models and the four offline workloads. Prints for each strategy: the best requests/s
after a number of evaluations and of seconds (mean over seeds), the final requests/s (mean, least, most, and
the ratio to hexgen2), and when a run came within 1 % of its own final value (median). Deterministic
strategies give the same result in every run; an error counts as 0 requests/s. An evaluation is one max-flow
computation: hexgen2 rejects many candidates by looking at their replicas alone, and those do not count. The
CSV has one row per improvement; --plot needs matplotlib.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.search.csv_file import write_csv
from cost_model.calibrated import Calibrated
from cost_model.errors import InfeasibleError
from hexgen2.search.problem import Problem, make_problem
from hexgen2.strategies.base import SearchOptions, SearchProgress
from hexgen2.strategies.registry import find_strategy

CLUSTER = "hexgen2-setting-1"
MODELS = ("llama-2-70b", "opt-30b")
WORKLOADS = ("HPLD", "HPHD", "LPHD", "LPLD")
STRATEGIES = ("hexgen2", "hexgen2-paper", "random-swap", "genetic")
AT_EVALUATIONS = (30, 100, 300, 1000)
AT_SECONDS = (0.03, 0.1, 0.3, 1.0)
CLOSE = 0.99


@dataclass(frozen=True)
class Point:
    """One improvement in a run; the last point marks the end of the run."""

    model: str
    workload: str
    strategy: str
    seed: int
    evaluations: int
    seconds: float
    req_s: float


Run = list[Point]


def measure(model: str, workload: str, strategy: str, seed: int, time_limit_s: float | None) -> Run:
    """Run one search and record the time of every improvement. Memoised plans are not shared between runs."""
    problem: Problem = make_problem(CLUSTER, model, workload, cost_model=Calibrated.name)
    points: Run = []

    def add(evaluations: int, seconds: float, req_s: float) -> None:
        points.append(Point(model, workload, strategy, seed, evaluations, round(seconds, 4), float(req_s)))

    def improved(search: SearchProgress) -> None:
        add(search.evaluations, time.perf_counter() - started, search.best_req_s)

    options = SearchOptions(seed=seed, time_limit_s=time_limit_s, progress=improved)
    started = time.perf_counter()
    try:
        record = find_strategy(strategy)(problem, options).search
        add(record.evaluations, record.seconds, record.trace[-1]["req_s"])
    except InfeasibleError:
        add(0, time.perf_counter() - started, 0.0)
    return points


def best_at(run: Run, axis: str, limit: float) -> float:
    """The best requests/s that a run reached by `limit` on an axis (evaluations or seconds)."""
    return max((p.req_s for p in run if getattr(p, axis) <= limit), default=0.0)


def close_at(run: Run, axis: str) -> float:
    """When a run came within CLOSE of its own final value."""
    return min(getattr(p, axis) for p in run if p.req_s >= run[-1].req_s * CLOSE)


def mean_end(runs: list[Run]) -> float:
    return statistics.mean(run[-1].req_s for run in runs)


def summary(runs: list[Run], ratio: float) -> list[str]:
    """The figures of one strategy in one cell."""
    ends = [run[-1].req_s for run in runs]
    curves = [
        statistics.mean(best_at(run, axis, limit) for run in runs)
        for axis, limits in (("evaluations", AT_EVALUATIONS), ("seconds", AT_SECONDS))
        for limit in limits
    ]
    return [
        *(f"{value:.2f}" for value in (*curves, mean_end(runs), min(ends), max(ends), ratio)),
        f"{statistics.median(close_at(run, 'evaluations') for run in runs):.0f}",
        f"{statistics.median(close_at(run, 'seconds') for run in runs):.2f}",
        f"{statistics.median(run[-1].seconds for run in runs):.2f}",
    ]


def plot(cells: dict[tuple[str, str], dict[str, list[Run]]], workloads: list[str], path: Path) -> None:
    """One panel per cell: requests/s over seconds, as the mean over seeds and their range."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(MODELS), len(workloads), figsize=(18, 8), squeeze=False)
    for axis, ((model, workload), by_strategy) in zip(axes.flat, cells.items(), strict=True):
        for strategy, runs in by_strategy.items():
            begun = max(run[0].seconds for run in runs)
            times = sorted({p.seconds for run in runs for p in run if p.seconds >= begun})
            values = [[best_at(run, "seconds", t) for run in runs] for t in times]
            lines = axis.step(times, [statistics.mean(v) for v in values], where="post", label=strategy)
            low, high = [min(v) for v in values], [max(v) for v in values]
            axis.fill_between(times, low, high, step="post", alpha=0.2, color=lines[0].get_color())
        axis.set(title=f"{model} {workload}", xscale="log", xlabel="seconds", ylabel="requests/s")
    axes.flat[0].legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Measure every cell, print the table and write the requested files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=15)
    parser.add_argument("--time-limit", type=float)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    workloads = arguments.workloads.split(",")
    cells: dict[tuple[str, str], dict[str, list[Run]]] = {}
    ratios: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    at = [f"{n} ev" for n in AT_EVALUATIONS] + [f"{s} s" for s in AT_SECONDS]
    print(
        "model",
        "workload",
        "strategy",
        *at,
        "end",
        "least",
        "most",
        "ratio",
        "close ev",
        "close s",
        "s",
        sep="\t",
    )
    for model, workload in itertools.product(MODELS, workloads):
        cell = cells[model, workload] = {
            strategy: [
                measure(model, workload, strategy, seed, arguments.time_limit)
                for seed in range(arguments.seeds)
            ]
            for strategy in STRATEGIES
        }
        reference = mean_end(cell["hexgen2"])
        for strategy, runs in cell.items():
            ratio = mean_end(runs) / reference if reference else float("nan")
            ratios[strategy].append(ratio)
            print(model, workload, strategy, *summary(runs, ratio), sep="\t", flush=True)
    for strategy, found in ratios.items():
        print(f"{strategy}: {statistics.mean(found):.3f} of hexgen2 on average, {min(found):.3f} at worst")
    if arguments.csv:
        points = [asdict(p) for cell in cells.values() for runs in cell.values() for run in runs for p in run]
        write_csv(arguments.csv, points)
    if arguments.plot:
        plot(cells, workloads, arguments.plot)


if __name__ == "__main__":
    main()
