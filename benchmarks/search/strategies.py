"""Compare strategies on the paper's settings: predicted requests/s, and TPOT at that load.

    python -m benchmarks.search.strategies [--settings NAME ...] [--strategies NAME ...]

Covers both models of HexGen-2 and its four offline workloads. Each cell is requests/s and, in brackets, TPOT
in ms at full load without queueing; a dash means that the strategy finds no placement. For colocated replicas
(hexgen, vllm) the prediction ignores interference between prefill and decode, so their throughput is
overestimated; TPOT shows what disaggregation gains.
"""

from __future__ import annotations

import argparse

from cost_model.errors import InfeasibleError
from hexgen2.search.problem import Problem, make_problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import STRATEGIES, find_strategy

MODELS = ("llama-2-70b", "opt-30b")
WORKLOADS = ("HPLD", "HPHD", "LPHD", "LPLD")
SETTINGS = ("hexgen2-setting-1", "hexgen2-homogeneous")
COMPARED = ("hexgen2", "hexgen", "vllm", "distserve", "splitwise")


def cell(strategy: str, problem: Problem) -> str:
    """For example "12.18 (82)"."""
    try:
        placement = find_strategy(strategy)(problem, SearchOptions())
    except InfeasibleError:
        return "-"
    return f"{placement.throughput.req_s:.2f} ({placement.latency.tpot_ms:.0f})"


def main() -> None:
    """Run every cell and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=SETTINGS)
    parser.add_argument("--strategies", nargs="+", default=COMPARED, choices=STRATEGIES)
    arguments = parser.parse_args()
    print("setting", "model", "workload", *arguments.strategies, sep="\t")
    for setting in arguments.settings:
        for model in MODELS:
            for workload in WORKLOADS:
                problem = make_problem(setting, model, workload)
                cells = [cell(strategy, problem) for strategy in arguments.strategies]
                print(setting, model, workload, *cells, sep="\t", flush=True)


if __name__ == "__main__":
    main()
