"""Workloads: how long prompts and answers are, and in which proportion they come."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from cost_model.lengths import RequestLengths


class RequestClass(BaseModel):
    """Requests of one kind: mean prompt tokens, mean output tokens, share of all requests."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    isl: float = Field(gt=0, allow_inf_nan=False)
    osl: float = Field(ge=1, allow_inf_nan=False)
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)


class Workload(BaseModel):
    """A mixture of request classes. `source` says where the lengths come from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    classes: tuple[RequestClass, ...] = Field(min_length=1)
    source: str = ""

    @property
    def lengths(self) -> RequestLengths:
        """What costs depend on: the classes' lengths and weights."""
        return RequestLengths.of((c.isl, c.osl, c.weight) for c in self.classes)

    @property
    def isl(self) -> float:
        """Mean input sequence length, tokens."""
        return self.lengths.isl

    @property
    def osl(self) -> float:
        """Mean output sequence length, tokens."""
        return self.lengths.osl
