"""Moves: what changes between two placements, and what the change costs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from cost_model.fields import Name, Prose, between

Action = Literal["keep", "turn", "restart", "reload", "start", "stop"]
LARGEST = 1e30
"""The largest value of any number in a placement: rates, bytes, seconds, prices."""

Positive = Annotated[float, Field(gt=0), between(1e-9, 1e12)]
Figure = Annotated[float, Field(ge=0), between(0, LARGEST)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class Move(_Strict):
    """What happens to one replica.

    keep: it goes on running. turn: the same stages on the same GPUs, in another role or with other engine
    settings; it empties first and loads nothing. restart: the same, in placements of older versions. reload:
    its stages change, and it loads the weights that its GPUs do not hold yet. start: it is new. stop: it
    ends.

    Attributes
    ----------
    replica : id in the new placement (of a "stop": in the old one)
    from_ : id in the old placement, if any
    gpus : those of the new replica, in the order of its stages (of a "stop": those that it frees)
    load_bytes : weights that its GPUs load, in total
    drain_s : until the replicas that its GPUs served have finished what they were doing
    load_s : for restarting and loading, or turning, after that
    """

    action: Action
    replica: Name
    from_: Name | None = Field(alias="from")
    gpus: list[Name]
    load_bytes: Figure
    drain_s: Figure
    load_s: Figure


class Cost(_Strict):
    """The throughput of a placement once it runs, and what getting there costs."""

    req_s: Figure
    load_bytes: Figure
    missed_requests: Figure


class Migration(_Strict):
    """The trade-off of a re-plan, which maximises req_s * horizon_s - missed_requests.

    Attributes
    ----------
    before_req_s : of the old placement, under its own workload
    unchanged_req_s : of what is left of it, under this workload, if nothing changes
    chosen : this placement
    free : the best placement found if moves cost nothing
    """

    horizon_s: Positive
    load_gbyte_s: Positive
    restart_s: Figure
    before_req_s: Figure
    unchanged_req_s: Figure
    chosen: Cost
    free: Cost
    assumptions: list[Prose]
