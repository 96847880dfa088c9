"""Picks the prefill and the decode replica of each request, by interleaved weighted round-robin.

The weights are the placement's flows, so traffic follows the plan of the search; other schedulers
(schedulers.py) are subclasses of this one. This file needs neither torch nor asyncio: the runtime and the
simulator share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from hexgen2.placement import Placement
from runtime.routing.kv_budget import KvBudget


@dataclass(frozen=True, slots=True)
class Route:
    """A replica that prefills and the one that continues its requests; the same one if colocated, which a
    mixed replica is for the requests that it serves alone.

    weight is the flow of the placement in requests per second (only proportions matter); a route with
    weight 0 is a spare. min_prompt_tokens: requests with shorter prompts take the route only while no other
    has room for them.
    """

    prefill: str
    decode: str
    weight: float
    min_prompt_tokens: int = 0

    @property
    def colocated(self) -> bool:
        return self.prefill == self.decode


def routes_of(placement: Placement) -> list[Route]:
    """The routes of a placement, one per pair of replicas, in its order.

    A colocated replica is a route to itself, weighted with its planned load; a mixed one has such a route in
    the placement.
    """
    flows = {(r.from_, r.to): (r.flow_req_s, r.min_prompt_tokens) for r in placement.routes}
    for replica in placement.replicas:
        if replica.role == "colocated":
            flows[replica.id, replica.id] = replica.capacity_req_s * replica.utilisation, 0
    return [Route(*ends, *flow) for ends, flow in flows.items()]


def routes_without(routes: Iterable[Route], lost: Collection[str]) -> list[Route]:
    """The routes that use no lost replica."""
    return [route for route in routes if route.prefill not in lost and route.decode not in lost]


class Routable(Protocol):
    """A request as routers see it.

    output_limit : most output tokens that it may still have; None: unknown
    request_id : by which replicas hold its KV cache
    """

    @property
    def request_id(self) -> object: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def output_limit(self) -> int | None: ...

    @property
    def one_token(self) -> bool: ...


CREDIT_LIMIT = 64.0
"""Requests that a route for long prompts may be due at most, after many short ones."""


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

    Attributes
    ----------
    routes : that requests may take
    planned : that it was made from; a scheduler may weigh or leave out some of them

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

    A route for long prompts goes on earning credit while short ones pass, up to CREDIT_LIMIT, and gets the
    next long ones until it has caught up. So routes have their shares in the long run if there are long
    prompts enough. If no route takes short prompts, those with the lowest limit do. While no route that takes
    a request has room, one for longer prompts serves it, and is charged as usual: nobody waits beside room.

    References
    ----------
    R. Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980).
    """

    weighs: ClassVar[bool] = False
    """Whether it counts the work of requests in the backlogs of replicas."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = self.planned = tuple(routes)
        self._standing = [_Standing(route, route.weight) for route in self.routes if route.weight > 0]
        self._total = math.fsum([standing.weight for standing in self._standing])
        self._spare_uses = {route: 0 for route in self.routes if route.weight <= 0}
        self._margin = 1 / (2 * max(len(self._standing), 2) - 2)
        serving = [standing.route for standing in self._standing] or self.routes
        self._least_tokens = min((route.min_prompt_tokens for route in serving), default=0)
        self.limited = any(route.min_prompt_tokens > self._least_tokens for route in self.routes)

    def takes(self, route: Route, prompt_tokens: float) -> bool:
        """Whether a route is for requests with prompts of that length."""
        return prompt_tokens >= route.min_prompt_tokens or route.min_prompt_tokens <= self._least_tokens

    def among(self, replicas: Mapping[str, KvBudget]) -> Router:
        """The router that also knows the replicas, by id; they may come and go."""
        return self

    def choose(self, request: Routable, admissible: Callable[[Route], bool]) -> Route | None:
        """The route on which a request begins now; None, which changes nothing, if none is admissible."""
        return self.pick(admissible, request.prompt_tokens)

    def learn(self, prompt_tokens: int, output_limit: int | None, output_tokens: int) -> None:
        """A request has ended by itself."""

    def pick(
        self, admissible: Callable[[Route], bool] = _always, prompt_tokens: float = math.inf
    ) -> Route | None:
        """The route of the next request; None, which changes nothing, if no route is admissible.

        Parameters
        ----------
        prompt_tokens : of the request; by default, it is long enough for every route
        """
        if self.limited and prompt_tokens < math.inf:
            return self._pick_by_length(admissible, prompt_tokens)
        candidates = [standing for standing in self._standing if admissible(standing.route)]
        if not candidates:
            return self._pick_spare(admissible)
        return self._pick_of(candidates, candidates)

    def _pick_by_length(self, admissible: Callable[[Route], bool], prompt_tokens: float) -> Route | None:
        with_room = [standing for standing in self._standing if admissible(standing.route)]
        candidates = [standing for standing in with_room if self.takes(standing.route, prompt_tokens)]
        if not candidates:
            return self._pick_of(with_room, with_room) if with_room else self._pick_spare(admissible)
        taking = set(map(id, candidates))
        earning = [each for each in with_room if id(each) in taking or each.credit < CREDIT_LIMIT]
        return self._pick_of(candidates, earning)

    def _pick_of(self, candidates: list[_Standing], earning: list[_Standing]) -> Route:
        """The next of the candidates, at least one; those that earn credit are at least these."""
        total = self._total
        if len(earning) < len(self._standing):
            total = math.fsum([standing.weight for standing in earning])
        for standing in earning:
            standing.credit += standing.weight / total
        margin, picked, first = self._margin, candidates[0], (True, math.inf)
        for standing in candidates:
            credit = standing.credit
            # Those that are due first; of these, by the time until they must be picked, up to a factor.
            order = credit < margin, (1 - margin - credit) / standing.weight
            if order < first:
                picked, first = standing, order
        picked.credit -= 1
        return picked.route

    def with_routes(self, routes: Iterable[Route]) -> Router:
        """A router over other routes; those that stay keep their credit."""
        successor = self._over(routes)
        earned = {(own.route.prefill, own.route.decode): own.credit for own in self._standing}
        for own in successor._standing:
            own.credit = earned.get((own.route.prefill, own.route.decode), 0.0)
        return successor

    def _over(self, routes: Iterable[Route]) -> Router:
        """A router of the same kind."""
        return Router(routes)

    def _pick_spare(self, admissible: Callable[[Route], bool]) -> Route | None:
        spares = [route for route in self._spare_uses if admissible(route)]
        if not spares:
            return None
        picked = min(spares, key=self._spare_uses.__getitem__)
        self._spare_uses[picked] += 1
        return picked
