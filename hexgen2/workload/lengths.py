"""Workloads: mixtures of request classes, each with its prompt and output lengths and its share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from cost_model.fields import Name, between
from cost_model.lengths import RequestLengths

MAX_TOKENS = 10_000_000  # per prompt or answer; beyond the context of any model
Isl = Annotated[float, Field(gt=0, allow_inf_nan=False), between(1e-3, MAX_TOKENS)]
Osl = Annotated[float, Field(ge=1, allow_inf_nan=False), between(1, MAX_TOKENS)]
Weight = Annotated[float, Field(gt=0, allow_inf_nan=False), between(1e-12, 1e12)]


class RequestClass(BaseModel):
    """Requests of one kind: mean prompt tokens, mean output tokens, share of all requests."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name
    isl: Isl
    osl: Osl
    weight: Weight = 1.0


class Workload(BaseModel):
    """A mixture of request classes; `source` states where the lengths come from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name
    classes: tuple[RequestClass, ...] = Field(min_length=1)
    source: Name = ""

    @property
    def lengths(self) -> RequestLengths:
        """The lengths and weights of the classes, as the cost model needs them."""
        return RequestLengths.of((c.isl, c.osl, c.weight) for c in self.classes)

    @property
    def isl(self) -> float:
        """Mean input sequence length, tokens."""
        return self.lengths.isl

    @property
    def osl(self) -> float:
        """Mean output sequence length, tokens."""
        return self.lengths.osl
