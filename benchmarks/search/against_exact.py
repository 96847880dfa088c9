"""Compare `hexgen2` with exhaustive search on random clusters of up to 8 GPUs.

    python -m benchmarks.search.against_exact [--clusters 200] [--seed S] [--gpus 8] [--phases flexible]

The GPU types, nodes and links are random; models and workloads are both models and the four offline workloads
of the HexGen-2 paper. Prints every cluster where the search falls short of the optimum, then the distribution
of the ratio, whether each of the three bounds (rates, linear program, integer program) held, and the mean
seconds of both searches.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

from cluster_specs.loader import parse_cluster
from cost_model.errors import InfeasibleError
from cost_model.models import find_model
from cost_model.registry import make_cost_model
from hexgen2.cluster import Cluster
from hexgen2.placement import Placement
from hexgen2.search.bounds.upper_bounds import rates_bound
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.problem import ROLES, Phases, Problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy
from hexgen2.workload.classes import load_workload

TYPES = ("H100", "A100-80GB", "L40", "A6000", "L4")
BANDWIDTHS_GBIT_S = (1, 5, 10, 25, 100, 400)
MODELS = ("llama-2-70b", "opt-30b")
WORKLOADS = ("HPLD", "HPHD", "LPHD", "LPLD")


def draw_problem(random_source: random.Random, most: int, phases: Phases) -> Problem:
    """A random problem with three to `most` GPUs in at most four nodes."""
    draw = random_source
    left = draw.randint(3, most)
    nodes: list[dict] = []
    while left and len(nodes) < 4:
        count = draw.randint(1, min(4, left))
        left -= count
        nodes.append(
            {
                "name": f"n{len(nodes)}",
                "accelerators": f"{draw.choice(TYPES)}:{count}",
                "interconnect": draw.choice(["nvlink", "pcie4", "pcie3"]),
            }
        )
    links = [
        {"from": a["name"], "to": b["name"], "bandwidth_gbit_s": draw.choice(BANDWIDTHS_GBIT_S)}
        for i, a in enumerate(nodes)
        for b in nodes[i + 1 :]
        if draw.random() < 0.5
    ]
    default = {"bandwidth_gbit_s": draw.choice(BANDWIDTHS_GBIT_S)}
    network = {"default": default, "links": links}
    spec = parse_cluster({"name": "random", "nodes": nodes, "network": network}, "random", Path())
    model, workload = find_model(draw.choice(MODELS)), load_workload(draw.choice(WORKLOADS))
    costs = make_cost_model("calibrated", model, workload.lengths)
    return Problem(spec, Cluster.from_spec(spec), model, workload, costs, phases=phases)


def timed(strategy: str, problem: Problem, time_limit_s: float | None = None) -> tuple[Placement, float]:
    """A placement and the seconds that it took to find."""
    started = time.perf_counter()
    placement = find_strategy(strategy)(problem, SearchOptions(time_limit_s=time_limit_s, simulated=False))
    return placement, time.perf_counter() - started


def broken_bounds(problem: Problem, best: float) -> list[str]:
    """The methods whose upper bound is below a throughput that was reached."""
    relaxed = Evaluator(problem).relaxed
    limits = [rates_bound(problem), relaxed.upper_bound(), relaxed.whole()[1]]
    return [limit.method for limit in limits if best > limit.req_s * (1 + 1e-6)]


def main() -> None:
    """Draw problems, solve each one both ways and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--clusters", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--gpus", type=int, default=8, help="of a cluster, at most")
    parser.add_argument("--phases", choices=ROLES, default="flexible")
    parser.add_argument(
        "--exact-limit",
        type=float,
        default=60.0,
        help="time limit of the exact search in s; slower cases are skipped",
    )
    arguments = parser.parse_args()
    source = random.Random(arguments.seed)
    ratios: list[float] = []
    seconds: list[tuple[float, float]] = []
    unsettled, broken = 0, []
    while len(ratios) < arguments.clusters:
        problem = draw_problem(source, arguments.gpus, arguments.phases)
        try:
            best, exact_s = timed("exact", problem, arguments.exact_limit)
        except InfeasibleError:
            continue
        found, search_s = timed("hexgen2", problem)
        if best.search.cut:
            unsettled += 1
            continue
        ratio = found.throughput.req_s / best.throughput.req_s
        broken += broken_bounds(problem, best.throughput.req_s)
        ratios.append(ratio)
        seconds.append((search_s, exact_s))
        if ratio < 0.9999:
            cards = " ".join(node.accelerators for node in problem.spec.nodes)
            print(f"{ratio:.4f}  {cards}  {problem.model.name}  {problem.workload.name}", flush=True)
    equal = sum(ratio >= 0.9999 for ratio in ratios) / len(ratios)
    print(
        f"{len(ratios)} clusters: {equal:.1%} equal, mean ratio {statistics.mean(ratios):.4f}, "
        f"worst {min(ratios):.4f}; bounds broken: {', '.join(broken) or 'none'}; "
        f"{unsettled} more were not solved within {arguments.exact_limit:g} s"
    )
    search_mean, exact_mean = (statistics.mean(column) for column in zip(*seconds, strict=True))
    print(f"mean seconds: hexgen2 {search_mean:.3f}, exact {exact_mean:.3f}")


if __name__ == "__main__":
    main()
