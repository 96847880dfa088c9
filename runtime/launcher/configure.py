"""From a placement to what each worker is told at its start."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from cost_model.base import PREFILL_TOKENS
from hexgen2.placement import Placement, Replica
from runtime.messages import PROTOCOL_VERSION, Configure, StageShape
from runtime.options import DEFAULTS, EngineOptions
from runtime.room import kv_budgets


def accelerator_of(placement: Placement, gpu: str) -> str:
    """The accelerator type of a GPU id ("node/index")."""
    node_name = gpu.rsplit("/", 1)[0]
    node = next(node for node in placement.cluster.nodes if node.name == node_name)
    return node.accelerators.rsplit(":", 1)[0].strip()


def is_cpu(placement: Placement, gpu: str) -> bool:
    """Whether a device of the placement is a CPU that stands in for a GPU."""
    accelerator = placement.cluster.accelerators.get(accelerator_of(placement, gpu))
    return accelerator is not None and accelerator.kind == "cpu"


def device_of(placement: Placement, gpu: str) -> str:
    """The torch device of a GPU id, with all nodes on this machine: "cpu" or "cuda:N".

    GPUs of several nodes are numbered one node after the other, so that two nodes described on one
    machine never share a card.
    """
    if is_cpu(placement, gpu):
        return "cpu"
    node_name, index = gpu.rsplit("/", 1)
    before = 0
    for node in placement.cluster.nodes:
        if node.name == node_name:
            break
        if not is_cpu(placement, f"{node.name}/0"):
            before += int(node.accelerators.rpartition(":")[2])
    return f"cuda:{before + int(index)}"


def stage_shapes(replica: Replica) -> tuple[StageShape, ...]:
    """The stages of a replica as they are written on the wire."""
    return tuple(
        StageShape(workers=tuple(stage.gpus), first_layer=stage.layers[0], end_layer=stage.layers[1])
        for stage in replica.stages
    )


def shares_of(cores: Sequence[int], workers: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Cores for the CPU workers of this machine: as many for each, neighbours together; none if there are not
    two for each, so that the system may move them about."""
    count = len(cores) // max(len(workers), 1)
    if count < 2:
        return {}
    return {worker: tuple(cores[k * count : (k + 1) * count]) for k, worker in enumerate(workers)}


def configurations(
    placement: Placement, checkpoint: Path, gpu_dtype: str, options: EngineOptions = DEFAULTS
) -> dict[str, Configure]:
    """The first message of every worker, by worker, in the placement's order.

    All workers hold the KV cache in one type: the one in `options`, or float32 as soon as one of them is a
    CPU (its fast type), else `gpu_dtype`.
    """
    secret, budgets = secrets.token_hex(32), kv_budgets(placement)
    gpus = [gpu for replica in placement.replicas for gpu in replica.gpus]
    cores = shares_of(sorted(os.sched_getaffinity(0)), [gpu for gpu in gpus if is_cpu(placement, gpu)])
    dtype = options.dtype
    if dtype == "auto":
        dtype = "float32" if any(is_cpu(placement, gpu) for gpu in gpus) else gpu_dtype
    return {
        gpu: Configure(
            protocol=PROTOCOL_VERSION,
            worker=gpu,
            replica=replica.id,
            role=replica.role,
            stages=stage_shapes(replica),
            checkpoint=str(checkpoint),
            device=device_of(placement, gpu),
            dtype=dtype,
            kv_budget_tokens=budgets[replica.id],
            block_tokens=options.block_tokens,
            max_batch=replica.max_batch,
            max_prefill_tokens=PREFILL_TOKENS,
            max_mixed_tokens=options.chunk_tokens,
            reuse_prefixes=options.reuse_prefixes,
            kv_transport=options.kv_transport,
            host="127.0.0.1",
            secret=secret,
            threads=len(cores.get(gpu, (0,))),
            cores=cores.get(gpu, ()),
        )
        for replica in placement.replicas
        for gpu in replica.gpus
    }
