"""Hetis against HexGen's and Splitwise's placements on the paper's 12 GPUs, in the simulator.

    python -m benchmarks.simulator.hetis_simulated [--models M,...] [--loads L,...] [--cluster C]
                                                   [--seeds N] [--seed S] [--requests N] [--parts PART,...]

Parts are: plan, seconds to plan the cluster and 160 GPUs of five types (the paper: 4 and 15 s). kv, blocks of
16 tokens for which replicas that decode have memory (Figure 11). serving, steady requests/s beyond capacity,
and P95 TTFT and P95 TPOT in ms at the paper's rate for Llama 70B (for other models, and where that is more
than some strategy serves, at 70 % of what the slowest serves): means over fresh seeds, and the worst seed.
error, mean TPOT with each number of the profiles off by up to a share, over that without, the worst over
fresh seeds (Figure 16b: at most 1.069), and the errors of the fitted profiles. lp, ms to dispatch 64 requests
on 8 devices, of the processor and by the clock.

Lengths are five classes around the mean lengths of ShareGPT, HumanEval and LongBench as DistServe (OSDI 2024)
states them; the paper gives none.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import numpy as np

from cluster_specs.loader import parse_cluster
from cluster_specs.schema import ClusterSpec
from cost_model.errors import InfeasibleError
from hexgen2.cluster import Cluster
from hexgen2.headwise.dispatch import Load, dispatch
from hexgen2.headwise.profile import DeviceProfile, profiled
from hexgen2.placement import Placement
from hexgen2.prediction.headwise_times import HeadwiseTimes, step_times
from hexgen2.prediction.kv_capacity import kv_capacity_tokens
from hexgen2.results import steady_rate
from hexgen2.search.problem import make_problem
from hexgen2.simulator.options import HeadOptions, Options
from hexgen2.simulator.records import Records
from hexgen2.simulator.simulation import Simulation
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy
from hexgen2.workload.arrivals import LengthSource, online
from hexgen2.workload.lengths import Workload

STRATEGIES = ("hetis", "hexgen", "splitwise")
LOADS = {"sharegpt": (755.5, 200.3), "humaneval": (171.3, 98.2), "longbench": (1738.3, 90.7)}
"""Mean prompt and output tokens."""
RATES = {"sharegpt": 1.5, "humaneval": 6.0, "longbench": 0.8}
"""Requests/s of Figure 12, for Llama 70B."""
SPREAD = (0.3, 0.6, 0.9, 1.3, 1.9)
"""Lengths of the five classes over the mean."""
BLOCK_TOKENS = 16
BEYOND, BELOW = 1.6, 0.7
ERRORS = (0.1, 0.2, 0.4)


def main() -> None:
    """Print the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default="llama-2-13b,llama-2-70b")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--cluster", default="hetis-12")
    parser.add_argument("--parts", default="plan,kv,serving,error,lp")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1500, help="of a run")
    options = parser.parse_args()
    print(f"seed {options.seed}")
    parts = options.parts.split(",")
    if "plan" in parts:
        show_plans(options)
    if "lp" in parts:
        show_dispatch(options)
    for model in options.models.split(","):
        for load in options.loads.split(","):
            if {"kv", "serving", "error"} & set(parts):
                show_cell(model, load, parts, options)


def workload_of(load: str) -> Workload:
    """The classes of a load."""
    isl, osl = LOADS[load]
    classes = [{"name": f"x{f:g}", "isl": isl * f, "osl": max(1.0, osl * f), "weight": 1.0} for f in SPREAD]
    return Workload.model_validate({"name": load, "classes": classes})


def show_plans(options: argparse.Namespace) -> None:
    """Seconds of planning alone, on the cluster and on 160 GPUs of five types."""
    types = ("H100", "A100-80GB", "L40", "A6000", "RTX3090")
    nodes = [
        {"name": f"{card.lower()}-{k}", "accelerators": f"{card}:8", "interconnect": "pcie4"}
        for card in types
        for k in range(4)
    ]
    network = {"default": {"bandwidth_gbit_s": 100, "latency_us": 20}}
    five = {"name": "five-types-160", "nodes": nodes, "network": network}
    clusters: list[str | ClusterSpec] = [options.cluster, parse_cluster(five, "five-types-160", Path())]
    for cluster in clusters:
        for model in options.models.split(","):
            problem = make_problem(cluster, model, workload_of("sharegpt"))
            began = time.perf_counter()
            found = find_strategy("hetis")(problem, SearchOptions())
            took_s = time.perf_counter() - began
            print(
                f"plan {problem.cluster.name} ({len(problem.usable)} GPUs), {model}: {took_s:.2f} s, "
                f"{len(found.replicas)} replicas, {len(found.attention_workers)} attention workers, "
                f"{found.throughput.req_s:.4g} of at most {found.bound.req_s:.4g} requests/s"
            )


def show_dispatch(options: argparse.Namespace) -> None:
    """Milliseconds of a dispatch, with plenty of memory and with little."""
    rng = np.random.default_rng(options.seed)
    took_ms, clock_ms = list[float](), list[float]()
    for draw in range(40):
        profiles = [
            DeviceProfile(*(float(rng.uniform(1, 4)) * unit for unit in (1e-9, 1e-12, 1e-6, 1e-10, 1e-6)))
            for _ in range(8)
        ]
        sizes = rng.uniform(1e5, 2e6, 64)
        tight = 1.05 if draw % 2 else 4.0
        loads = [Load(float(rng.uniform(0, 1e-5)), float(sizes.sum()) * tight, True) for _ in range(8)]
        began, by_clock = time.process_time(), time.perf_counter()
        dispatch(profiles, 8, 8, loads, sizes.tolist())
        took_ms.append((time.process_time() - began) * 1e3)
        clock_ms.append((time.perf_counter() - by_clock) * 1e3)
    for name, each in (("processor", took_ms[1:]), ("clock", clock_ms[1:])):
        median, most = float(np.median(each)), max(each)
        print(f"dispatch of 64 requests on 8 devices, {name}: median {median:.2f} ms, most {most:.2f}")


def show_cell(model: str, load: str, parts: list[str], options: argparse.Namespace) -> None:
    """One model and load: a row for each strategy that finds a placement."""
    workload, found = workload_of(load), {}
    for name in STRATEGIES:
        problem = make_problem(options.cluster, model, workload)
        try:
            found[name] = find_strategy(name)(problem, SearchOptions(simulated=False))
        except InfeasibleError as error:
            print(f"{model} {load} {name}: {error}")
    if "kv" in parts:
        blocks = {name: kv_blocks(placement) for name, placement in found.items()}
        others = [count for name, count in blocks.items() if name != "hetis"]
        ratio = f"; hetis / best other {blocks['hetis'] / max(others):.2f}" if others else ""
        text = ", ".join(f"{name} {count}" for name, count in blocks.items())
        print(f"{model} {load} KV blocks of {BLOCK_TOKENS} tokens: {text}{ratio}")
    if "serving" in parts:
        show_serving(model, load, found, options)
    if "error" in parts and found["hetis"].attention_workers:
        show_errors(model, load, found["hetis"], options)


def kv_blocks(placement: Placement) -> int:
    """Blocks for which the replicas that decode have memory."""
    cluster, costs = Cluster.from_spec(placement.cluster), placement.costs()
    tokens = (
        kv_capacity_tokens(r, cluster, costs, placement.workers_of(r.id))
        for r in placement.replicas
        if r.decodes
    )
    return sum(each // BLOCK_TOKENS for each in tokens)


def run(
    placement: Placement, rate: float, count: int, seed: int, heads: HeadOptions | None = None
) -> Records:
    """The records of a simulation of so many requests at a rate."""
    records = Records(online(LengthSource(placement.workload), rate, count, (seed,)))
    options = Options(heads=heads or HeadOptions())
    Simulation(placement, Cluster.from_spec(placement.cluster), records, options).run()
    return records


def p95_ms(records: Records) -> tuple[float, float]:
    """P95 of TTFT and of TPOT."""
    requests = records.requests
    ttft = records.first_s - records.sent_s
    several = requests.osl > 1
    tpot = (records.end_s - records.first_s)[several] / (requests.osl[several] - 1)
    return float(np.percentile(ttft, 95)) * 1e3, float(np.percentile(tpot, 95)) * 1e3


def show_serving(model: str, load: str, found: dict[str, Placement], options: argparse.Namespace) -> None:
    """Throughput beyond capacity, and P95 at a rate that all serve."""
    seeds = range(options.seed, options.seed + options.seeds)
    served = {}
    for name, placement in found.items():
        rate = BEYOND * placement.throughput.req_s
        served[name] = [steady_rate(run(placement, rate, options.requests, seed).end_s) for seed in seeds]
    slowest = min(float(np.mean(each)) for each in served.values())
    own = RATES[load] if model == "llama-2-70b" else np.inf
    rate = min(own, BELOW * slowest)
    for name, placement in found.items():
        late = [p95_ms(run(placement, rate, options.requests, seed)) for seed in seeds]
        ttft, tpot = np.mean(late, axis=0)
        worst = np.max(late, axis=0)
        print(
            f"{model} {load} {name:10} planned {placement.throughput.req_s:6.2f}, served "
            f"{np.mean(served[name]):6.2f} requests/s (least {min(served[name]):.2f}); at {rate:.2f}: "
            f"P95 TTFT {ttft:6.0f} (worst {worst[0]:.0f}), P95 TPOT {tpot:5.0f} (worst {worst[1]:.0f}) ms"
        )


def show_errors(model: str, load: str, placement: Placement, options: argparse.Namespace) -> None:
    """What wrong profiles cost, and how wrong the fitted ones are."""
    cluster, costs = Cluster.from_spec(placement.cluster), placement.costs()
    fitted = []
    for replica in placement.replicas:
        times = step_times(replica, placement.workers_of(replica.id), cluster, costs, "pipelined")
        if isinstance(times, HeadwiseTimes):
            fitted += [each for stage in range(times.stages) for each in profiled(times, stage)]
    seeds, rate = range(options.seed, options.seed + options.seeds), 0.9 * placement.throughput.req_s
    right = [_mean_tpot_s(run(placement, rate, options.requests, seed)) for seed in seeds]
    worst = []
    for error in ERRORS:
        off = [
            _mean_tpot_s(
                run(placement, rate, options.requests, seed, HeadOptions(profile_error=error, seed=seed))
            )
            for seed in seeds
        ]
        worst.append(max(a / b for a, b in zip(off, right, strict=True)))
    text = ", ".join(f"{e:.0%}: {w:.3f}" for e, w in zip(ERRORS, worst, strict=True))
    print(
        f"{model} {load} profile error: fitted attention {max(p.error for p in fitted):.2%}, exchange "
        f"{max(p.exchange_error for p in fitted):.2%}; worst mean TPOT over right profiles {text}"
    )


def _mean_tpot_s(records: Records) -> float:
    several = records.requests.osl > 1
    return float(((records.end_s - records.first_s)[several] / (records.requests.osl[several] - 1)).mean())


if __name__ == "__main__":
    main()
