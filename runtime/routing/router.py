"""Picks the prefill and the decode replica of each request, by interleaved weighted round-robin.

The weights are the placement's flows, so traffic follows the plan of the search. This file needs neither
torch nor asyncio: the runtime and the simulator share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from hexgen2.placement import Placement


@dataclass(frozen=True, slots=True)
class Route:
    """A replica that prefills and the one that continues its requests; the same one if colocated, which a
    mixed replica is for the requests that it serves alone.

    weight is the flow of the placement in requests per second (only proportions matter); a route with
    weight 0 is a spare.
    """

    prefill: str
    decode: str
    weight: float

    @property
    def colocated(self) -> bool:
        return self.prefill == self.decode


def routes_of(placement: Placement) -> list[Route]:
    """The routes of a placement, one per pair of replicas, in its order.

    A colocated replica is a route to itself, weighted with its planned load; a mixed one has such a route in
    the placement.
    """
    flows = {(route.from_, route.to): route.flow_req_s for route in placement.routes}
    for replica in placement.replicas:
        if replica.role == "colocated":
            flows[replica.id, replica.id] = replica.capacity_req_s * replica.utilisation
    return [Route(prefill, decode, flow) for (prefill, decode), flow in flows.items()]


def routes_without(routes: Iterable[Route], lost: Collection[str]) -> list[Route]:
    """The routes that use no lost replica."""
    return [route for route in routes if route.prefill not in lost and route.decode not in lost]


@dataclass(slots=True)
class _Standing:
    """A route with its credit: the share of requests that it was due but has not been picked for yet."""

    route: Route
    weight: float
    credit: float = 0.0


def _always(_: Route) -> bool:
    return True


class Router:
    """Interleaved weighted round-robin over routes.

    Each pick credits every admissible route with its share of one request, and charges the picked route
    one. Among the routes that are due, the one that must be picked soonest is next.

    Notes
    -----
    This is Tijdeman's algorithm: while every route is admissible, after any N picks each route was
    picked within 1 - 1/(2n-2) of N * weight / sum(weights), with n routes. So there are no bursts.
    A route that is not admissible keeps its credit, and the others keep their proportions among each other;
    once it has room it continues with that credit, neither starved nor catching up in a burst.

    Spares (weight 0) are used only while no other route is admissible, the least used first. With
    room counted per decode replica that means: a spare only ever leads to a decode replica that the
    placement left idle, or that lost its other routes.

    References
    ----------
    R. Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980).
    """

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._standing = [_Standing(route, route.weight) for route in self.routes if route.weight > 0]
        self._total = math.fsum([standing.weight for standing in self._standing])
        self._spare_uses = {route: 0 for route in self.routes if route.weight <= 0}
        self._margin = 1 / (2 * max(len(self._standing), 2) - 2)

    def pick(self, admissible: Callable[[Route], bool] = _always) -> Route | None:
        """The route of the next request; None, which changes nothing, if no route is admissible."""
        candidates = [standing for standing in self._standing if admissible(standing.route)]
        if not candidates:
            return self._pick_spare(admissible)
        total = self._total
        if len(candidates) < len(self._standing):
            total = math.fsum([standing.weight for standing in candidates])
        margin, picked, first = self._margin, candidates[0], (True, math.inf)
        for standing in candidates:
            standing.credit = credit = standing.credit + standing.weight / total
            # Those that are due first; of these, by the time until they must be picked, up to a factor.
            order = credit < margin, (1 - margin - credit) / standing.weight
            if order < first:
                picked, first = standing, order
        picked.credit -= 1
        return picked.route

    def with_routes(self, routes: Iterable[Route]) -> Router:
        """A router over other routes; those that stay keep their credit."""
        successor = Router(routes)
        earned = {(own.route.prefill, own.route.decode): own.credit for own in self._standing}
        for own in successor._standing:
            own.credit = earned.get((own.route.prefill, own.route.decode), 0.0)
        return successor

    def _pick_spare(self, admissible: Callable[[Route], bool]) -> Route | None:
        spares = [route for route in self._spare_uses if admissible(route)]
        if not spares:
            return None
        picked = min(spares, key=self._spare_uses.__getitem__)
        self._spare_uses[picked] += 1
        return picked
