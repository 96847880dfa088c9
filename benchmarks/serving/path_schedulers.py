"""The ways to choose paths through ranges of layers (Helix): a torch fleet on this machine's CPUs, measured.

    python -m benchmarks.serving.path_schedulers [--requests N] [--clients N] [--rounds N]
        [--schedulers NAME ...] [--strategy NAME]

A strategy places a random Llama of 55 million parameters on five unlike nodes; Swarm's gives each stage
replicas of unlike sizes, between which there is something to choose. Each scheduler serves the same requests
of as many clients, in rounds that alternate between schedulers; beside it stands what the simulator says of
the placement. There, every node has a processor of its own. Here they share those of the machine, so that
only the ratios between schedulers say something, and less the fewer cores there are.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median

import hexgen2
from benchmarks.serving.fleet import COMMAND, launched, make_model
from hexgen2.bench.run import Load, bench
from hexgen2.placement import Placement
from hexgen2.schedulers import PATH_SCHEDULERS
from hexgen2.workload.arrivals import LengthSource, online

CLUSTER = """
name: five-unlike
nodes:
  - {name: a, accelerators: Roomy:1, interconnect: shared-memory, price_per_gpu_hour: 0}
  - {name: b, accelerators: Middle:1, interconnect: shared-memory, price_per_gpu_hour: 0}
  - {name: c, accelerators: Middle:1, interconnect: shared-memory, price_per_gpu_hour: 0}
  - {name: d, accelerators: Tight:1, interconnect: shared-memory, price_per_gpu_hour: 0}
  - {name: e, accelerators: Tight:1, interconnect: shared-memory, price_per_gpu_hour: 0}
network:
  default: {bandwidth_gbit_s: 16, latency_us: 100}
accelerators:
  Roomy: {memory_gib: 0.26, bf16_dense_tflops: 0.10, memory_bandwidth_gbyte_s: 8, kind: cpu}
  Middle: {memory_gib: 0.17, bf16_dense_tflops: 0.05, memory_bandwidth_gbyte_s: 8, kind: cpu}
  Tight: {memory_gib: 0.12, bf16_dense_tflops: 0.05, memory_bandwidth_gbyte_s: 4, kind: cpu}
"""
ISL, OSL = 96, 32
AT_ONCE = 1000.0
"""Requests/s that come, of which as many as there are clients are served at a time."""


def main() -> None:
    """Print the placement, and a line per scheduler."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--strategy", default="swarm")
    parser.add_argument("--schedulers", nargs="+", default=list(PATH_SCHEDULERS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work, model = Path(folder), Path(folder) / "model"
        make_model(model)
        path = work / "placement.json"
        (work / "cluster.yaml").write_text(CLUSTER)
        asked = ["--cluster", str(work / "cluster.yaml"), "--model", str(model)]
        lengths = ["--isl", str(ISL), "--osl", str(OSL), "--strategy", options.strategy, "-o", str(path)]
        subprocess.run([COMMAND, "search", *asked, *lengths], check=True, capture_output=True)
        placement = Placement.load(path)
        for replica in placement.replicas:
            first, end = replica.stages[0].layers
            print(
                f"{replica.id}: layers {first} to {end - 1}, {100 * replica.utilisation:.0f}% used as planned"
            )
        found = _measured(options, path, model, placement)
    print(f"{len(os.sched_getaffinity(0))} cores, median of {options.rounds} rounds, output tokens/s:")
    for scheduler, rates in found.items():
        said = hexgen2.simulate(
            placement,
            scheduler=scheduler,
            offline=True,
            max_concurrency=options.clients,
            num_requests=options.requests,
        )
        measured = f"{median(rates):7.1f} ({min(rates):.1f} to {max(rates):.1f})"
        print(f"  {scheduler:15} measured {measured}, simulated {said.output_throughput:.1f}")


def _measured(
    options: argparse.Namespace, path: Path, model: Path, placement: Placement
) -> dict[str, list[float]]:
    """Output tokens/s of each round, by scheduler."""
    lengths = replace(LengthSource(placement.workload), length_range=0.3)
    found = defaultdict[str, list[float]](list)
    for seed in range(options.rounds):
        for scheduler in options.schedulers:
            with launched(path, model, "--scheduler", scheduler) as (url, _):
                load = Load(url, max_concurrency=options.clients)
                bench(load, online(lengths, AT_ONCE, options.clients, 10**6), {})  # warm-up
                done = bench(load, online(lengths, AT_ONCE, options.requests, seed), {})
                found[scheduler].append(done.output_throughput)
                print(
                    f"  {scheduler:15} {found[scheduler][-1]:7.1f} tokens/s, {done.failed} failed", flush=True
                )
    return found


if __name__ == "__main__":
    main()
