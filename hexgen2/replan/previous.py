"""The running placement as a re-plan sees it: which replicas survive, and which weights each GPU holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hexgen2.placement import Placement, Stage
from hexgen2.placement import Replica as PlacedReplica
from hexgen2.replica import EngineSettings
from hexgen2.search.planning.plan import PlannedStage
from hexgen2.search.planning.shards import Shard, shards_of
from hexgen2.search.problem import Group, NodeCounts, Problem, counts_of


@dataclass(frozen=True, eq=False)
class OldReplica:
    """A replica of the running placement, which may have lost GPUs.

    Attributes
    ----------
    role, placed_role : of the group that a search plans, and in the placement (which may be "mixed")
    stages : None if the replica is broken, or has a stage across nodes, which the planner never makes
    gpus : indices by stage and rank; None for a lost GPU
    shards : the weights that each GPU holds, by stage and rank
    drain_s : mean time that a request stays in the replica; 0 if it is broken
    alive : whether it has lost no GPU
    """

    id: str
    role: str
    placed_role: str
    batch: int
    engine: EngineSettings
    stages: tuple[PlannedStage, ...] | None
    gpus: tuple[tuple[int | None, ...], ...]
    shards: list[list[Shard]]
    drain_s: float
    alive: bool

    @cached_property
    def counts(self) -> NodeCounts:
        """Number of GPUs of an intact replica, per node."""
        return _count(stage.node for stage in self.stages or () for _ in range(stage.degree))


class Previous:
    """The replicas of a placement on a cluster that may have changed since.

    Attributes
    ----------
    held : GPU index -> the weights that it holds
    drain_s : GPU index -> seconds until its replica has drained
    """

    def __init__(self, problem: Problem, placement: Placement) -> None:
        self.placement = placement
        self._problem = problem
        self._index = _surviving(problem, placement)
        self.replicas = [self._replica(replica) for replica in placement.replicas]
        self.held: dict[int, Shard] = {}
        self.drain_s: dict[int, float] = {}
        for old in self.replicas:
            for gpus, shards in zip(old.gpus, old.shards, strict=True):
                for gpu, shard in zip(gpus, shards, strict=True):
                    if gpu is not None:
                        self.held[gpu] = shard
                        self.drain_s[gpu] = old.drain_s

    @property
    def intact(self) -> list[OldReplica]:
        """Replicas that can continue as they are."""
        return [old for old in self.replicas if old.stages is not None]

    def remains(self) -> list[Group]:
        """The surviving GPUs of each broken replica, as a group of the same role."""
        node_of = self._problem.cluster.node_of
        return [
            Group(old.role, counts)
            for old in self.replicas
            if not old.alive
            and (counts := _count(int(node_of[g]) for gpus in old.gpus for g in gpus if g is not None))
        ]

    def _replica(self, replica: PlacedReplica) -> OldReplica:
        gpus = tuple(tuple(self._index.get(gpu) for gpu in stage.gpus) for stage in replica.stages)
        alive = all(gpu is not None for stage in gpus for gpu in stage)
        return OldReplica(
            id=replica.id,
            role=replica.role_of_group,
            placed_role=replica.role,
            batch=replica.max_batch,
            engine=replica.engine.explicit(self.placement.cost_model.pipeline, len(replica.stages)),  # type: ignore[arg-type]
            stages=self._stages(replica, gpus) if alive else None,
            gpus=gpus,
            shards=shards_of([_degrees(stage) for stage in replica.stages]),
            drain_s=drain_s(replica, self.placement.cost_model.pipeline) if alive else 0.0,
            alive=alive,
        )

    def _stages(
        self, replica: PlacedReplica, gpus: tuple[tuple[int | None, ...], ...]
    ) -> tuple[PlannedStage, ...] | None:
        node_of = self._problem.cluster.node_of
        nodes = [{int(node_of[g]) for g in stage} for stage in gpus]
        if any(len(names) > 1 for names in nodes):
            return None
        return tuple(
            PlannedStage(min(names), *_degrees(stage))
            for names, stage in zip(nodes, replica.stages, strict=True)
        )


def _degrees(stage: Stage) -> tuple[int, int, int, int]:
    """GPUs, layers, attention groups and parts of the experts of a stage."""
    return stage.tensor_parallel, stage.layer_count, stage.attention_data_parallel, stage.expert_parallel


def drain_s(replica: PlacedReplica, pipeline: str) -> float:
    """Mean seconds that a request stays in a busy replica, by Little's law: requests inside / (requests/s).

    A full batch is inside, or one batch per stage (see cost_model.pipeline).
    """
    own = "prefill" if pipeline == "pipelined" else "decode" if pipeline == "paper_optimistic" else None
    batches = len(replica.stages) if replica.role == own else 1
    return replica.max_batch * batches / replica.capacity_req_s if replica.capacity_req_s > 0 else 0.0


def _surviving(problem: Problem, placement: Placement) -> dict[str, int]:
    """GPU id -> index, for the usable GPUs that were in the placement's cluster with the same type."""
    old = {node.name: node.accelerators.split(":")[0] for node in placement.cluster.nodes}
    found = {}
    for gpu in problem.usable.tolist():
        name = problem.cluster.gpu_ids[gpu]
        if old.get(name.rsplit("/", 1)[0]) == problem.cluster.accelerators[gpu].name:
            found[name] = gpu
    return found


def _count(nodes) -> NodeCounts:
    counts: dict[int, int] = {}
    for node in nodes:
        counts[node] = counts.get(node, 0) + 1
    return counts_of(counts)
