"""Attention workers: GPUs without weights that keep a part of the KV heads of a replica's requests, and
compute decode attention over them (Hetis, SC 2025, section 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from cost_model.base import CostModel, StageMemory, TensorGroup
from cost_model.fields import Name, between
from cost_model.hardware import NO_LINK, Accelerator
from hexgen2.cluster import Cluster
from hexgen2.replica import Replica

_ROUNDING = 1e-9

Share = Annotated[float, Field(ge=0), between(0, 1)]


class AttentionWorker(BaseModel):
    """One attention worker.

    gpu : in no replica's stages
    replica : the one whose stages it works for
    kv_shares : the part of its memory for KV caches that each of these stages may fill, at most 1 together
    """

    model_config = ConfigDict(extra="forbid")

    gpu: Name
    replica: Name
    kv_shares: list[Share] = Field(min_length=1)


def worker_memory(costs: CostModel, accelerator: Accelerator) -> StageMemory:
    """The memory of a GPU that holds no weights."""
    return costs.stage_memory("decode", TensorGroup(accelerator, 1, NO_LINK), first=False, last=False)


def kv_room(memory: StageMemory) -> float:
    """Bytes for KV caches on an attention worker."""
    return max(0.0, memory.limit - memory.fixed)


def devices_requests(
    replica: Replica, workers: Sequence[AttentionWorker], cluster: Cluster, costs: CostModel
) -> list[list[float]]:
    """Mean requests under way whose KV caches of a stage's layers each device holds: for each stage, its own
    GPUs together, then each attention worker; negative where not even the weights fit.

    Only whole KV heads count: a request's heads may be on several devices, a head is on one.
    """
    found, last, heads = [], len(replica.stages) - 1, costs.model.kv_heads
    cards = [cluster.accelerators[cluster.index(worker.gpu)] for worker in workers]
    memory_of = {card: worker_memory(costs, card) for card in dict.fromkeys(cards)}
    memories = [memory_of[card] for card in cards]
    for s, stage in enumerate(replica.stages):
        accelerator = cluster.accelerators[cluster.index(stage.gpus[0])]
        group = stage.tensor_group(accelerator)
        memory = costs.stage_memory("decode", group, first=s == 0, last=s == last)
        room = memory.limit - memory.fixed - stage.layer_count * memory.per_layer
        held = [room / _request_bytes(memory, stage.layer_count)]
        for worker, memory in zip(workers, memories, strict=True):
            share = kv_room(memory) * worker.kv_shares[s]
            held.append(share / _request_bytes(memory, stage.layer_count))
        found.append([held[0], *(math.floor(each * heads + _ROUNDING) / heads for each in held[1:])])
    return found


def stage_requests(
    replica: Replica, workers: Sequence[AttentionWorker], cluster: Cluster, costs: CostModel
) -> list[float]:
    """Mean requests under way whose KV caches fit, for each stage, on its GPUs and the attention workers."""
    devices = devices_requests(replica, workers, cluster, costs)
    return [math.fsum(held) if held[0] >= -_ROUNDING else -1.0 for held in devices]


def _request_bytes(memory: StageMemory, layers: int) -> float:
    return layers * memory.per_layer_request + memory.per_request
