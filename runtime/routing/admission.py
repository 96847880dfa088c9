"""Decides which waiting request starts next, and on which route, once there is KV cache for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

from runtime.routing.fair_queue import Queue
from runtime.routing.kv_budget import KvBudget
from runtime.routing.pressure import Pressure
from runtime.routing.refusals import TooLong, Unavailable
from runtime.routing.replica_state import ReplicaEvent, ReplicaStates
from runtime.routing.router import Routable, Route, Router, routes_without

SPREAD = 2.0
"""A route may take so many times its planned share of the KV cache for prompts of a replica that sends."""

RoutesLeft = Callable[[Collection[str]], Iterable[Route]]


class Waiting(Routable, Protocol):
    """A waiting request, with the KV cache tokens that it needs."""

    @property
    def capacity_tokens(self) -> int: ...


Request = TypeVar("Request", bound=Waiting)


class Admission(Generic[Request]):
    """Starts the first request in the queue as soon as a route has KV cache for it.

    Parameters
    ----------
    queue : decides which request is first, and how many may wait
    routes_left : returns the routes without some lost replicas (see reflow.py); None: the router's routes
        that do not touch them

    Attributes
    ----------
    pressure : whether requests have to wait
    """

    def __init__(
        self,
        router: Router,
        replicas: Mapping[str, KvBudget],
        queue: Queue[Request],
        routes_left: RoutesLeft | None = None,
    ) -> None:
        self.router, self.states, self.pressure = router.among(replicas), ReplicaStates(), Pressure()
        self._routes_left = routes_left or partial(routes_without, router.planned)
        self._to_come: tuple[Route, ...] = ()
        self._replicas, self._queue = replicas, queue
        self._shares_of: Router | None = None
        self._known_shares: dict[tuple[str, str], float] = {}

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def waiting(self) -> Sequence[Request]:
        """The queue, in the order in which requests will start."""
        return tuple(self._queue)

    @property
    def context_tokens(self) -> int:
        """Prompt and output tokens that the route with the most KV cache can hold; 0 without routes."""
        return max(
            (self._replicas[route.decode].largest_request_tokens for route in self._in_sight), default=0
        )

    def check_serving(self) -> None:
        """Raise Unavailable if there is no route, and starting replicas will not provide one either."""
        if not self._in_sight:
            raise Unavailable("no replica is left to serve: " + "; ".join(self.states.lost.values()))

    def enqueue(self, request: Request) -> Request | None:
        """Put a new request into the queue.

        Returns
        -------
        the request that must be withdrawn to make room for it, if any

        Raises
        ------
        Overloaded, Unavailable, TooLong
        """
        self.check_serving()
        if not self.can_ever_start(request):
            raise TooLong(f"{request.capacity_tokens} tokens exceed the KV cache of every replica")
        self.pressure.arrived(len(self._queue) > 0)
        crowded_out = self._queue.make_way(request)
        self._queue.append(request)
        return crowded_out

    def put_back(self, request: Request) -> None:
        """Put a request that could not start, or must start again, at the head of the queue."""
        self._queue.appendleft(request)

    def withdraw(self, request: Request) -> None:
        """Take a request out of the queue."""
        self._queue.remove(request)

    def next(self) -> tuple[Request, Route] | None:
        """Take out the first request, with the route that it starts on; None while it must wait."""
        if not self._queue:
            return None
        request = self._queue.first()
        route = self.router.choose(request, self._has_room(request))
        if route is None:
            return None
        return self._queue.popleft(), route

    def lose(self, replica_id: str, reason: str, returns: bool = False) -> list[Request]:
        """Route around a replica that failed.

        Parameters
        ----------
        returns : it is being restarted, so requests may wait for it

        Returns
        -------
        the requests in the queue that can no longer start
        """
        event = ReplicaEvent.FAIL if returns else ReplicaEvent.FAIL_FOR_GOOD
        self.states.on(event, replica_id, reason)
        self._take_routes()
        return self._stranded()

    def give_up(self, replica_id: str) -> list[Request]:
        """Stop expecting a lost replica back; returns the requests in the queue that can no longer start."""
        self.states.on(ReplicaEvent.GIVE_UP, replica_id)
        self._take_routes()
        return self._stranded()

    def restore(self, replica_id: str) -> None:
        """Use a replica that has started or restarted."""
        self.states.on(ReplicaEvent.SERVE, replica_id)
        self._take_routes()

    def change(self, routes_left: RoutesLeft, starting: Collection[str], forgotten: Collection[str]) -> None:
        """Switch to the routes of another placement.

        Parameters
        ----------
        starting : replicas of the new placement that do not serve yet
        forgotten : lost replicas that are not part of it
        """
        self._routes_left = routes_left
        self.states.begin_placement(starting, forgotten)
        self._take_routes()

    def retire(self, replica_ids: Collection[str]) -> list[Request]:
        """Start no more requests on some replicas; returns queued requests that can no longer start."""
        for replica_id in replica_ids:
            self.states.on(ReplicaEvent.RETIRE, replica_id)
        self._take_routes()
        return self._stranded()

    def stranded(self) -> list[Request]:
        """The requests in the queue that can no longer start, because a replica holds less than before."""
        return self._stranded()

    def reroute(self) -> None:
        """Take up the routes anew, whose flow has changed."""
        self._take_routes()

    def _take_routes(self) -> None:
        """Update the routes to those between the replicas that serve."""
        absent, unexpected = self.states.absent, self.states.unexpected
        self.router = self.router.with_routes(self._routes_left(absent))
        self._to_come = tuple(self._routes_left(unexpected)) if absent != unexpected else ()

    def _stranded(self) -> list[Request]:
        return [request for request in self._queue if not self.can_ever_start(request)]

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
                if prefill not in begins:
                    begins[prefill] = fits(prefill, whole if one_token else prompt, True)
                if one_token or not begins[prefill]:
                    return begins[prefill]
                share = shares.get((prefill, decode), 1.0)
                if not replicas[prefill].has_room_toward(decode, prompt, share):
                    return False
            if decode not in ends:
                ends[decode] = fits(decode, whole, False)
            return ends[decode]

        return has_room
