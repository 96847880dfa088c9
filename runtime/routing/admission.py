"""Who may start, and on which route: the queue of the requests that wait for KV cache room."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

from runtime.routing.fair_queue import Queue
from runtime.routing.kv_budget import Room
from runtime.routing.refusals import TooLong, Unavailable
from runtime.routing.router import Route, Router, routes_without

RoutesLeft = Callable[[Collection[str]], Iterable[Route]]


class Waiting(Protocol):
    """A request that waits: its KV tokens, and the route that it must take, if any."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def capacity_tokens(self) -> int: ...

    @property
    def one_token(self) -> bool: ...

    @property
    def pinned(self) -> Route | None: ...


Request = TypeVar("Request", bound=Waiting)


class Admission(Generic[Request]):
    """The first in the queue starts as soon as a route has room for it.

    Parameters
    ----------
    queue : says who is first, and how many may wait
    routes_left : the routes without the replicas that are lost (see reflow.py); None: the router's,
        without those that lead to them
    """

    def __init__(
        self,
        router: Router,
        replicas: Mapping[str, Room],
        queue: Queue[Request],
        routes_left: RoutesLeft | None = None,
    ) -> None:
        self.router, self.lost = router, dict[str, str]()
        self.starting, self.leaving, self.returning = set[str](), set[str](), set[str]()
        self._routes_left = routes_left or partial(routes_without, router.routes)
        self._to_come: tuple[Route, ...] = ()
        self._replicas, self._queue = replicas, queue

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def waiting(self) -> Sequence[Request]:
        """The queue, first to start first."""
        return tuple(self._queue)

    @property
    def absent(self) -> frozenset[str]:
        """Replicas that no request may begin on."""
        return frozenset(self.lost.keys() | self.leaving | self.starting)

    @property
    def context_tokens(self) -> int:
        """Prompt and output tokens that the roomiest route can hold; 0 without routes."""
        return max((self._replicas[route.decode].kv_budget_tokens for route in self._in_sight), default=0)

    def check_serving(self) -> None:
        """Raise Unavailable if no route is left, nor will be once those that start serve."""
        if not self._in_sight:
            raise Unavailable("no replica is left to serve: " + "; ".join(self.lost.values()))

    def enqueue(self, request: Request) -> Request | None:
        """Put a new request into the queue.

        Returns
        -------
        the request that must be withdrawn for it, if any

        Raises
        ------
        Overloaded, Unavailable, TooLong
        """
        self.check_serving()
        if request.pinned is not None and self._is_lost(request.pinned):
            raise Unavailable("a replica of the route is lost")
        if not self.can_ever_start(request):
            raise TooLong(f"{request.capacity_tokens} tokens exceed the KV cache of every replica")
        crowded_out = self._queue.make_way(request)
        self._queue.append(request)
        return crowded_out

    def put_back(self, request: Request) -> None:
        """Make a request that could not start, or must start again, the first."""
        self._queue.appendleft(request)

    def withdraw(self, request: Request) -> None:
        """Take a request out of the queue."""
        self._queue.remove(request)

    def next(self) -> tuple[Request, Route] | None:
        """Take out the first request with the route that it starts on now; None while it must wait."""
        if not self._queue:
            return None
        request = self._queue.first()
        has_room = self._has_room(request)
        if request.pinned is None:
            route = self.router.pick(has_room)
        else:
            ends = {request.pinned.prefill, request.pinned.decode}
            route = request.pinned if self.absent.isdisjoint(ends) and has_room(request.pinned) else None
        if route is None:
            return None
        return self._queue.popleft(), route

    def lose(self, replica_id: str, reason: str, returns: bool = False) -> list[Request]:
        """Use a replica no more; the requests in the queue that now can't start any more.

        Parameters
        ----------
        returns : it is being started again, so that requests may wait for it
        """
        self.lost[replica_id] = reason
        self.starting.discard(replica_id)
        (self.returning.add if returns else self.returning.discard)(replica_id)
        self._take_routes()
        return self._stranded()

    def give_up(self, replica_id: str) -> list[Request]:
        """Expect a lost replica back no more; the requests in the queue that now can't start any more."""
        self.returning.discard(replica_id)
        self._take_routes()
        return self._stranded()

    def restore(self, replica_id: str) -> None:
        """Use a replica again that was lost, or that has started by now."""
        self.lost.pop(replica_id, None)
        self.starting.discard(replica_id)
        self.returning.discard(replica_id)
        self._take_routes()

    def change(self, routes_left: RoutesLeft, starting: Collection[str], forgotten: Collection[str]) -> None:
        """Go on with the routes of other replicas.

        Parameters
        ----------
        starting : those that do not serve yet
        forgotten : those that were lost and are no part of them
        """
        self._routes_left = routes_left
        self.starting, self.leaving = set(starting), set()
        self.returning.difference_update(forgotten)
        for replica_id in forgotten:
            self.lost.pop(replica_id, None)
        self._take_routes()

    def retire(self, replica_ids: Collection[str]) -> list[Request]:
        """Let no new requests begin on some replicas; the requests in the queue that now can't start any
        more."""
        self.leaving.update(replica_ids)
        self._take_routes()
        return self._stranded()

    def _take_routes(self) -> None:
        """Go on with the routes between the replicas that serve."""
        self.router = self.router.with_routes(self._routes_left(self.absent))
        to_come = (self.starting | self.returning) - self.leaving
        self._to_come = tuple(self._routes_left(self.absent - to_come)) if to_come else ()

    def _stranded(self) -> list[Request]:
        return [request for request in self._queue if not self.can_ever_start(request)]

    @property
    def _in_sight(self) -> tuple[Route, ...]:
        """The routes that there are, and those that there will be."""
        return self.router.routes + self._to_come

    def can_ever_start(self, request: Request) -> bool:
        """Whether a route is left that has room for the request while it serves nothing else."""
        routes = self._in_sight if request.pinned is None else (request.pinned,)
        return any(not self._is_lost(route) and self._could_hold(request, route) for route in routes)

    def _is_lost(self, route: Route) -> bool:
        gone = (self.lost.keys() - self.returning) | self.leaving
        return not {route.prefill, route.decode}.isdisjoint(gone)

    def _could_hold(self, request: Request, route: Route) -> bool:
        """Whether the route has room for the request while it serves nothing else."""
        prefill, decode = self._replicas[route.prefill], self._replicas[route.decode]
        if request.one_token:
            return request.capacity_tokens <= prefill.kv_budget_tokens
        return (
            request.prompt_tokens <= prefill.kv_budget_tokens
            and request.capacity_tokens <= decode.kv_budget_tokens
        )

    def _has_room(self, request: Request) -> Callable[[Route], bool]:
        """Whether a route has room for the request now. Each replica is asked once, whatever its routes."""
        prompt, whole, one_token = request.prompt_tokens, request.capacity_tokens, request.one_token
        begins: dict[str, bool] = {}
        ends: dict[str, bool] = {}

        def fits(replica: str, at_most: int, prefill_only: bool) -> bool:
            room = self._replicas[replica]
            return at_most <= room.kv_budget_tokens and room.has_room(prompt, prefill_only)

        def has_room(route: Route) -> bool:
            prefill, decode = route.prefill, route.decode
            if prefill != decode:
                if prefill not in begins:
                    begins[prefill] = fits(prefill, whole if one_token else prompt, True)
                if one_token or not begins[prefill]:
                    return begins[prefill]
            if decode not in ends:
                ends[decode] = fits(decode, whole, False)
            return ends[decode]

        return has_room
