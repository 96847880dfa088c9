"""What a search is asked for: the objective, the load and the targets, and what may be spent."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cost_model.errors import InputError
from cost_model.fields import between, schema_error

Objective = Literal["throughput", "goodput", "cost", "latency"]
SMALLEST, LARGEST = 1e-9, 1e12
"""What rates, targets, times and prices may be; the command line has the same limits."""

Amount = Annotated[float, Field(gt=0, allow_inf_nan=False), between(SMALLEST, LARGEST)]
OBJECTIVES: tuple[str, ...] = get_args(Objective)


class Goal(BaseModel):
    """The question beside cluster, model and workload.

    Attributes
    ----------
    objective : "throughput" (requests/s), "goodput" (requests/s of which `attainment` meet the targets),
        "cost" (the cheapest rental that carries request_rate), "latency" (at request_rate)
    request_rate : requests/s that arrive, at random (Poisson)
    ttft_ms, tpot_ms : targets for the time to first token and the time per output token, queueing included
    attainment : share of requests that must meet both targets
    budget_per_hour : US dollars per hour that the GPUs in use may cost
    frontier : number of budgets up to budget_per_hour for which the best rental is listed
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    objective: Objective = "throughput"
    request_rate: Amount | None = None
    ttft_ms: Amount | None = None
    tpot_ms: Amount | None = None
    attainment: Annotated[float, Field(gt=0, lt=1), between(1e-6, 1 - 1e-9)] = 0.9
    budget_per_hour: Amount | None = None
    frontier: Annotated[int, Field(ge=2), between(2, 1000)] | None = None

    @property
    def rents(self) -> bool:
        """Whether GPUs are chosen by their price, from nodes and offers; else all nodes are there to use."""
        return self.budget_per_hour is not None or self.objective == "cost" or self.frontier is not None


def make_goal(
    objective: str = "throughput",
    request_rate: float | None = None,
    ttft_ms: float | None = None,
    tpot_ms: float | None = None,
    budget_per_hour: float | None = None,
    frontier: int | None = None,
) -> Goal:
    """A goal from options, complete and without contradictions.

    Raises
    ------
    InputError : a value out of range, or see check_goal
    """
    try:
        goal = Goal(
            objective=objective,  # type: ignore[arg-type]
            request_rate=request_rate,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            budget_per_hour=budget_per_hour,
            frontier=frontier,
        )
    except ValidationError as error:
        raise schema_error(error, "goal", "correct it") from None
    check_goal(goal)
    return goal


def check_goal(goal: Goal) -> None:
    """Refuse an objective without what it needs, or with what it cannot consider.

    Raises
    ------
    InputError
    """
    objective = goal.objective
    if objective == "goodput" and goal.ttft_ms is None and goal.tpot_ms is None:
        raise InputError("--objective", "goodput", "needs a target", "give --ttft, --tpot or both")
    if objective in ("cost", "latency") and goal.request_rate is None:
        raise InputError("--objective", objective, "needs a load", "give --request-rate")
    if objective == "latency" and (goal.budget_per_hour is not None or goal.frontier is not None):
        option = "--frontier" if goal.budget_per_hour is None else "--budget"
        raise InputError(option, "", "does not go with --objective latency", "leave one of them out")
    if objective == "cost" and goal.frontier is not None:
        raise InputError("--frontier", "", "does not go with --objective cost", "leave one of them out")
