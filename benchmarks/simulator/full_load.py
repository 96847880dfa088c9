"""How closely short runs at full load show what a fleet serves in the long run.

    python -m benchmarks.simulator.full_load [--count N] [--seed S]

The fleets are answers of the search, by formulas, for clusters, models and workloads drawn at random. Prints
for each how many requests it decodes at a time, and what a run as the search makes it
(hexgen2/promise/full_load.py) shows, as a share of what LONG turns with other requests serve; in the end the
standard deviation and the worst.
"""

from __future__ import annotations

import argparse
import itertools
import random
import secrets
import statistics

import numpy as np

from benchmarks.search.ordinary import drawn
from cluster_specs.schema import ClusterSpec
from cost_model.errors import InfeasibleError
from hexgen2.cluster import Cluster
from hexgen2.placement import Placement
from hexgen2.promise.full_load import BEYOND, FEWEST, MOST, TURNS
from hexgen2.promise.trial import Trials
from hexgen2.search.problem import Phases, make_problem
from hexgen2.simulator.records import Records
from hexgen2.simulator.simulation import Simulation
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.hexgen2 import search
from hexgen2.workload.arrivals import LengthSource, online

LONG, FILLED, LEFT = 26, 5, 23
"""Turns of a long run; what ends between the others counts."""
FAMILIES, SIZES = ("racks", "boxes", "mostly", "patchy", "zoo"), (12, 16, 20, 24)
MODELS = ("llama-2-70b", "opt-30b", "llama-3-8b")
WORKLOADS = ("HPLD", "HPHD", "LPHD", "LPLD", "online", "HPLD:2,LPHD:1")
PHASES: tuple[Phases, ...] = ("flexible", "flexible", "colocated")


def fleet(rng: random.Random) -> tuple[str, Placement]:
    """What was asked for, and the answer."""
    family, size, seed = rng.choice(FAMILIES), rng.choice(SIZES), rng.randrange(10**6)
    model, workload = rng.choice(MODELS), rng.choice(WORKLOADS)
    phases = rng.choice(PHASES)
    cluster = ClusterSpec.model_validate(drawn(family, size, seed))
    found = search(
        make_problem(cluster, model, workload, phases=phases), SearchOptions(0, 4.0, simulated=False)
    )
    return f"{family}-{size}-{seed} {model} {workload} {phases}", found


def long_run_req_s(placement: Placement, cluster: Cluster, rate: float, seed: int) -> float:
    """Requests/s of a long run in its steady state."""
    requests = online(LengthSource(placement.workload), rate, LONG * placement.places, (seed,))
    records = Records(requests)
    Simulation(placement, cluster, records).run()
    end_s = np.sort(records.end_s)
    first, last = FILLED * placement.places, LEFT * placement.places
    return (last - first) / float(end_s[last] - end_s[first])


def main() -> None:
    """Compare so many fleets and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    options = parser.parse_args()
    print(f"seed {options.seed}")
    rng = random.Random(options.seed)
    shares = list[float]()
    for seed in itertools.count():
        if len(shares) >= options.count:
            break
        try:
            asked, placement = fleet(rng)
        except InfeasibleError:
            continue
        count = max(FEWEST, TURNS * placement.places)
        if count > MOST:
            continue
        cluster, rate = Cluster.from_spec(placement.cluster), BEYOND * placement.throughput.req_s
        shown = Trials(placement, cluster, placement.goal, seed).served_req_s(rate, count, 0, TURNS)
        shares.append(shown / long_run_req_s(placement, cluster, rate, seed))
        print(f"{asked:60} {placement.places:6} {shares[-1]:.3f}", flush=True)
    worst = max(shares, key=lambda share: abs(share - 1))
    print(f"mean {statistics.mean(shares):.4f}, deviation {statistics.pstdev(shares):.4f}, worst {worst:.3f}")


if __name__ == "__main__":
    main()
