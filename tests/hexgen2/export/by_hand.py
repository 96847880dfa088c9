"""Placements made by hand, with any shapes on any nodes."""

from __future__ import annotations

from pathlib import Path

from placements import CORE, placement_of, replica_of

from cluster_specs.loader import resolve
from cluster_specs.schema import ClusterSpec, NodeSpec
from cost_model.dtypes import in_formats
from cost_model.models import find_model
from hexgen2.placement import Placement, Route
from hexgen2.workload.lengths import RequestClass, Workload


def by_hand(
    nodes: dict[str, str],
    replicas: dict[str, list[tuple[str, int]]],
    routes: tuple[tuple[str, str], ...] = (),
    model: str = "llama-2-7b",
    addresses: dict[str, str] | None = None,
    degrees: dict[str, tuple[int, int]] | None = None,
    kv: str | None = None,
) -> Placement:
    """An unverified placement.

    Parameters
    ----------
    nodes : "NAME:COUNT" of accelerators by node
    replicas : by id, which begins with the role: each stage's GPUs ("a/0 a/1") and number of layers
    kv : format of KV caches; None: the model's
    degrees : (attention data parallelism, expert parallelism) of every stage, by replica
    """
    cpu = {"Core": CORE} if any(text.startswith("Core") for text in nodes.values()) else {}
    specs = [
        NodeSpec(name=name, accelerators=text, address=(addresses or {}).get(name))
        for name, text in nodes.items()
    ]
    placement = placement_of(
        resolve(ClusterSpec(name="test", nodes=specs, accelerators=cpu), "test", Path()),
        in_formats(find_model(model), kv=kv),
        Workload(name="short", classes=(RequestClass(name="short", isl=512, osl=128),)),
        [replica_of(name, stages, utilisation=0.5) for name, stages in replicas.items()],
        [
            Route(from_=sender, to=receiver, flow_req_s=1.0, capacity_req_s=2.0, kv_bytes_per_req=1e6)
            for sender, receiver in routes
        ],
    )
    for name, (attention, experts) in (degrees or {}).items():
        for stage in placement.replica(name).stages:
            stage.attention_data_parallel, stage.expert_parallel = attention, experts
    return placement
