"""Promised goodput against simulated goodput, with requests that the search has not seen.

    python -m benchmarks.search.promises [--clusters N] [--fixed N] [--seed S] [--requests N] [--draws N]

Each row is `hexgen2 search --objective goodput` as a user runs it, then the percentage of requests in time of
`hexgen2 simulate` at the promised rate and at 1.15 times that rate, for several seeds. The first rows are six
fixed cases, the others are drawn at random by --seed: nodes, GPU types, links, model, workload and targets.

Near saturation the share of a single run is a matter of luck, even though its arrivals have exactly the rate
asked for: "sd" is the standard deviation over the runs. "long" is the share of one run long enough for queues
to show whether they end: 40 times the target for the first token and 20 times the requests that are decoded
at a time, but ten times --requests at least.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import hexgen2
from cluster_specs.schema import ClusterSpec

BEYOND = 1.15
TARGETS_LONG, TURNS_LONG, MOST = 40, 20, 100_000
"""A long run takes so many times the target for the first token, and has so many times the requests that are
decoded at a time; but at most so many requests."""
GPUS = ("H100", "A100-80GB", "A100-40GB", "L40S", "L40", "A6000", "L4", "H200", "A10G")
MODELS = ("llama-2-13b", "llama-3-8b", "opt-30b", "llama-30b", "qwen3-32b", "llama-2-70b", "llama-3-70b")
WORKLOADS = ("HPLD", "HPHD", "LPHD", "LPLD", "online")
FIXED = (
    ("hexgen2-setting-1", "llama-2-70b", "HPLD", 2000, 100),
    ("hexgen2-setting-1", "llama-2-70b", "LPHD", 1000, 80),
    ("hexgen2-setting-3", "opt-30b", "HPHD", 1500, 100),
    ("hexgen2-homogeneous", "llama-2-70b", "online", 800, 50),
    ("hexgen2-setting-5", "llama-2-70b", "HPHD", 3000, 120),
    ("hexgen2-setting-2", "llama-3-70b", "online", 2000, 100),
)


class Case(NamedTuple):
    """What is searched for."""

    cluster: str | ClusterSpec
    model: str
    workload: str
    ttft_ms: float
    tpot_ms: float

    @property
    def name(self) -> str:
        """The case in a few words."""
        cluster = self.cluster if isinstance(self.cluster, str) else self.cluster.name
        return f"{cluster}, {self.model}, {self.workload}, {self.ttft_ms:g}/{self.tpot_ms:g}"


def main() -> None:
    """Print a row for each case, and the worst."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--clusters", type=int, default=10, help="clusters drawn at random")
    parser.add_argument("--fixed", type=int, default=len(FIXED), help="fixed cases to begin with")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--draws", type=int, default=2, help="runs at each rate")
    parser.add_argument("--cost-model", default=None)
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.requests} requests per run, {options.draws} runs")
    print(
        f"{'cluster, model, workload, TTFT/TPOT ms':58}{'search s':>9}{'promised':>9}{'95 %':>17}  "
        f"{'two runs':>12}{'mean':>7}{'sd':>6}{'long':>7}{'1.15x':>7}{'long':>6}"
    )
    rng = random.Random(options.seed)
    cases = (*(Case(*fixed) for fixed in FIXED[: options.fixed]), *drawn(rng, options.clusters))
    found = [kept for case in cases if (kept := row(case, options, rng)) is not None]
    if not found:
        return
    names = ("mean", "long", f"long at {BEYOND}x")
    each = zip(names, zip(*found, strict=True), strict=True)
    spans = (f"{name} {min(values):.1f} to {max(values):.1f}" for name, values in each)
    print(f"all: {'; '.join(spans)}")


def drawn(rng: random.Random, count: int) -> Iterator[Case]:
    """Cases at random, with targets at a random multiple of what the cluster can do at best."""
    for k in range(count):
        cluster, model = random_cluster(rng, k), rng.choice(MODELS)
        ttft_ms = rng.choice((300, 500, 800, 1200, 2000, 4000))
        yield Case(cluster, model, rng.choice(WORKLOADS), ttft_ms, rng.choice((30, 50, 80, 120, 200)))


def random_cluster(rng: random.Random, number: int) -> ClusterSpec:
    """Two to six nodes of two to eight GPUs of one type each, behind links of one to a hundred Gbit/s."""
    count = rng.randint(2, 6)
    nodes: list[dict[str, Any]] = []
    for k in range(count):
        gpu = rng.choice(GPUS)
        fast = gpu[0] in "HA" and gpu not in ("A6000", "A10G") and rng.random() < 0.7
        interconnect = "nvlink" if fast else "pcie4"
        nodes.append(
            {
                "name": f"n{k}",
                "accelerators": f"{gpu}:{rng.choice((2, 4, 4, 8))}",
                "interconnect": interconnect,
            }
        )
    slow, quick = sorted(rng.choice((1, 5, 10, 25, 50, 100)) for _ in range(2))
    links = [
        {"from": f"n{a}", "to": f"n{b}", "bandwidth_gbit_s": quick, "latency_us": 50}
        for a in range(count)
        for b in range(a)
        if rng.random() < 0.5
    ]
    network = {"default": {"bandwidth_gbit_s": slow, "latency_us": 200}, "links": links}
    return ClusterSpec.model_validate({"name": f"random-{number}", "nodes": nodes, "network": network})


def row(case: Case, options: argparse.Namespace, rng: random.Random) -> tuple[float, float, float] | None:
    """Print a row; the percentages in time at the promised rate, over the runs and in a long one, and at
    BEYOND times that rate in a long one."""
    began = time.process_time()
    try:
        placement = hexgen2.search(
            **case._asdict(), objective="goodput", cost_model=options.cost_model, seed=options.seed
        )
    except hexgen2.InfeasibleError as error:
        print(f"{case.name:58} {str(error)[:90]}", flush=True)
        return None
    took_s = time.process_time() - began
    goodput = placement.goodput
    assert goodput is not None and goodput.interval_req_s is not None
    rate = goodput.goodput_req_s
    if not rate:
        print(f"{case.name:58}{took_s:>9.1f}  nothing is in time in the simulator", flush=True)
        return None
    seeds = [rng.randrange(10**6) for _ in range(options.draws)]
    kept, beyond = (
        [share(placement, rate * times, options.requests, seed) for seed in seeds] for times in (1, BEYOND)
    )
    enough = max(
        10 * options.requests, round(TARGETS_LONG * rate * case.ttft_ms / 1e3), TURNS_LONG * placement.places
    )
    long, longer = (share(placement, rate * times, min(enough, MOST), seeds[0]) for times in (1, BEYOND))
    mean = math.fsum(kept) / len(kept)
    spread = math.sqrt(math.fsum((s - mean) ** 2 for s in kept) / max(1, len(kept) - 1))
    low, high = goodput.interval_req_s
    print(
        f"{case.name:58}{took_s:>9.1f}{rate:>9.4g}{f'{low:.4g} to {high:.4g}':>17}  "
        f"{' '.join(f'{s:.1f}' for s in kept[:2]):>12}{mean:>7.1f}{spread:>6.1f}{long:>7.1f}"
        f"{math.fsum(beyond) / len(beyond):>7.1f}{longer:>6.1f}",
        flush=True,
    )
    return mean, long, longer


def share(placement: hexgen2.Placement, rate: float, requests: int, seed: int) -> float:
    """Percent of requests in time."""
    found = hexgen2.simulate(placement, request_rate=rate, num_requests=requests, seed=seed)
    assert found.attainment is not None
    return 100 * found.attainment


if __name__ == "__main__":
    main()
