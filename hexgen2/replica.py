"""Replicas of a placement and their pipeline stages: which GPUs hold what."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from cost_model.base import CHUNK_TOKENS, PREFILL_TOKENS, TensorGroup
from cost_model.fields import Name, between
from cost_model.hardware import NO_LINK, Accelerator, Link
from cost_model.pipeline import PipelineSemantics
from hexgen2.moves import Figure
from hexgen2.region import Region

Role = Literal["prefill", "decode", "colocated", "mixed"]
Layer = Annotated[int, between(-1, 10**8)]
Count = Annotated[int, Field(gt=0), between(1, 10**9)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class Stage(_Strict):
    """One pipeline stage: the tensor-parallel degree is len(gpus); layers is [first, end).

    attention_data_parallel : equal groups of consecutive GPUs, each of which runs attention for requests of
        its own; a request's KV cache lies in one of them
    expert_parallel : equal groups of GPUs, each of which holds some of the experts of every layer
    """

    gpus: list[Name] = Field(min_length=1)
    layers: tuple[Layer, Layer]
    attention_data_parallel: Count = 1
    expert_parallel: Count = 1

    @model_serializer(mode="wrap")
    def _without_unused(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Degrees of 1 are left out, so that placements made before there were others keep their bytes."""
        fields: dict[str, Any] = dump(self)
        degrees = ("attention_data_parallel", "expert_parallel")
        return {key: value for key, value in fields.items() if key not in degrees or value > 1}

    @property
    def tensor_parallel(self) -> int:
        """The tensor-parallel degree."""
        return len(self.gpus)

    @property
    def attention_degree(self) -> int:
        """GPUs that share the attention of one request; exact for degrees that pass the checks."""
        return len(self.gpus) // self.attention_data_parallel

    @property
    def layer_count(self) -> int:
        """How many layers it holds."""
        return self.layers[1] - self.layers[0]

    @property
    def shape(self) -> str:
        """For example "tp8", or "tp8dp8ep4" with 8 attention groups and the experts in 4 parts: each degree
        is out of all GPUs of the stage."""
        attention = f"dp{self.attention_data_parallel}" if self.attention_data_parallel > 1 else ""
        experts = f"ep{self.expert_parallel}" if self.expert_parallel > 1 else ""
        return f"tp{self.tensor_parallel}{attention}{experts}"

    def tensor_group(self, accelerator: Accelerator, link: Link = NO_LINK) -> TensorGroup:
        """The stage as cost models see it, on GPUs of this type joined by this link."""
        degrees = (self.attention_data_parallel, self.expert_parallel)
        return TensorGroup(accelerator, self.tensor_parallel, link, *degrees)


class EngineSettings(_Strict):
    """How the engine of a replica fills its steps: chosen by the plan, obeyed by the simulator and the
    runtime. Placements from before they were written down have these defaults.

    step_tokens : most prompt tokens in a step
    chunk_tokens : most prompt tokens in a step that also decodes
    in_flight : most steps that are under way at the same time; None: one per pipeline stage
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step_tokens: Count = PREFILL_TOKENS
    chunk_tokens: Count = CHUNK_TOKENS
    in_flight: Count | None = None

    def explicit(self, semantics: PipelineSemantics, stages: int) -> EngineSettings:
        """The same with in_flight as a number, in a replica of so many stages."""
        return self.model_copy(update={"in_flight": self.steps_in_flight(semantics, stages)})

    def steps_in_flight(self, semantics: PipelineSemantics, stages: int) -> int:
        """Most steps under way at the same time in a replica of so many stages."""
        return self.in_flight or (stages if semantics == "pipelined" else 1)


class Replica(_Strict):
    """One copy of the model.

    Attributes
    ----------
    role : what it does with a request: its prompt, the rest of it, all of it, or ("mixed") each of these,
        also for requests that other replicas begin or end
    capacity_req_s : what it can process alone (within the goal's targets, if the placement is to keep them)
    utilisation : the share of that in use; of a mixed replica, of its region (see Region.busy)
    region : of a mixed replica, the corners of what it can do, as prompts/s and answers/s
    """

    id: Name
    role: Role
    stages: list[Stage] = Field(min_length=1)
    max_batch: Count
    capacity_req_s: Figure
    utilisation: Figure = 0.0
    engine: EngineSettings = EngineSettings()
    region: list[tuple[Figure, Figure]] | None = Field(
        default=None, min_length=2, exclude_if=lambda corners: corners is None
    )

    @model_validator(mode="after")
    def _region_of_mixed(self) -> Replica:
        if (self.role == "mixed") != (self.region is not None):
            raise PydanticCustomError("region", "a mixed replica has a region, and no other has one")
        if self.region is not None and not Region(tuple(self.region)).sound:
            text = (
                "the corners of a region are those of a convex polygon, from (0, answers/s) to (prompts/s, 0)"
            )
            raise PydanticCustomError("region", text)
        return self

    @property
    def role_of_group(self) -> str:
        """Its role while a search plans it: a mixed replica is a colocated one that works for others, too."""
        return "colocated" if self.role == "mixed" else self.role

    @property
    def decodes(self) -> bool:
        """Whether it decodes any requests."""
        return self.role != "prefill"

    @property
    def prefills_for_others(self) -> bool:
        """Whether it may compute prompts that another replica continues."""
        return self.role in ("prefill", "mixed")

    @property
    def decodes_for_others(self) -> bool:
        """Whether it may continue prompts that another replica computed."""
        return self.role in ("decode", "mixed")

    def busy(self, prompts: float, answers: float) -> float:
        """The share of a mixed replica's region that so many prompts/s and answers/s take."""
        assert self.region is not None
        return Region(tuple(self.region)).busy(prompts, answers)

    @property
    def gpus(self) -> list[str]:
        """All GPUs, in the order of the stages."""
        return [gpu for stage in self.stages for gpu in stage.gpus]

    @property
    def shape(self) -> str:
        """For example "tp2,tp1": the degrees of each stage."""
        return ",".join(stage.shape for stage in self.stages)

    @property
    def attention_data_parallel(self) -> int:
        """Attention groups of each stage (all have the same number), between which its requests are
        divided."""
        return self.stages[0].attention_data_parallel
