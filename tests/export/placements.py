"""Placements by hand, of any shapes on any nodes."""

from __future__ import annotations

from pathlib import Path

from cluster_specs.loader import resolve
from cluster_specs.schema import AcceleratorSpec, ClusterSpec, NodeSpec
from cost_model.models import find_model
from hexgen2.placement import (
    Bound,
    CostModelName,
    Latency,
    Placement,
    Replica,
    Route,
    SearchRecord,
    Stage,
    Throughput,
)
from hexgen2.workload import RequestClass, Workload

CORE = AcceleratorSpec(memory_gib=2, bf16_dense_tflops=0.2, memory_bandwidth_gbyte_s=10, kind="cpu")


def by_hand(
    nodes: dict[str, str],
    replicas: dict[str, list[tuple[str, int]]],
    routes: tuple[tuple[str, str], ...] = (),
    model: str = "llama-2-7b",
    addresses: dict[str, str] | None = None,
) -> Placement:
    """A placement that nothing has verified.

    Parameters
    ----------
    nodes : "NAME:COUNT" of accelerators by node
    replicas : by id, which begins with the role: each stage's GPUs ("a/0 a/1") and number of layers
    """
    cpu = {"Core": CORE} if any(text.startswith("Core") for text in nodes.values()) else {}
    specs = [
        NodeSpec(name=name, accelerators=text, address=(addresses or {}).get(name))
        for name, text in nodes.items()
    ]
    cluster = resolve(ClusterSpec(name="test", nodes=specs, accelerators=cpu), "test", Path())
    made = []
    for name, stages in replicas.items():
        first, parts = 0, []
        for gpus, count in stages:
            parts.append(Stage(gpus=gpus.split(), layers=(first, first + count)))
            first += count
        role = name.partition("-")[0]
        made.append(
            Replica(id=name, role=role, stages=parts, max_batch=8, capacity_req_s=2.0, utilisation=0.5)
        )
    return Placement(
        strategy="by-hand",
        cluster=cluster,
        model=find_model(model),
        workload=Workload(name="short", classes=(RequestClass(name="short", isl=512, osl=128),)),
        cost_model=CostModelName(name="calibrated", calibration="none", pipeline="pipelined"),
        replicas=made,
        routes=[
            Route(from_=sender, to=receiver, flow_req_s=1.0, capacity_req_s=2.0, kv_bytes_per_req=1e6)
            for sender, receiver in routes
        ],
        throughput=Throughput(req_s=1.0, output_tok_s=64.0),
        latency=Latency(ttft_ms=10.0, tpot_ms=10.0),
        price_per_hour=0.0,
        bound=Bound(req_s=4.0, gap=0.0, assumptions=[]),
        bottlenecks=[],
        search=SearchRecord(seconds=0.0, seed=0, evaluations=0),
    )
