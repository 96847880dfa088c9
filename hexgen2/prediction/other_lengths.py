"""A placement as it is, under requests of other lengths: what its replicas and routes can do then.

Replicas keep their stages and engine settings; what the plan says they can do changes as the cost model's
formulas do from the planned lengths to the others. Flows stay as they are: see runtime/routing/reflow.py for
those that suit the other lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cluster_specs.loader import resolve
from cost_model.base import CostModel
from cost_model.pipeline import PipelineSemantics, decode_pace, micro_batch, prefill_pace
from hexgen2.cluster import Cluster
from hexgen2.placement import Placement, Replica
from hexgen2.prediction.headwise_times import step_times
from hexgen2.prediction.kv_capacity import kv_capacity_tokens, kv_tokens_held
from hexgen2.prediction.latency import pace_of, phase_times
from hexgen2.prediction.step_times import StepTimes
from hexgen2.workload.lengths import Workload


def with_lengths(placement: Placement, isl: float, osl: float) -> Placement:
    """The placement under requests with these mean prompt and output tokens, all classes being longer or
    shorter alike."""
    planned = placement.workload
    prompts, outputs = isl / planned.isl, osl / planned.osl
    workload = _stretched(planned, prompts, outputs)
    cluster = Cluster.from_spec(resolve(placement.cluster, "cluster", Path()))
    sides = [_Side(cluster, costs, placement) for costs in (placement.costs(), _costs(placement, workload))]
    replicas = [_under(replica, *sides) for replica in placement.replicas]
    alone = {replica.id: replica.capacity_req_s for replica in replicas}
    routes = [
        route.model_copy(
            update={
                "capacity_req_s": alone[route.from_],
                "min_prompt_tokens": int(route.min_prompt_tokens * prompts),
            }
        )
        if route.from_ == route.to
        else route.model_copy(
            update={
                "capacity_req_s": route.capacity_req_s / prompts,
                "min_prompt_tokens": int(route.min_prompt_tokens * prompts),
                "kv_bytes_per_req": route.kv_bytes_per_req * prompts,
                "links": [
                    link.model_copy(update={"bytes_per_req": link.bytes_per_req * prompts})
                    for link in route.links
                ],
            }
        )
        for route in placement.routes
    ]
    return placement.model_copy(update={"workload": workload, "replicas": replicas, "routes": routes})


def _stretched(workload: Workload, prompts: float, outputs: float) -> Workload:
    classes = tuple(
        c.model_copy(update={"isl": c.isl * prompts, "osl": max(1.0, c.osl * outputs)})
        for c in workload.classes
    )
    return workload.model_copy(update={"classes": classes})


def _costs(placement: Placement, workload: Workload) -> CostModel:
    return placement.cost_model.costs(placement.model, workload.lengths)


@dataclass(frozen=True)
class _Side:
    """The cost model for the planned lengths, or for the others."""

    cluster: Cluster
    costs: CostModel
    placement: Placement

    @property
    def semantics(self) -> PipelineSemantics:
        return self.placement.cost_model.pipeline  # type: ignore[return-value]

    def times(self, replica: Replica) -> StepTimes:
        return step_times(
            replica, self.placement.workers_of(replica.id), self.cluster, self.costs, self.semantics
        )

    def batch(self, replica: Replica) -> int:
        """Requests that a replica decodes at a time: as planned, unless its memory holds fewer."""
        workers = self.placement.workers_of(replica.id)
        tokens = kv_capacity_tokens(replica, self.cluster, self.costs, workers)
        held = tokens / kv_tokens_held(replica, self.costs, bool(workers))
        return max(1, min(replica.max_batch, int(held)))

    def prompts_req_s(self, replica: Replica) -> float:
        """Prompts/s that a replica computes if it does nothing else."""
        tokens = replica.engine.step_tokens if replica.role == "prefill" else replica.engine.chunk_tokens
        times, prompts = self.times(replica), tokens / self.costs.isl
        step = phase_times(times, "prefill", prompts)
        return prefill_pace(self.semantics, step.stage_s, step.hop_s, prompts, times.in_flight).capacity_req_s

    def answers_req_s(self, replica: Replica) -> float:
        """Answers/s that a replica decodes if it does nothing else."""
        times, batch = self.times(replica), self.batch(replica)
        step = phase_times(times, "decode", micro_batch(self.semantics, batch, times.stages))
        return decode_pace(self.semantics, step.stage_s, step.hop_s, batch, self.costs.osl).capacity_req_s

    def own_req_s(self, replica: Replica) -> float:
        """Requests/s of which a colocated replica does both phases."""
        held = replica.model_copy(update={"max_batch": self.batch(replica)})
        return pace_of(held, self.times(replica)).capacity_req_s


def _under(replica: Replica, planned: _Side, other: _Side) -> Replica:
    """The replica with what it can do under the other lengths."""
    if replica.region is not None:
        prompts = other.prompts_req_s(replica) / planned.prompts_req_s(replica)
        answers = other.answers_req_s(replica) / planned.answers_req_s(replica)
        region = [(p * prompts, d * answers) for p, d in replica.region]
        changed = replica.model_copy(update={"region": region})
        return changed.model_copy(update={"capacity_req_s": 1 / changed.busy(1.0, 1.0)})
    if replica.role == "colocated":
        factor = other.own_req_s(replica) / planned.own_req_s(replica)
    elif replica.role == "prefill":
        factor = other.prompts_req_s(replica) / planned.prompts_req_s(replica)
    else:
        factor = other.answers_req_s(replica) / planned.answers_req_s(replica)
    return replica.model_copy(update={"capacity_req_s": replica.capacity_req_s * factor})
