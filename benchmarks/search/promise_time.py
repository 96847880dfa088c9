"""How much longer a search takes because its promise rests on simulations.

    python -m benchmarks.search.promise_time [--cases N] [--runs N] [--seed S]

Each row is one search for the best goodput, by formulas alone and with simulations, in turns: medians of CPU
seconds of all its processes, and the difference. Workload and targets are drawn at random by --seed, for a
cluster of 20 GPUs and one of 320.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
from pathlib import Path

from benchmarks.search.scale import synthetic
from cluster_specs.loader import load_cluster, parse_cluster
from hexgen2.cli import NEW_OBJECTS
from hexgen2.goal import Goal
from hexgen2.search.problem import make_problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.hexgen2 import search

WORKLOADS = ("HPLD", "HPHD", "LPHD", "LPLD", "online")
TTFT_MS, TPOT_MS = (500, 1000, 2000, 3000), (60, 80, 100, 120)


def main() -> None:
    """Print a row for each case, and the worst of each cluster."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", type=int, default=5, help="for each cluster")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--model", default="llama-2-70b")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    gc.set_threshold(NEW_OBJECTS)  # As the command does.
    rng = random.Random(options.seed)
    print(f"seed {options.seed}, {options.model}, {options.runs} runs")
    print(f"{'cluster':22}{'workload, TTFT/TPOT ms':26}{'formulas s':>11}{'simulated s':>12}{'more s':>8}")
    clusters = (load_cluster("hexgen2-setting-1"), parse_cluster(synthetic(320), "synthetic-320", Path()))
    for cluster in clusters:
        worst = 0.0
        for _ in range(options.cases):
            workload, ttft_ms, tpot_ms = rng.choice(WORKLOADS), rng.choice(TTFT_MS), rng.choice(TPOT_MS)
            goal = Goal(objective="goodput", ttft_ms=ttft_ms, tpot_ms=tpot_ms)
            problem = make_problem(cluster, options.model, workload, goal=goal)
            taken: dict[bool, list[float]] = {False: [], True: []}
            for run in range(options.runs):
                for simulated, seconds in taken.items():
                    started = sum(os.times()[:4])
                    search(problem, SearchOptions(options.seed + run, simulated=simulated))
                    seconds.append(sum(os.times()[:4]) - started)
            without, simulated_s = (statistics.median(seconds) for seconds in taken.values())
            worst = max(worst, simulated_s - without)
            name = f"{workload}, {ttft_ms}/{tpot_ms}"
            print(
                f"{cluster.name:22}{name:26}{without:11.1f}{simulated_s:12.1f}{simulated_s - without:8.1f}",
                flush=True,
            )
        print(f"{cluster.name:22}{'at worst':26}{'':23}{worst:8.1f}", flush=True)


if __name__ == "__main__":
    main()
