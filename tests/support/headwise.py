"""Placements with attention workers, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from placements import CORE, placement_of, replica_of

from cluster_specs.schema import ClusterSpec, NodeSpec
from cost_model.config import architecture_from_folder
from hexgen2.attention_workers import AttentionWorker
from hexgen2.placement import Placement
from hexgen2.workload.lengths import RequestClass, Workload

REPLICA = "colocated-0"


def headwise_placement(folder: Path, stages: Sequence[tuple[str, int]], helpers: int = 2) -> Placement:
    """One colocated replica of the model in a folder, with so many attention workers.

    Parameters
    ----------
    stages : each stage's GPUs ("box/0 box/1") and number of layers, in order; the GPUs after these are the
        attention workers
    """
    gpus = sum(len(names.split()) for names, _ in stages)
    box = NodeSpec(name="box", accelerators=f"Core:{gpus + helpers}", interconnect="shared-memory")
    replica = replica_of(REPLICA, stages, max_batch=4, capacity_req_s=4.0, utilisation=0.5)
    placement = placement_of(
        ClusterSpec(name="one-box", nodes=[box], accelerators={"Core": CORE}),
        architecture_from_folder(folder).model_copy(update={"name": "tiny"}),
        Workload(name="short", classes=(RequestClass(name="short", isl=32, osl=16),)),
        [replica],
        [],
    )
    shares = [1 / len(stages)] * len(stages)
    workers = [
        AttentionWorker(gpu=f"box/{gpus + k}", replica=REPLICA, kv_shares=shares) for k in range(helpers)
    ]
    return placement.model_copy(update={"attention_workers": workers})
