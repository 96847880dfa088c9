"""What another cost model changes in placements: the paper's settings, planned by two of them.

    python -m benchmarks.search.cost_models [--settings 1,5] [--workloads HPLD,...] [--model llama-2-70b]
        [--planned-by calibrated vllm] [--requests 2000]

Prints, as Markdown, the requests/s that each placement promises, its replicas, and what the second cost
model's simulation gives both: offline requests/s in the steady state. The ratio is what planning by it is
worth.
"""

from __future__ import annotations

import argparse
from collections import Counter

import hexgen2
from cost_model.registry import find_cost_model
from hexgen2.placement import Placement
from hexgen2.simulator.options import Options
from hexgen2.simulator.run import simulate
from hexgen2.workload.arrivals import LengthSource, offline

SETTINGS = "1,2,3,4,5"
WORKLOADS = "HPLD,HPHD,LPHD,LPLD"


def replicas(placement: Placement) -> str:
    """For example "2 prefill tp4 H100; 1 decode tp2,tp2 A100-40GB"."""
    kinds = {node.name: str(node.accelerators).partition(":")[0] for node in placement.cluster.nodes}
    shapes = Counter[str]()
    for replica in placement.replicas:
        cards = "+".join(sorted({kinds[gpu.rpartition("/")[0]] for gpu in replica.gpus}))
        shapes[f"{replica.role} {replica.shape} {cards}"] += 1
    return "; ".join(f"{count} {shape}" for shape, count in sorted(shapes.items()))


def steady_req_s(placement: Placement, cost_model: str, count: int) -> float:
    """Requests/s in the steady state, as one cost model simulates the placement."""
    costs = find_cost_model(cost_model).costs(placement.model, placement.workload.lengths)
    requests = offline(LengthSource.load(placement.workload.name, None, None), count, 0)
    found = simulate(placement, requests, Options(), costs=costs)
    return found.steady_request_throughput or found.request_throughput


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", default=SETTINGS)
    parser.add_argument("--workloads", default=WORKLOADS)
    parser.add_argument("--model", default="llama-2-70b")
    parser.add_argument("--planned-by", nargs=2, default=["calibrated", "vllm"])
    parser.add_argument("--requests", type=int, default=2000)
    asked = parser.parse_args()
    before, after = asked.planned_by
    print(
        f"| setting | workload | {before} promises | {after} promises | simulated by {after}: both | ratio |"
    )
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    shapes = []
    for setting in asked.settings.split(","):
        for workload in asked.workloads.split(","):
            found = [
                hexgen2.search(
                    cluster=f"hexgen2-setting-{setting}",
                    model=asked.model,
                    workload=workload,
                    cost_model=name,
                )
                for name in (before, after)
            ]
            simulated = [steady_req_s(placement, after, asked.requests) for placement in found]
            promised = [f"{placement.throughput.req_s:.2f}" for placement in found]
            both = f"{simulated[0]:.2f}, {simulated[1]:.2f}"
            ratio = simulated[1] / simulated[0]
            print(f"| {setting} | {workload} | {' | '.join(promised)} | {both} | {ratio:.2f} |", flush=True)
            shapes += [
                f"- {setting} {workload}, {name}: {replicas(placement)}"
                for name, placement in zip((before, after), found, strict=True)
            ]
    print("", *shapes, sep="\n")


if __name__ == "__main__":
    main()
