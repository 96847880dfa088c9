"""Planned throughput against what the simulator reaches in steady state, for each strategy.

    python -m benchmarks.search.planned_throughput [--clusters N] [--seed S] [--requests N] [--strategies A,B]

Each row is `hexgen2 search` for the largest throughput, then the requests/s of `hexgen2 simulate` with 1.15
times as many arrivals, between the first and the last tenth of the run. A run has 10 requests for each that
the placement decodes at a time, or --requests if that is more: equal requests that begin together end
together, and shorter runs show whether they end in a whole or half a turn. "ranged" is the same with lengths
between 80 and 120 % of those of the class. The first rows are settings of the HexGen-2 paper, the others are
drawn at random by --seed: nodes, GPU types, links, model and workload.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator

import hexgen2
from benchmarks.search.promises import MODELS, WORKLOADS, random_cluster
from cluster_specs.schema import ClusterSpec
from cost_model.errors import InputError
from hexgen2.simulator.run import TURNS
from hexgen2.workload.lengths import Workload

BEYOND = 1.15
SHORTEST, LONGEST = 0.8, 1.2
"""Of the lengths of a class, the range of those that vary."""
STRATEGIES = ("hexgen2", "distserve", "vllm", "hexgen")
Case = tuple[str | ClusterSpec, str, str]
FIXED: tuple[Case, ...] = (
    ("hexgen2-setting-1", "llama-2-70b", "HPHD"),
    ("hexgen2-setting-2", "llama-2-70b", "LPLD"),
    ("hexgen2-setting-3", "opt-30b", "HPLD"),
    ("hexgen2-setting-4", "opt-30b", "LPHD"),
    ("hexgen2-homogeneous", "llama-2-70b", "HPHD"),
)


def main() -> None:
    """Print a row for each case and strategy, and the worst."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--clusters", type=int, default=5, help="clusters drawn at random")
    parser.add_argument("--fixed", type=int, default=len(FIXED), help="fixed cases to begin with")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--requests", type=int, default=8000, help="of a run, at least")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--cost-model", default=None)
    parser.add_argument("--time-limit", type=float, default=8.0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    print(f"seed {options.seed}")
    print(
        f"{'cluster, model, workload':46}{'strategy':>16}{'planned':>9}{'simulated':>10}{'ratio':>8}"
        f"{'ranged':>8}{'requests':>9}",
        flush=True,
    )
    ratios = [
        ratio
        for case in itertools.chain[Case](FIXED[: options.fixed], drawn(rng, options.clusters))
        for strategy in options.strategies.split(",")
        if (ratio := row(*case, strategy, options, rng.randrange(10**6))) is not None
    ]
    if ratios:
        far = max(ratios, key=lambda ratio: abs(ratio - 1))
        near = sum(abs(ratio - 1) <= 0.03 for ratio in ratios)
        print(f"worst: {far:.3f}; within 3 %: {near} of {len(ratios)}")


def drawn(rng: random.Random, count: int) -> Iterator[Case]:
    """Cases at random."""
    for k in range(count):
        yield random_cluster(rng, k), rng.choice(MODELS), rng.choice(WORKLOADS)


def row(
    cluster: str | ClusterSpec,
    model: str,
    workload: str,
    strategy: str,
    options: argparse.Namespace,
    seed: int,
) -> float | None:
    """Print a row; simulated over planned requests/s, or None where the strategy finds no placement."""
    name = cluster if isinstance(cluster, str) else cluster.name
    text = f"{f'{name}, {model}, {workload}':46}{strategy:>16}"
    try:
        placement = hexgen2.search(
            cluster=cluster,
            model=model,
            workload=workload,
            strategy=strategy,
            cost_model=options.cost_model,
            seed=options.seed,
            time_limit_s=options.time_limit,
        )
    except (hexgen2.InfeasibleError, InputError) as error:
        print(f"{text}  {str(error)[:70]}", flush=True)
        return None
    planned = placement.throughput.req_s
    requests = max(options.requests, TURNS * placement.places)
    simulated, ranged = (
        hexgen2.simulate(
            placement,
            workload=workload,
            length_range=length_range,
            request_rate=planned * BEYOND,
            num_requests=requests,
            seed=seed,
        ).steady_request_throughput
        for workload, length_range in (
            (placement.workload, 1.0),
            (longest(placement.workload), SHORTEST / LONGEST),
        )
    )
    roles = "".join(r.role[0] for r in placement.replicas)
    limits = "; ".join(placement.bottlenecks)[:60]
    ratios = f"{simulated / planned:>8.3f}{ranged / planned:>8.3f}"
    print(f"{text}{planned:>9.4g}{simulated:>10.4g}{ratios}{requests:>9}  {roles:12} {limits}", flush=True)
    return simulated / planned


def longest(workload: Workload) -> Workload:
    """The workload whose classes have the longest requests of the range."""
    classes = tuple(
        each.model_copy(update={"isl": each.isl * LONGEST, "osl": each.osl * LONGEST})
        for each in workload.classes
    )
    return workload.model_copy(update={"classes": classes})


if __name__ == "__main__":
    main()
