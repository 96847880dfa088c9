"""The default search against every other strategy, and against its own pure phases: planned and simulated.

    python -m benchmarks.search.flexible [--fixed N] [--clusters N] [--seed S] [--requests N] [--few]

Each row is a cluster, model and workload: requests/s planned and simulated (at full load, in the steady
state) of the default search, with its seconds and its replicas (p, d, c, m for prefill, decode, colocated,
mixed); then the most that any other one plans, and the most that any other one serves in the simulator, with
its name; and the default's share of either. The others are hexgen2 with --phases disaggregated and colocated,
and unless --few is given, all other strategies. First the paper's clusters, as many cells as asked for in
random order, then clusters drawn at random by --seed.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import hexgen2
from benchmarks.search.promises import MODELS, WORKLOADS, random_cluster
from cluster_specs.schema import ClusterSpec
from hexgen2.cluster import Cluster
from hexgen2.placement import Placement
from hexgen2.promise.trial import Trials
from hexgen2.simulator.run import FEWEST, TURNS
from hexgen2.strategies.registry import CHOOSE_PHASES, STRATEGIES

PURE = ("disaggregated", "colocated")
OTHERS = tuple(name for name in STRATEGIES if name not in CHOOSE_PHASES)
CLUSTERS = ("homogeneous", "setting-1", "setting-2", "setting-3", "setting-4", "setting-5")
CELLS = tuple(itertools.product(CLUSTERS, ("llama-2-70b", "opt-30b", "llama-3-8b"), WORKLOADS))
OFFLINE = 1000
"""Requests of an offline run."""
BEYOND = 1.2
"""So many times the planned requests/s arrive."""


@dataclass(frozen=True)
class Shown:
    """What a search found: requests/s planned and simulated."""

    name: str
    planned: float
    simulated: float
    replicas: str
    took_s: float


def main() -> None:
    """Print a row for each case, and the least and the mean of its shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--fixed", type=int, default=len(CELLS), help="cells of the paper's clusters")
    parser.add_argument("--clusters", type=int, default=30, help="clusters drawn at random")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--requests", type=int, default=60_000, help="of a simulation, at most")
    parser.add_argument("--few", action="store_true", help="leave out all other strategies")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    print(f"seed {options.seed}")
    print(
        f"{'cluster, model, workload':40}{'default':>16}{'s':>6} {'replicas':20}"
        f"{'best other planned':>26}{'best other simulated':>26}{'shares':>14}"
    )
    shares = [row(*case, options) for case in cases(rng, options.fixed, options.clusters)]
    for k, kind in enumerate(("planned", "simulated")):
        of = [share[k] for share in shares]
        print(f"{kind}: least {min(of, default=1.0):.3f}, mean {sum(of) / max(1, len(of)):.3f}")


def cases(rng: random.Random, fixed: int, drawn: int) -> Iterator[tuple[str | ClusterSpec, str, str]]:
    """Cluster, model and workload of each case."""
    cells = [(f"hexgen2-{cluster}", model, workload) for cluster, model, workload in CELLS]
    rng.shuffle(cells)
    yield from cells[:fixed]
    for k in range(drawn):
        yield random_cluster(rng, k), rng.choice(MODELS), rng.choice(WORKLOADS)


def row(
    cluster: str | ClusterSpec, model: str, workload: str, options: argparse.Namespace
) -> tuple[float, float]:
    """Print a row; the default's share of the best other one's requests/s, planned and simulated."""

    def found(name: str, **asked: Any) -> Shown | None:
        began = time.process_time()
        try:
            placement = hexgen2.search(
                cluster=cluster, model=model, workload=workload, seed=options.seed, **asked
            )
        except hexgen2.InfeasibleError:
            return None
        took_s = time.process_time() - began
        replicas = "".join(sorted(replica.role[0] for replica in placement.replicas))
        return Shown(name, placement.throughput.req_s, simulated(placement, options), replicas, took_s)

    default = found("default")
    every = [found(phases, phases=phases) for phases in PURE]
    every += [] if options.few else [found(strategy, strategy=strategy) for strategy in OTHERS]
    others = [each for each in every if each]
    name = cluster if isinstance(cluster, str) else cluster.name
    case = f"{name.removeprefix('hexgen2-')}, {model}, {workload}"
    if default is None or not others:
        print(f"{case:40}no placement", flush=True)
        share = 0.0 if others else 1.0
        return share, share
    planned, served = (max(others, key=attrgetter(key)) for key in ("planned", "simulated"))
    shares = default.planned / planned.planned, default.simulated / served.simulated
    print(
        f"{case:40}{default.planned:8.4g}{default.simulated:8.4g}{default.took_s:6.1f} {default.replicas:20}"
        f"{planned.planned:9.4g} {planned.name:16}{served.simulated:9.4g} {served.name:16}"
        f"{shares[0]:7.3f}{shares[1]:7.3f}",
        flush=True,
    )
    return shares


def simulated(placement: Placement, options: argparse.Namespace) -> float:
    """Requests/s of the simulator's steady state at full load; of a whole offline run through ranges of
    layers."""
    if placement.layer_ranges is not None:
        found = hexgen2.simulate(placement, offline=True, num_requests=OFFLINE, seed=options.seed)
        return found.request_throughput
    cluster = Cluster.from_spec(placement.cluster)
    trials = Trials(placement, cluster, placement.goal, options.seed)
    count = min(options.requests, max(FEWEST, TURNS * placement.places))
    return trials.served_req_s(BEYOND * placement.throughput.req_s, count, 0)


if __name__ == "__main__":
    main()
