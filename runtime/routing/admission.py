"""Who may start, and on which route: the queue of the requests that wait for KV cache room."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

from runtime.routing.fair_queue import Queue
from runtime.routing.kv_budget import KvBudget
from runtime.routing.refusals import TooLong, Unavailable
from runtime.routing.replica_state import ReplicaEvent, ReplicaStates
from runtime.routing.router import Route, Router, routes_without

RoutesLeft = Callable[[Collection[str]], Iterable[Route]]


class Waiting(Protocol):
    """A request that waits, with the KV tokens that it takes."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def capacity_tokens(self) -> int: ...

    @property
    def one_token(self) -> bool: ...


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
        replicas: Mapping[str, KvBudget],
        queue: Queue[Request],
        routes_left: RoutesLeft | None = None,
    ) -> None:
        self.router, self.states = router, ReplicaStates()
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
    def context_tokens(self) -> int:
        """Prompt and output tokens that the roomiest route can hold; 0 without routes."""
        return max((self._replicas[route.decode].kv_budget_tokens for route in self._in_sight), default=0)

    def check_serving(self) -> None:
        """Raise Unavailable if no route is left, nor will be once those that start serve."""
        if not self._in_sight:
            raise Unavailable("no replica is left to serve: " + "; ".join(self.states.lost.values()))

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
        route = self.router.pick(self._has_room(self._queue.first()))
        if route is None:
            return None
        return self._queue.popleft(), route

    def lose(self, replica_id: str, reason: str, returns: bool = False) -> list[Request]:
        """Route around a replica that failed.

        Parameters
        ----------
        returns : it is being started again, so that requests may wait for it

        Returns
        -------
        the requests in the queue that can no longer start
        """
        event = ReplicaEvent.FAIL if returns else ReplicaEvent.FAIL_FOR_GOOD
        self.states.on(event, replica_id, reason)
        self._take_routes()
        return self._stranded()

    def give_up(self, replica_id: str) -> list[Request]:
        """Stop expecting a lost replica back; the requests in the queue that can no longer start."""
        self.states.on(ReplicaEvent.GIVE_UP, replica_id)
        self._take_routes()
        return self._stranded()

    def restore(self, replica_id: str) -> None:
        """Use a replica that has started, again or for the first time."""
        self.states.on(ReplicaEvent.SERVE, replica_id)
        self._take_routes()

    def change(self, routes_left: RoutesLeft, starting: Collection[str], forgotten: Collection[str]) -> None:
        """Switch to the routes of another placement.

        Parameters
        ----------
        starting : its replicas that do not serve yet
        forgotten : replicas that were lost and are not part of it
        """
        self._routes_left = routes_left
        self.states.begin_placement(starting, forgotten)
        self._take_routes()

    def retire(self, replica_ids: Collection[str]) -> list[Request]:
        """Let no new requests begin on some replicas; the requests in the queue that can no longer start."""
        for replica_id in replica_ids:
            self.states.on(ReplicaEvent.RETIRE, replica_id)
        self._take_routes()
        return self._stranded()

    def _take_routes(self) -> None:
        """Use the routes between the replicas that serve."""
        absent, unexpected = self.states.absent, self.states.unexpected
        self.router = self.router.with_routes(self._routes_left(absent))
        self._to_come = tuple(self._routes_left(unexpected)) if absent != unexpected else ()

    def _stranded(self) -> list[Request]:
        return [request for request in self._queue if not self.can_ever_start(request)]

    @property
    def _in_sight(self) -> tuple[Route, ...]:
        """The routes that there are, and those that there will be."""
        return self.router.routes + self._to_come

    def can_ever_start(self, request: Request) -> bool:
        """Whether a route is left that has room for the request while it serves nothing else."""
        return any(self._could_hold(request, route) for route in self._in_sight)

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
