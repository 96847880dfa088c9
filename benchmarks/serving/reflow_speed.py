"""Time how long the front end takes to re-solve the flow after a loss (runtime/routing/reflow.py).

    python -m benchmarks.serving.reflow_speed [--runs 15]

The fleets are synthetic: replicas of two GPUs, half prefill and half decode, on nodes with links that they
share, and few routes, as in placements from the search. Each run loses a different twentieth of the replicas.
Prints milliseconds of CPU time: of the first run, and median and worst of the others.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

from cluster_specs.loader import resolve
from cluster_specs.schema import ClusterSpec, NodeSpec
from cost_model.models import find_model
from cost_model.registry import make_cost_model
from hexgen2.placement import (
    BoundRecord,
    CostModelName,
    Latency,
    Placement,
    Replica,
    Route,
    SearchRecord,
    Stage,
    Throughput,
)
from hexgen2.workload.classes import load_workload
from runtime.routing.reflow import Reflow

SIZES = (4, 20, 100, 300)
PER_NODE = 4


def fleet(replicas: int, chance: random.Random) -> Placement:
    """Replicas of two GPUs each, with random capacities and as many routes as a spanning tree has."""
    nodes = [NodeSpec(name=f"n{k}", accelerators="A100-80GB:8") for k in range(-(-replicas // PER_NODE))]
    cluster = resolve(ClusterSpec(name="fleet", nodes=nodes), "fleet", Path())
    model, workload = find_model("llama-2-70b"), load_workload("HPHD", None, None)
    costs = make_cost_model("calibrated", model, workload.lengths)
    order = list(range(replicas))
    chance.shuffle(order)
    made = []
    for number, place in enumerate(order):
        node, slot = divmod(place, PER_NODE)
        gpus = [f"n{node}/{2 * slot + k}" for k in range(2)]
        role = "prefill" if number % 2 else "decode"
        made.append(
            Replica(
                id=f"{role}-{number}",
                role=role,  # type: ignore[arg-type]
                stages=[Stage(gpus=gpus, layers=(0, model.layers))],
                max_batch=8,
                capacity_req_s=chance.uniform(0.5, 2),
                utilisation=0.0,
            )
        )
    sides = [[each for each in made if each.role == role] for role in ("prefill", "decode")]
    i = j = 0
    pairs = []
    while i < len(sides[0]) and j < len(sides[1]):
        pairs.append((sides[0][i], sides[1][j]))
        i, j = (i + 1, j) if chance.random() < 0.5 else (i, j + 1)
    return Placement(
        strategy="by-hand",
        cluster=cluster,
        model=model,
        workload=workload,
        cost_model=CostModelName(name="calibrated", calibration="none", pipeline="pipelined", links="shared"),
        replicas=made,
        routes=[
            Route.between(p, d, costs.kv_bytes_per_layer, capacity_req_s=5.0, flow_req_s=1.0)
            for p, d in pairs
        ],
        throughput=Throughput(req_s=1.0, output_tok_s=1.0),
        latency=Latency(ttft_ms=1.0, tpot_ms=1.0),
        price_per_hour=0.0,
        bound=BoundRecord(req_s=1.0, gap=0.0, assumptions=[]),
        bottlenecks=[],
        search=SearchRecord(seconds=0.0, seed=0, evaluations=0),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    print("replicas  routes  first ms  median ms  worst ms")
    for replicas in SIZES:
        chance = random.Random(replicas)
        placement = fleet(replicas, chance)
        reflow, taken = Reflow(placement), list[float]()
        for _ in range(runs):
            lost = chance.sample([each.id for each in placement.replicas], max(1, replicas // 20))
            started = time.process_time()
            routes = reflow.routes(set(lost))
            taken.append((time.process_time() - started) * 1e3)
        first, later = taken[0], taken[1:]
        print(
            f"{replicas:8}  {len(routes):6}  {first:8.1f}  {statistics.median(later):9.1f}  {max(later):8.1f}"
        )


if __name__ == "__main__":
    main()
