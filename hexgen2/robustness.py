"""What a placement says of how it fares where the costs that it was planned with are off."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from cost_model.fields import Name, Prose, between
from hexgen2.moves import LARGEST, Figure

Share = Annotated[float, Field(ge=0, le=1), between(0, 1)]
Count = Annotated[int, Field(ge=0), between(0, LARGEST)]
Measure = Literal["goodput_req_s", "throughput_req_s", "mean_e2el_s"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class CostError(_Strict):
    """The mean relative error of one kind of figure, and who states or assumes it."""

    of: Name
    error: Figure
    source: Prose


class FinalistRobustness(_Strict):
    """How one finalist fares under the perturbations; figures are of the record's measure.

    Attributes
    ----------
    replicas : roles, and stages by their tensor-parallel degrees
    nominal : without errors
    mean : over the perturbations
    p10 : what nine of ten perturbations reach or better; of a latency, the 90th percentile. Latencies are
        absent where the load is not carried
    best_share : of the perturbations in which no other finalist is better by more than the noise
    worst_regret, mean_regret : how much better the best finalist under the same perturbation is, as a share
        of that best one (of latencies, of this one)
    """

    replicas: Prose
    nominal: Figure | None
    mean: Figure | None
    p10: Figure | None
    best_share: Share
    worst_regret: Share
    mean_regret: Share
    chosen: bool = False


class Robustness(_Strict):
    """The finalists of a search under perturbed costs, the same perturbations for all of them. The first is
    the answer of the same search without --robust, and one is `chosen`: that of the best p10."""

    measure: Measure
    perturbations: Count
    errors: list[CostError]
    assumptions: list[Prose]
    finalists: list[FinalistRobustness]

    @property
    def chosen(self) -> FinalistRobustness | None:
        """The finalist that the placement is; None if there were no perturbations."""
        return next((one for one in self.finalists if one.chosen), None)
