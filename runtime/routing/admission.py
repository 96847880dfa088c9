"""Decides which waiting request starts next, and on which route, once there is KV cache for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

from runtime.routing.admission_base import AdmissionBase, Request
from runtime.routing.fair_queue import Queue
from runtime.routing.kv_budget import KvBudget
from runtime.routing.router import Route, Router, routes_without

SPREAD = 2.0
"""A route may take so many times its planned share of the KV cache for prompts of a replica that sends."""

RoutesLeft = Callable[[Collection[str]], Iterable[Route]]


class Admission(AdmissionBase[Request]):
    """Starts the first request in the queue as soon as a route has KV cache for it.

    Parameters
    ----------
    queue : see AdmissionBase
    routes_left : returns the routes without some lost replicas (see reflow.py); None: the router's routes
        that do not touch them
    """

    def __init__(
        self,
        router: Router,
        replicas: Mapping[str, KvBudget],
        queue: Queue[Request],
        routes_left: RoutesLeft | None = None,
    ) -> None:
        super().__init__(queue)
        self.router, self._replicas = router.among(replicas), replicas
        self._routes_left = routes_left or partial(routes_without, router.planned)
        self._to_come: tuple[Route, ...] = ()
        self._shares_of: Router | None = None
        self._known_shares: dict[tuple[str, str], float] = {}

    @property
    def context_tokens(self) -> int:
        """Prompt and output tokens that the route with the most KV cache can hold; 0 without routes."""
        return max(
            (self._replicas[route.decode].largest_request_tokens for route in self._in_sight), default=0
        )

    @property
    def weighs(self) -> bool:
        return self.router.weighs

    def learn(self, prompt_tokens: int, output_limit: int | None, output_tokens: int) -> None:
        self.router.learn(prompt_tokens, output_limit, output_tokens)

    def _can_serve(self) -> bool:
        return bool(self._in_sight)

    def next(self) -> tuple[Request, Route] | None:
        """Take out the first request, with the route that it starts on; None while it must wait."""
        if not self._queue:
            return None
        request = self._queue.first()
        route = self.router.choose(request, self._has_room(request))
        if route is None:
            return None
        return self._queue.popleft(), route

    def change(self, routes_left: RoutesLeft, starting: Collection[str], forgotten: Collection[str]) -> None:
        """Switch to the routes of another placement.

        Parameters
        ----------
        starting : replicas of the new placement that do not serve yet
        forgotten : lost replicas that are not part of it
        """
        self._routes_left = routes_left
        self.states.begin_placement(starting, forgotten)
        self._follow_states()

    def reroute(self) -> None:
        """Take up the routes anew, whose flow has changed."""
        self._follow_states()

    def _follow_states(self) -> None:
        """Update the routes to those between the replicas that serve."""
        absent, unexpected = self.states.absent, self.states.unexpected
        self.router = self.router.with_routes(self._routes_left(absent))
        self._to_come = tuple(self._routes_left(unexpected)) if absent != unexpected else ()

    @property
    def _in_sight(self) -> tuple[Route, ...]:
        """The current routes, and those that starting replicas will add."""
        return self.router.routes + self._to_come

    def can_ever_start(self, request: Request) -> bool:
        """Whether some route could hold the request if it served nothing else."""
        return any(self._could_hold(request, route) for route in self._in_sight)

    def _could_hold(self, request: Request, route: Route) -> bool:
        """Whether the route could hold the request if it served nothing else."""
        prefill, decode = self._replicas[route.prefill], self._replicas[route.decode]
        if request.one_token:
            return request.capacity_tokens <= prefill.largest_request_tokens
        return (
            request.prompt_tokens <= prefill.largest_request_tokens
            and request.capacity_tokens <= decode.largest_request_tokens
        )

    def _shares(self) -> Mapping[tuple[str, str], float]:
        """The share that each route to another replica may take of the KV cache that its prefill replica has
        for such routes, where that is not all: SPREAD times its share of their flow. So the requests that
        wait for a slow link keep none of the others from being computed."""
        if self._shares_of is not self.router:
            flows: dict[str, float] = {}
            sending = [route for route in self.router.routes if not route.colocated]
            for route in sending:
                flows[route.prefill] = flows.get(route.prefill, 0.0) + route.weight
            self._shares_of = self.router
            self._known_shares = {
                (route.prefill, route.decode): SPREAD * route.weight / flows[route.prefill]
                for route in sending
                if 0 < SPREAD * route.weight < flows[route.prefill]
            }
        return self._known_shares

    def _has_room(self, request: Request) -> Callable[[Route], bool]:
        """A test whether a route has KV cache for the request now; asks each replica only once."""
        prompt, whole, one_token = request.prompt_tokens, request.capacity_tokens, request.one_token
        replicas, shares = self._replicas, self._shares()
        begins: dict[str, bool] = {}
        ends: dict[str, bool] = {}

        def fits(replica: str, at_most: int, prefill_only: bool) -> bool:
            room = replicas[replica]
            return at_most <= room.largest_request_tokens and room.has_room(prompt, prefill_only)

        def has_room(route: Route) -> bool:
            prefill, decode = route.prefill, route.decode
            if prefill != decode:
                begun = begins.get(prefill)
                if begun is None:
                    begun = begins[prefill] = fits(prefill, whole if one_token else prompt, True)
                if one_token or not begun:
                    return begun
            ended = ends.get(decode)
            if ended is None:
                ended = ends[decode] = fits(decode, whole, False)
            if prefill == decode or not ended:
                return ended
            share = shares.get((prefill, decode), 1.0)
            return replicas[prefill].has_room_toward(decode, prompt, share)

        return has_room
