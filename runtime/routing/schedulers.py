"""The schedulers by name: routers that give replicas other shares than the placement's flow does.

All of them choose among the routes that have room, and go around lost replicas as the flow does.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from cost_model.errors import InputError
from hexgen2.schedulers import FLOW, MEMORY, ROUND_ROBIN, SINGLE, WEIGHTED, WORKLOAD_AWARE
from runtime.routing.kv_budget import KvBudget
from runtime.routing.output_lengths import OutputLengths
from runtime.routing.router import Route, Router
from runtime.routing.workload_router import WorkloadRouter

Replicas = Mapping[str, KvBudget]
Weigh = Callable[[Sequence[Route], Replicas], Iterable[Route]]
"""Gives routes other weights; those that it leaves out are never taken."""


class WeighedRouter(Router):
    """A router by the flow's algorithm, over routes with other weights."""

    def __init__(self, routes: Iterable[Route], weigh: Weigh, replicas: Replicas | None = None) -> None:
        self._weigh, self._replicas = weigh, {} if replicas is None else replicas
        planned = tuple(routes)
        super().__init__(weigh(planned, self._replicas))
        self.planned = planned

    def among(self, replicas: Replicas) -> Router:
        return WeighedRouter(self.planned, self._weigh, replicas)

    def _over(self, routes: Iterable[Route]) -> Router:
        return WeighedRouter(routes, self._weigh, self._replicas)


def _in_turn(routes: Sequence[Route], _: Replicas) -> Iterable[Route]:
    """All routes with a flow alike."""
    return [replace(route, weight=float(route.weight > 0)) for route in routes]


def _by_gpus(routes: Sequence[Route], replicas: Replicas) -> Iterable[Route]:
    """By the GPUs of the replica that decodes; its routes divide that as they do its flow."""
    into: dict[str, float] = {}
    for route in routes:
        into[route.decode] = into.get(route.decode, 0.0) + route.weight
    return [
        replace(route, weight=_gpus(route, replicas) * route.weight / into[route.decode])
        if route.weight > 0
        else route
        for route in routes
    ]


def _gpus(route: Route, replicas: Replicas) -> int:
    known = replicas.get(route.decode)
    return known.instance.gpus if known and known.instance else 1


def _strongest(routes: Sequence[Route], _: Replicas) -> Iterable[Route]:
    """Only the route with the greatest flow, or the first of those."""
    return [max(routes, key=lambda route: route.weight)] if routes else []


MAKE: dict[str, Callable[[Iterable[Route], OutputLengths], Router]] = {
    FLOW: lambda routes, _: Router(routes),
    WORKLOAD_AWARE: WorkloadRouter,
    MEMORY: lambda routes, lengths: WorkloadRouter(routes, lengths, by_time=False, as_printed=True),
    ROUND_ROBIN: lambda routes, _: WeighedRouter(routes, _in_turn),
    WEIGHTED: lambda routes, _: WeighedRouter(routes, _by_gpus),
    SINGLE: lambda routes, _: WeighedRouter(routes, _strongest),
}
"""What makes the router of each scheduler."""
WITH_INSTANCES = (WORKLOAD_AWARE, WEIGHTED)
"""Schedulers that need to know the replicas' instances."""


def needs_instances(scheduler: str | Router | None) -> bool:
    """Whether replicas have to know what they are; for a router that was made elsewhere, they do."""
    return scheduler in WITH_INSTANCES or isinstance(scheduler, Router)


def make_router(name: str | Router | None, routes: Iterable[Route], lengths: OutputLengths) -> Router:
    """The router of that scheduler over these routes; None: by the flow.

    Parameters
    ----------
    name : or a router, of whose kind it is then

    Raises
    ------
    InputError : unknown name; the nearest known is suggested
    """
    if isinstance(name, Router):
        return name.with_routes(routes)
    name = name or FLOW
    if name in MAKE:
        return MAKE[name](routes, lengths)
    near = difflib.get_close_matches(name, MAKE, n=1)
    remedy = f"did you mean '{near[0]}'?" if near else f"use one of {', '.join(MAKE)}"
    raise InputError("--scheduler", "", f"unknown scheduler '{name}'", remedy)
