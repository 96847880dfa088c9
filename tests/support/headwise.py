"""Placements with attention workers, made by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from placements import CORE, placement_of, replica_of

from cluster_specs.schema import ClusterSpec, NodeSpec
from cost_model.config import architecture_from_folder
from cost_model.dtypes import in_formats
from hexgen2.attention_workers import AttentionWorker
from hexgen2.placement import Placement
from hexgen2.workload.lengths import RequestClass, Workload
from runtime.headwise.room import budget_tokens
from runtime.protocol.to_workers import Configure

REPLICA = "colocated-0"
ALIKE = (1e-6, 1e-9, 0.0, 0.0, 0.0)
"""A profile: seconds for each query head and for each byte of KV cache."""


def headwise_placement(
    folder: Path, stages: Sequence[tuple[str, int]], helpers: int = 2, kv: str | None = None
) -> Placement:
    """One colocated replica of the model in a folder, with so many attention workers.

    Parameters
    ----------
    stages : each stage's GPUs ("box/0 box/1") and number of layers, in order; the GPUs after these are the
        attention workers
    kv : format of KV caches; None: that of the model
    """
    gpus = sum(len(names.split()) for names, _ in stages)
    box = NodeSpec(name="box", accelerators=f"Core:{gpus + helpers}", interconnect="shared-memory")
    replica = replica_of(REPLICA, stages, max_batch=4, capacity_req_s=4.0, utilisation=0.5)
    placement = placement_of(
        ClusterSpec(name="one-box", nodes=[box], accelerators={"Core": CORE}),
        in_formats(architecture_from_folder(folder), kv=kv).model_copy(update={"name": "tiny"}),
        Workload(name="short", classes=(RequestClass(name="short", isl=32, osl=16),)),
        [replica],
        [],
    )
    shares = [1 / len(stages)] * len(stages)
    workers = [
        AttentionWorker(gpu=f"box/{gpus + k}", replica=REPLICA, kv_shares=shares) for k in range(helpers)
    ]
    return placement.model_copy(update={"attention_workers": workers})


def with_blocks(own: int, *helpers: int, theta: float = 0.5) -> Callable[[Configure], Configure]:
    """A change of what workers are told: so many blocks of single heads on each GPU of the stages and on each
    attention worker (for each of those GPUs), all of them alike in the eyes of the dispatcher; and prompts
    are computed in short chunks."""

    def change(config: Configure) -> Configure:
        lanes = tuple(
            msgspec.structs.replace(
                lane,
                devices=tuple(
                    msgspec.structs.replace(device, blocks=blocks, profile=ALIKE)
                    for device, blocks in zip(lane.devices, (own, *helpers), strict=True)
                ),
            )
            for lane in config.lanes
        )
        budget = budget_tokens(lanes, config.block_tokens)
        return msgspec.structs.replace(
            config,
            lanes=lanes,
            kv_budget_tokens=budget,
            theta=theta,
            max_prefill_tokens=48,
            max_mixed_tokens=24,
        )

    return change
