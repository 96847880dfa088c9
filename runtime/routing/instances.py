"""What schedulers know of a replica beside its KV budget: its GPUs, and the times of its batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cluster_specs.loader import resolve
from cost_model.base import CostModel
from hexgen2.cluster import Cluster
from hexgen2.placement import Placement
from hexgen2.prediction.batch_times import BatchTimes, profiles


@dataclass(frozen=True, slots=True)
class Instance:
    """GPUs of a replica, and its batch times."""

    gpus: int
    times: BatchTimes

    def holding(self, kv_tokens: int, places: int) -> Instance:
        """The same with so much KV cache and so many requests at a time."""
        return replace(self, times=replace(self.times, kv_tokens=kv_tokens, places=places))


def instances(
    placement: Placement, cluster: Cluster | None = None, costs: CostModel | None = None
) -> Mapping[str, Instance]:
    """The replicas of a placement by id, profiled under its cost model or another one."""
    if cluster is None:
        cluster = Cluster.from_spec(resolve(placement.cluster, "cluster", Path()))
    times = profiles(placement, cluster, costs)
    return {replica.id: Instance(len(replica.gpus), times[replica.id]) for replica in placement.replicas}
