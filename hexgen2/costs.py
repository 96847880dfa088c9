"""What a placement says of the cost model that it was planned with, and that cost model."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from cost_model.architecture import ModelArchitecture
from cost_model.base import CostModel
from cost_model.calibrated import Calibrated
from cost_model.coefficients import CoefficientSet, fitted
from cost_model.engines.model import ENGINES
from cost_model.engines.numbers import EngineFits
from cost_model.fields import Name
from cost_model.hardware import Accelerator
from cost_model.lengths import RequestLengths
from cost_model.registry import CostSource
from hexgen2.moves import Figure
from hexgen2.network.shared_links import Links


class CostModelName(BaseModel):
    """How times were predicted, with all that is needed to predict them again.

    error is the mean relative error to expect of times on the placement's devices; unmeasured are those
    types of them of which no step was measured. coefficients (of "calibrated") or engines (of an engine's
    cost model) are the calibration that was given instead of the one that ships, and engine is the one of
    the coefficients' engines that was asked for; where they were not given, they are absent."""

    model_config = ConfigDict(extra="forbid")

    name: Name
    calibration: Name
    engine: Name | None = None
    coefficients: CoefficientSet | None = None
    engines: EngineFits | None = None
    error: Figure | None = None
    unmeasured: list[Name] = []
    pipeline: Name
    links: Links = "pairwise"

    @classmethod
    def of(
        cls, costs: CostModel, pipeline: str, links: Links, cards: Collection[Accelerator] = ()
    ) -> CostModelName:
        """The record of a cost model, with the error of its times on these types of devices, if any."""
        source = costs.source or CostSource(costs.name)
        return cls(
            name=costs.name,
            calibration=costs.calibration,
            engine=source.engine,
            coefficients=source.coefficients,
            engines=source.engines,
            pipeline=pipeline,
            links=links,
            error=max((costs.error(card) for card in cards), default=None),
            unmeasured=sorted(card.name for card in cards if not costs.measured(card)),
        )

    @property
    def source(self) -> CostSource:
        """What the cost model is made from."""
        return CostSource(self.name, self.coefficients, self.engine, self.engines)

    def costs(self, model: ModelArchitecture, lengths: RequestLengths) -> CostModel:
        """The cost model for this model and requests of these lengths.

        Raises
        ------
        InputError : unknown name
        """
        return self.source.costs(model, lengths)

    @model_validator(mode="after")
    def _of_its_kind(self) -> CostModelName:
        """A calibration has to be one of the named cost model."""
        known = self.coefficients or fitted()
        if (self.coefficients or self.engine) and self.name != Calibrated.name:
            raise PydanticCustomError("calibration", "coefficients and engine go with the name calibrated")
        if self.engine is not None and self.engine not in known.engines:
            raise PydanticCustomError("calibration", "engine should be one that the coefficients know")
        if self.engines is not None and (self.name not in ENGINES or self.name not in self.engines.engines):
            raise PydanticCustomError("calibration", "engines should have the engine that is the name")
        return self

    @model_serializer(mode="wrap")
    def _without_unused(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the calibration's fields where none was given, so that the bytes of placements are those
        from before there were such fields."""
        fields: dict[str, Any] = dump(self)
        given = ("engine", "coefficients", "engines")
        return {key: value for key, value in fields.items() if key not in given or value is not None}
