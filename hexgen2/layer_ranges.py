"""Placements whose replicas hold overlapping ranges of layers (Helix): what they record, and how requests
flow.

Such a placement has one replica of one stage per node, which holds layers [first, end). A route leads from a
replica to one at which a request may go on; it begins where a replica holds the first layer, and ends where
one holds the last. What enters and leaves at each replica follows from what passes it and from its routes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from cost_model.errors import InputError
from cost_model.fields import Name
from hexgen2.moves import Figure
from hexgen2.replica import Replica

if TYPE_CHECKING:
    from hexgen2.placement import Placement, Route

TOLERANCE = 1e-6
"""Of sums of flows."""

Violation = tuple[str, str]


class LayerRanges(BaseModel):
    """That replicas hold ranges of layers, and each request takes a path of its own through them.

    partial_inference : whether a request may enter a replica after its first layer, and skip what it has
        passed
    latency_aware : whether the search maximised kept_up_req_s, in place of the flow
    kept_up_req_s : the part of the flow that KV caches have room for, given how long requests are under way
        (hexgen2/search/layer_ranges/service.py); None in older placements
    tables : where tokens/s were given: those of each type of node by layers held, from one layer on
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    partial_inference: bool = False
    latency_aware: bool = Field(default=False, exclude_if=lambda aware: not aware)
    kept_up_req_s: Figure | None = Field(default=None, exclude_if=lambda figure: figure is None)
    tables: dict[Name, list[Figure]] | None = Field(default=None, exclude_if=lambda tables: tables is None)


class Passing(NamedTuple):
    """Requests/s that enter the pipeline at a replica, pass it, and leave the pipeline there."""

    entering: float
    passing: float
    leaving: float


def whole_models_only(placement: Placement, source: str, what: str) -> None:
    """Refuse a placement whose replicas hold parts of the model, which `what` does not know.

    Raises
    ------
    InputError : it is one
    """
    if placement.layer_ranges is not None:
        problem = (
            f"{placement.strategy} divides the model into ranges of layers, which {what} does not support"
        )
        raise InputError(source, "layer_ranges", problem, "search with another --strategy")


def range_of(replica: Replica) -> tuple[int, int]:
    """The layers [first, end) of a replica of one stage."""
    return replica.stages[0].layers


def may_follow(before: Replica, after: Replica, partial: bool) -> bool:
    """Whether a request may go from one replica to the other (Helix, section 4.3)."""
    (_, end), (first, last) = range_of(before), range_of(after)
    return first <= end < last if partial else first == end


def passing(replicas: Sequence[Replica], routes: Iterable[Route]) -> dict[str, Passing]:
    """The flow at each replica: what its routes do not bring enters there, and what they do not take
    leaves."""
    sent: dict[str, list[float]] = defaultdict(list)
    received: dict[str, list[float]] = defaultdict(list)
    for route in routes:
        sent[route.from_].append(route.flow_req_s)
        received[route.to].append(route.flow_req_s)
    found = {}
    for replica in replicas:
        through = replica.utilisation * replica.capacity_req_s
        into, out = math.fsum(received[replica.id]), math.fsum(sent[replica.id])
        found[replica.id] = Passing(
            _unless_tiny(through - into, through), through, _unless_tiny(through - out, through)
        )
    return found


def _unless_tiny(difference: float, of: float) -> float:
    return 0.0 if abs(difference) <= TOLERANCE * of else difference


def check_ranges(placement: Placement) -> Iterator[Violation]:
    """Each replica is one stage with some of the model's layers; routes lead on from where a range ends."""
    ranges = placement.layer_ranges
    assert ranges is not None
    for r, replica in enumerate(placement.replicas):
        key = f"replicas[{r}]"
        if replica.role != "colocated":
            yield f"{key}.role", f"is {replica.role}, where ranges of layers are held by colocated replicas"
        if len(replica.stages) != 1:
            yield f"{key}.stages", f"are {len(replica.stages)}, where a range of layers is one"
        first, end = range_of(replica)
        if not 0 <= first < end <= placement.model.layers:
            yield f"{key}.stages[0].layers", f"[{first}, {end}) are not layers of {placement.model.layers}"
    replicas, seen = {replica.id: replica for replica in placement.replicas}, set()
    for k, route in enumerate(placement.routes):
        key = f"routes[{k}]"
        unknown = [end for end in (route.from_, route.to) if end not in replicas]
        if unknown:
            yield key, f"there is no replica '{unknown[0]}'"
        elif not may_follow(replicas[route.from_], replicas[route.to], ranges.partial_inference):
            (_, end), (first, last) = range_of(replicas[route.from_]), range_of(replicas[route.to])
            yield key, f"leads on after layer {end - 1} to a replica with layers {first} to {last - 1}"
        if (route.from_, route.to) in seen:
            yield key, f"{route.from_} -> {route.to} is listed twice"
        seen.add((route.from_, route.to))


def check_range_flow(placement: Placement) -> Iterator[Violation]:
    """No replica or route carries more than it can, requests enter at the first layer and leave at the last,
    and where tokens/s were given, no replica can do more than these."""
    assert placement.layer_ranges is not None
    tokens, tables = placement.workload.isl + placement.workload.osl, placement.layer_ranges.tables
    types = {node.name: node.accelerators.rpartition(":")[0] for node in placement.cluster.nodes}
    for k, route in enumerate(placement.routes):
        if route.flow_req_s > route.capacity_req_s * (1 + TOLERANCE):
            yield f"routes[{k}].flow_req_s", f"{route.flow_req_s:.6g} exceeds {route.capacity_req_s:.6g}"
    flows = passing(placement.replicas, placement.routes)
    for r, replica in enumerate(placement.replicas):
        (first, end), flow, key = range_of(replica), flows[replica.id], f"replicas[{r}]"
        if replica.utilisation > 1 + TOLERANCE:
            yield f"{key}.utilisation", f"is {replica.utilisation:.6g}, more than 1"
        if flow.entering < 0 or (flow.entering > 0 and first > 0):
            yield f"{key}.utilisation", f"does not agree with the routes to {replica.id}"
        if flow.leaving < 0 or (flow.leaving > 0 and end < placement.model.layers):
            yield f"{key}.utilisation", f"does not agree with the routes from {replica.id}"
        if tables is not None:
            table = tables.get(types[replica.stages[0].gpus[0].split("/")[0]], [])
            given = table[end - first - 1] if end - first <= len(table) else 0.0
            if replica.capacity_req_s * tokens > given * (1 + TOLERANCE):
                yield (
                    f"{key}.capacity_req_s",
                    f"is more than {given:.6g} tokens/s, as given for {end - first} layers",
                )


def served_req_s(placement: Placement) -> float:
    """Requests/s that enter at all replicas together."""
    return math.fsum(flow.entering for flow in passing(placement.replicas, placement.routes).values())


def places_in_ranges(placement: Placement) -> int:
    """Requests that such a placement decodes at a time at most: by the layer whose replicas hold fewest."""
    held = [0] * placement.model.layers
    for replica in placement.replicas:
        for layer in range(*range_of(replica)):
            held[layer] += replica.max_batch
    return min(held)
