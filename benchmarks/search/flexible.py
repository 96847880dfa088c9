"""A flexible search against all replicas doing one phase, or both: planned, and simulated at full load.

    python -m benchmarks.search.flexible [--fixed N] [--clusters N] [--seed S] [--requests N]

Each row is a cluster, model and workload: requests/s planned and simulated for each of --phases, the seconds
of the flexible search, its replicas (p, d, c, m for prefill, decode, colocated, mixed), and the simulated
requests/s of the flexible placement over the best of the pure ones. First the paper's clusters, as many cells
as asked for in random order, then clusters drawn at random by --seed.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Iterator

import hexgen2
from benchmarks.search.promises import MODELS, WORKLOADS, random_cluster
from cluster_specs.schema import ClusterSpec
from hexgen2.cluster import Cluster
from hexgen2.placement import Placement
from hexgen2.promise.trial import Trials
from hexgen2.search.problem import Phases
from hexgen2.simulator.run import FEWEST, TURNS

PURE: tuple[Phases, ...] = ("disaggregated", "colocated")
CLUSTERS = ("homogeneous", "setting-1", "setting-2", "setting-3", "setting-4", "setting-5")
CELLS = tuple(itertools.product(CLUSTERS, ("llama-2-70b", "opt-30b", "llama-3-8b"), WORKLOADS))
BEYOND = 1.2
"""So many times the planned requests/s arrive."""


def main() -> None:
    """Print a row for each case, and the least of the last column."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--fixed", type=int, default=len(CELLS), help="cells of the paper's clusters")
    parser.add_argument("--clusters", type=int, default=10, help="clusters drawn at random")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--requests", type=int, default=60_000, help="of a simulation, at most")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    print(f"seed {options.seed}")
    print(
        f"{'cluster, model, workload':44}{'disaggregated':>16}{'colocated':>16}{'flexible':>16}{'s':>6}"
        f"  {'replicas':24}{'to best pure':>12}"
    )
    ratios = [row(*case, options) for case in cases(rng, options.fixed, options.clusters)]
    least, mean = min(ratios, default=1.0), sum(ratios) / max(1, len(ratios))
    print(f"least {least:.3f}, mean {mean:.3f}")


def cases(rng: random.Random, fixed: int, drawn: int) -> Iterator[tuple[str | ClusterSpec, str, str]]:
    """Cluster, model and workload of each case."""
    cells = [(f"hexgen2-{cluster}", model, workload) for cluster, model, workload in CELLS]
    rng.shuffle(cells)
    yield from cells[:fixed]
    for k in range(drawn):
        yield random_cluster(rng, k), rng.choice(MODELS), rng.choice(WORKLOADS)


def row(cluster: str | ClusterSpec, model: str, workload: str, options: argparse.Namespace) -> float:
    """Print a row; what the flexible placement serves over the best of the pure ones."""
    name = cluster if isinstance(cluster, str) else cluster.name
    texts, served, replicas, took_s = [], {}, "", 0.0
    for phases in (*PURE, "flexible"):
        began = time.process_time()
        try:
            placement = hexgen2.search(
                cluster=cluster, model=model, workload=workload, phases=phases, seed=options.seed
            )
        except hexgen2.InfeasibleError:
            texts.append(f"{'-':>16}")
            continue
        took_s = time.process_time() - began
        served[phases] = simulated(placement, options)
        texts.append(f"{placement.throughput.req_s:8.4g}{served[phases]:8.4g}")
        replicas = "".join(sorted(replica.role[0] for replica in placement.replicas))
    best = max((served.get(phases, 0.0) for phases in PURE), default=0.0)
    ratio = served.get("flexible", 0.0) / best if best else 1.0
    case = f"{name}, {model}, {workload}"
    print(f"{case:44}{''.join(texts)}{took_s:6.1f}  {replicas:24}{ratio:12.3f}", flush=True)
    return ratio


def simulated(placement: Placement, options: argparse.Namespace) -> float:
    """Requests/s of the simulator's steady state at full load."""
    cluster = Cluster.from_spec(placement.cluster)
    trials = Trials(placement, cluster, placement.goal, options.seed)
    count = min(options.requests, max(FEWEST, TURNS * placement.places))
    return trials.served_req_s(BEYOND * placement.throughput.req_s, count, 0)


if __name__ == "__main__":
    main()
