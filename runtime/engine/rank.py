"""A worker's position in its replica."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.protocol.message import StageShape


@dataclass(frozen=True, slots=True)
class Rank:
    """A worker's pipeline stage and tensor-parallel rank. Global ranks count stage by stage. The model has so
    many layers (0: as many as the stages), of which a replica may hold a range."""

    stages: tuple[StageShape, ...]
    stage_index: int
    tp_rank: int
    model_layers: int = 0

    @classmethod
    def find(cls, stages: tuple[StageShape, ...], worker: str, model_layers: int = 0) -> Rank:
        """The rank of a worker; KeyError if no stage has it."""
        for index, stage in enumerate(stages):
            if worker in stage.workers:
                return cls(stages, index, stage.workers.index(worker), model_layers)
        raise KeyError(worker)

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return self.model_layers or self.stages[-1].end_layer

    @property
    def stage(self) -> StageShape:
        return self.stages[self.stage_index]

    @property
    def tp(self) -> int:
        return len(self.stage.workers)

    @property
    def is_first(self) -> bool:
        """Whether its stage has the model's first layer."""
        return self.stage.first_layer == 0

    @property
    def is_last(self) -> bool:
        """Whether its stage has the model's last layer."""
        return self.stage.end_layer == self.layers

    @property
    def is_driver(self) -> bool:
        """Whether this worker takes the replica's requests and makes its steps."""
        return self.stage_index == 0 and self.tp_rank == 0

    @property
    def samples(self) -> bool:
        """Whether this worker gets the logits and samples tokens."""
        return self.is_last and self.tp_rank == 0

    @property
    def workers(self) -> tuple[str, ...]:
        """All workers of the replica, by global rank."""
        return tuple(worker for stage in self.stages for worker in stage.workers)

    def ranks(self, stage_index: int) -> list[int]:
        """The global ranks of a stage's workers."""
        first = sum(len(stage.workers) for stage in self.stages[:stage_index])
        return list(range(first, first + len(self.stages[stage_index].workers)))
