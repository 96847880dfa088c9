"""The workload-aware scheduler (Huawei) beside others: the paper's setups, our own placements, a real fleet.

    python -m benchmarks.serving.workload_aware [--parts degrees,setups,shipped,fleet] [--seeds N]
        [--requests N] [--trace FILE]

degrees: Llama-3 8B on 8 V100, one instance size at a time: requests/s by Algorithm 1 (static batches) and by
simulation of all 8 GPUs (section 5.1). setups: the machines of sections 5.2 and 5.3, at the paper's request
rates, on engines as the paper's (prompts first, each instance queues what it gets): output tokens/s of each
scheduler over round-robin's. "printed" is the paper's formula, in which the use of a KV cache may exceed 1
and places do not count. The V100 of the paper are SXM2, and "connected over PCIe 3.0": both are shown.
shipped: placements of the default search, `--scheduler workload-aware` over the flow, in latency and in
steady requests/s. fleet: two torch instances on this machine's CPUs, of which one has memory for a few
requests only, measured.

The lengths are those of --trace, or drawn from lognormal distributions with ShareGPT's means (161 tokens in,
338 out, as in the vLLM paper; shapes 1.3 and 1.0 are assumed). --seeds fresh draws of each; the worst is
printed, too.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

import hexgen2
from benchmarks.serving.fleet import COMMAND, launched, make_model
from cluster_specs.loader import load_cluster
from cluster_specs.schema import ClusterSpec
from hexgen2.bench.run import Load, bench
from hexgen2.placement import Placement, SearchRecord
from hexgen2.search.build import build_placement
from hexgen2.search.params import DEFAULT
from hexgen2.search.problem import Group, Problem, Solution, make_problem
from hexgen2.simulator.options import Options
from hexgen2.simulator.run import simulate
from hexgen2.strategies.baselines.huawei import OneStagePlanner, by_machine
from hexgen2.workload.arrivals import LengthSource, online
from hexgen2.workload.classes import workload_of_trace
from hexgen2.workload.requests import Requests
from hexgen2.workload.traces import read_trace
from runtime.routing.output_lengths import make_predictor
from runtime.routing.router import Router
from runtime.routing.workload_router import WorkloadRouter

PARTS = ("degrees", "setups", "shipped", "fleet")
CLUSTER, MODEL_8B, MODEL_14B = "huawei-v100-a800", "llama-3-8b", "llama-2-13b"
"""The paper's second model, DeepSeek-R1-Distill-Qwen 14B, is not shipped: Llama-2 13B stands in."""
SETUPS = {
    "5.2, one tp4 and one tp1": (MODEL_8B, [(0, 4), (0, 1)], (8.0, 16.0, 24.0, None), 122.5),
    "5.3, four tp2 and the A800": (MODEL_14B, [(0, 2)] * 4 + [(1, 1)], (8.0, 16.0, 24.0, None), 33.6),
}
"""Model, instances (node, GPUs), requests/s (None: all at once), and the paper's gain in percent."""
SCHEDULERS = ("single", "weighted", "memory", "printed", "workload-aware", "flow")
SHIPPED = (
    *(("huawei-v100-a800", "llama-2-13b"), ("hexgen2-setting-1", "llama-2-70b")),
    *(("hexgen2-setting-3", "llama-2-70b"), ("hexgen2-setting-5", "opt-30b")),
    *(("hetis-12", "llama-2-13b"), ("helix-single-24", "llama-30b")),
)
LOADS = (0.7, 0.9, 1.15)
PLACES = 256
"""Requests that an instance decodes at a time: max_num_seqs of the paper's engine (vLLM 0.6.0)."""
FLEET = """
name: two-unlike
nodes:
  - {name: roomy, accelerators: Roomy:1, interconnect: shared-memory, price_per_gpu_hour: 0}
  - {name: tight, accelerators: Tight:1, interconnect: shared-memory, price_per_gpu_hour: 0}
accelerators:
  Roomy: {memory_gib: 2, bf16_dense_tflops: 0.05, memory_bandwidth_gbyte_s: 8, kind: cpu}
  Tight: {memory_gib: 0.28, bf16_dense_tflops: 0.05, memory_bandwidth_gbyte_s: 8, kind: cpu}
"""
ISL, OSL = 96, 32
FLEET_SHARE = 130
"""A fleet on CPUs gets one in so many of the requests."""


def main() -> None:
    """Print each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="first seed")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--trace", type=Path, help="lengths instead of those drawn")
    parser.add_argument("--cost-model", default="vllm")
    parser.add_argument("--clusters", type=int, default=len(SHIPPED), help="of part shipped")
    options = parser.parse_args()
    print(f"seeds {options.seed} to {options.seed + options.seeds - 1}, {options.requests} requests")
    parts = {"degrees": degrees, "setups": setups, "shipped": shipped, "fleet": fleet}
    for part in options.parts.split(","):
        parts[part](options)


def drawn(options: argparse.Namespace, seed: int, rate: float | None, count: int | None = None) -> Requests:
    """Requests with lengths of the trace, or like ShareGPT's."""
    rng, count = np.random.default_rng(seed), count or options.requests
    if options.trace:
        trace = read_trace(options.trace)
        kept = np.flatnonzero((trace.isl <= 2048) & (trace.osl <= 1024))
        chosen = kept[rng.integers(len(kept), size=count)]
        isl, osl = trace.isl[chosen], trace.osl[chosen]
    else:
        isl, osl = _lognormal(rng, count, 161, 1.3), _lognormal(rng, count, 338, 1.0)
    arrival_s = np.zeros(count) if rate is None else np.cumsum(rng.exponential(1 / rate, count))
    return Requests(arrival_s, isl, osl, f"seed {seed}")


def _lognormal(rng: np.random.Generator, count: int, mean: float, shape: float) -> np.ndarray:
    values = rng.lognormal(np.log(mean) - shape**2 / 2, shape, count)
    return np.clip(np.rint(values), 4, 1024).astype(np.int64)


def problem_of(options: argparse.Namespace, cluster: str | ClusterSpec, model: str) -> Problem:
    """A problem with the lengths of a draw of its own as workload."""
    workload = workload_of_trace(drawn(options, options.seed + 10**6, None, 4000), "drawn")
    return make_problem(cluster, model, workload, cost_model=options.cost_model)


def with_links(link: str) -> ClusterSpec:
    """The paper's machines, with such links between the V100."""
    spec = load_cluster(CLUSTER)
    first = spec.nodes[0].model_copy(update={"interconnect": link})
    return spec.model_copy(update={"nodes": [first, *spec.nodes[1:]]})


def instances_of(problem: Problem, instances: list[tuple[int, int]]) -> Placement:
    """A placement of these instances, (node, GPUs) each."""
    evaluator = OneStagePlanner.evaluator(problem, DEFAULT)
    groups = tuple(Group("colocated", ((node, degree),)) for node, degree in instances)
    record = SearchRecord(seconds=0, seed=0, evaluations=1)
    return build_placement(problem, evaluator.evaluate(Solution(groups)), "huawei", record)


def degrees(options: argparse.Namespace) -> None:
    """Requests/s of each tensor-parallel degree on the V100 machine."""
    print("\ndegrees (llama-3-8b, 8 V100): requests/s by Algorithm 1, and simulated, all at once, in turn")
    for link in ("pcie3", "nvlink"):
        problem = problem_of(options, with_links(link), MODEL_8B)
        same = 0
        for seed in range(options.seed, options.seed + options.seeds):
            load = drawn(options, seed, None, 2 * options.requests)
            sample = list(zip(load.isl[:200].tolist(), load.osl[:200].tolist(), strict=True))
            choices = next(iter(by_machine(problem, OneStagePlanner(problem), sample)))
            planned = {choice.degree: choice.req_s for choice in choices}
            found = {}
            for degree in planned:
                placement = instances_of(problem, [(0, degree)] * (8 // degree))
                run = simulate(
                    placement, load, Options("prefill-first", scheduler="round-robin", max_batch=PLACES)
                )
                found[degree] = run.request_throughput
            orders = [sorted(values, key=values.__getitem__, reverse=True) for values in (planned, found)]
            same += orders[0] == orders[1]
            shown = ", ".join(f"tp{d} {planned[d]:.3g} / {found[d]:.3g}" for d in planned)
            print(f"  {link:7} seed {seed}: {shown}; order {orders[0]} / {orders[1]}", flush=True)
        print(f"  {link:7} the same order in {same} of {options.seeds}")


def setups(options: argparse.Namespace) -> None:
    """Gains over round-robin on the paper's two setups."""
    for name, (model, instances, rates, claimed) in SETUPS.items():
        for link in ("pcie3", "nvlink"):
            print(f"\n{name}, {link}: output tokens/s over round-robin (the paper: +{claimed} %)")
            print(f"{'requests/s':>11}{'round-robin':>13}" + "".join(f"{each:>16}" for each in SCHEDULERS))
            problem = problem_of(options, with_links(link), model)
            placement = instances_of(problem, instances)
            worst: dict[str, float] = {}
            for rate in rates:
                gains: dict[str, list[float]] = {each: [] for each in SCHEDULERS}
                base = []
                for seed in range(options.seed, options.seed + options.seeds):
                    found = outputs(placement, drawn(options, seed, rate))
                    base.append(found["round-robin"])
                    for each in SCHEDULERS:
                        gains[each].append(100 * (found[each] / found["round-robin"] - 1))
                row = "".join(f"{np.mean(gains[each]):>+15.1f}%" for each in SCHEDULERS)
                print(f"{rate or 'at once':>11}{np.mean(base):>13.0f}{row}", flush=True)
                for each, values in gains.items():
                    worst[each] = min(worst.get(each, np.inf), *values)
            row = "".join(f"{worst[each]:>+15.1f}%" for each in SCHEDULERS)
            print(f"{'worst':>11}{'':13}{row}", flush=True)


def outputs(placement: Placement, load: Requests) -> Mapping[str, float]:
    """Output tokens/s of each scheduler."""
    printed = WorkloadRouter([], make_predictor(None, placement.workload), as_printed=True)
    routers: dict[str, str | Router] = {each: each for each in ("round-robin", *SCHEDULERS)}
    routers["printed"] = printed
    return {
        name: simulate(
            placement, load, Options("prefill-first", scheduler=each, max_batch=PLACES)
        ).output_throughput
        for name, each in routers.items()
    }


def shipped(options: argparse.Namespace) -> None:
    """What workload-aware gives on top of the flow, on placements of the default search."""
    print(
        "\nshipped clusters, default search: workload-aware over flow (means of the seeds; below: the worst)"
    )
    print(
        f"{'cluster':20}{'load':>6}{'requests/s':>12}{'mean TTFT':>11}{'p90 TTFT':>10}{'mean TPOT':>11}",
        end="",
    )
    print(f"{'p90 TPOT':>10}{'mean E2EL':>11}")
    kinds = ("steady_request_throughput", "mean_ttft_ms", "p90_ttft_ms", "mean_tpot_ms", "p90_tpot_ms")
    keys = (*kinds, "mean_e2el_ms")
    everything = []
    for cluster, model in SHIPPED[: options.clusters]:
        workload = problem_of(options, cluster, model).workload
        placement = hexgen2.search(
            cluster=cluster, model=model, workload=workload, cost_model=options.cost_model, time_limit_s=10
        )
        for load in LOADS:
            ratios = []
            for seed in range(options.seed, options.seed + options.seeds):
                requests = drawn(options, seed, load * placement.throughput.req_s)
                flow, aware = (
                    simulate(placement, requests, Options(scheduler=each))
                    for each in ("flow", "workload-aware")
                )
                ratios.append([100 * (getattr(aware, key) / getattr(flow, key) - 1) for key in keys])
            everything += ratios
            means = np.mean(ratios, axis=0)
            print(f"{cluster:20}{load:>6}" + _row(means), flush=True)
    values = np.array(everything)
    print(f"{'worst':26}" + _row([values[:, 0].min(), *values[:, 1:].max(axis=0)]))


def _row(values) -> str:
    widths = (12, 11, 10, 11, 10, 11)
    return "".join(f"{value:>+{width - 1}.1f}%" for value, width in zip(values, widths, strict=True))


def fleet(options: argparse.Namespace) -> None:
    """Two unlike torch instances on CPUs, measured under each scheduler by the same requests."""
    print(f"\nfleet: two torch instances on this machine's CPUs, {ISL} tokens in and {OSL} out on average")
    with tempfile.TemporaryDirectory() as folder:
        work, model = Path(folder), Path(folder) / "model"
        make_model(model)
        cluster, path = work / "cluster.yaml", work / "placement.json"
        cluster.write_text(FLEET)
        asked = ["--cluster", str(cluster), "--model", str(model), "--isl", str(ISL), "--osl", str(OSL)]
        command = [COMMAND, "search", *asked, "--strategy", "huawei", "-o", str(path)]
        subprocess.run(command, check=True, capture_output=True)
        placement = Placement.load(path)
        print("  " + ", ".join(f"{r.gpus[0]} holds {r.max_batch} requests" for r in placement.replicas))
        lengths = replace(LengthSource(placement.workload), length_range=0.3)
        count = max(20, options.requests // FLEET_SHARE)
        rates = list(_rates(options, path, model, lengths))
        for rate in rates:
            for scheduler in ("round-robin", "workload-aware", "flow"):
                with _serving(path, model, scheduler) as (url, _):
                    for seed in range(options.seed, options.seed + options.seeds):
                        found = bench(Load(url), online(lengths, rate, count, seed), {})
                        print(
                            f"  {rate:6.2f}/s {scheduler:15} {seed}: {found.output_throughput:7.1f} tokens/s,"
                            f" TTFT {found.mean_ttft_ms:7.0f} ms (p90 {found.p90_ttft_ms:.0f}), TPOT"
                            f" {found.mean_tpot_ms:5.0f} ms, E2EL {found.mean_e2el_ms:7.0f} ms,"
                            f" {found.failed} failed",
                            flush=True,
                        )


def _serving(path: Path, model: Path, scheduler: str):
    return launched(path, model, "--no-prefix-caching", "--scheduler", scheduler, "--queue-limit", "5000")


def _rates(options: argparse.Namespace, path: Path, model: Path, lengths: LengthSource) -> Iterator[float]:
    """Rates at shares of what the fleet serves under the flow when all requests come at once."""
    with _serving(path, model, "flow") as (url, _):
        bench(Load(url), online(lengths, 50.0, 10, 0), {})  # warm-up
        most = bench(Load(url), online(lengths, 1000.0, max(20, options.requests // FLEET_SHARE), 1), {})
    print(f"  at most {most.request_throughput:.2f} requests/s under the flow, all at once")
    yield from (0.7 * most.request_throughput, 1.5 * most.request_throughput)


if __name__ == "__main__":
    main()
