"""The lanes of a placement's replicas: which device may hold how many blocks of single KV heads."""

from __future__ import annotations

from pathlib import Path

from cluster_specs.loader import resolve
from cost_model.errors import InputError
from cost_model.pipeline import PipelineSemantics
from hexgen2.cluster import Cluster
from hexgen2.headwise.profile import DeviceProfile, kv_head_token_bytes, profiled
from hexgen2.placement import Placement, Replica
from hexgen2.prediction.headwise_times import HeadwiseTimes
from runtime.headwise.room import largest_tokens
from runtime.kv_cache.layout import head_range
from runtime.protocol.to_workers import HeadDevice, HeadLane


def lanes_of(
    placement: Placement, replica: Replica, budget_tokens: int, block_tokens: int
) -> tuple[HeadLane, ...]:
    """The lanes of a replica with attention workers, one for each GPU of its stages.

    The GPUs of a stage have equal parts of its heads, and of what an attention worker keeps for the stage.
    Each then dispatches its heads as if it were alone with that part of every device.

    Parameters
    ----------
    budget_tokens : KV cache that is of use; what the devices have beyond it is left free

    Raises
    ------
    InputError : the devices have no room for a request of one block
    """
    cluster, costs = Cluster.from_spec(resolve(placement.cluster, "cluster", Path())), placement.costs()
    workers, model = placement.workers_of(replica.id), placement.model
    semantics: PipelineSemantics = placement.cost_model.pipeline  # type: ignore[assignment]
    times = HeadwiseTimes(replica, workers, cluster, costs, semantics)
    held = min(sum(device.kv_tokens for device in devices) for devices in times.devices)
    used = min(1.0, budget_tokens / held) if held else 0.0
    lanes = list[HeadLane]()
    for s, stage in enumerate(replica.stages):
        degree, profiles = len(stage.gpus), profiled(times, s)
        for rank, gpu in enumerate(stage.gpus):
            first, end = head_range(rank, degree, model.kv_heads)
            names = [gpu, *(worker.gpu for worker in workers)]
            devices = tuple(
                HeadDevice(
                    worker=name,
                    blocks=int(used * device.kv_tokens * model.kv_heads / degree / block_tokens),
                    profile=_part(profile, degree),
                )
                for name, device, profile in zip(names, times.devices[s], profiles, strict=True)
            )
            lanes.append(
                HeadLane(
                    worker=gpu,
                    layers=stage.layers[1] - stage.layers[0],
                    heads=end - first,
                    query_heads=max(1, model.heads // degree // (end - first)),
                    head_bytes=kv_head_token_bytes(model),
                    devices=devices,
                )
            )
    if not largest_tokens(lanes, block_tokens):
        problem = f"{replica.id} and its attention workers have no room for a block of {block_tokens} tokens"
        raise InputError("placement", "attention_workers", problem, "search one with more memory for it")
    return tuple(lanes)


def _part(profile: DeviceProfile, degree: int) -> tuple[float, float, float, float, float]:
    """The profile of one of so many equal parts of a device."""
    return profile.off_by((degree, degree, 1.0, degree, 1.0)).numbers
