"""Who may start, and on which route: the queue of the requests that wait for KV cache room."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

from runtime.refusals import Overloaded, TooLong, Unavailable
from runtime.room import Room
from runtime.router import Route, Router

QUEUE_LIMIT = 256


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
    """First come, first served: the first in the queue starts as soon as a route has room for it.

    Parameters
    ----------
    queue_limit : requests that may wait
    """

    def __init__(self, router: Router, replicas: Mapping[str, Room], queue_limit: int) -> None:
        self.router, self.lost = router, dict[str, str]()
        self._replicas, self._queue_limit = replicas, queue_limit
        self._queue: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def waiting(self) -> Sequence[Request]:
        """The queue, first to start first."""
        return tuple(self._queue)

    @property
    def context_tokens(self) -> int:
        """Prompt and output tokens that the roomiest route can hold; 0 without routes."""
        return max((self._replicas[route.decode].kv_budget_tokens for route in self.router.routes), default=0)

    def check_serving(self) -> None:
        """Raise Unavailable if no route is left."""
        if not self.router.routes:
            raise Unavailable("no replica is left to serve: " + "; ".join(self.lost.values()))

    def enqueue(self, request: Request) -> None:
        """Put a new request at the end of the queue.

        Raises
        ------
        Overloaded, Unavailable, TooLong
        """
        self.check_serving()
        if request.pinned is not None and self._is_lost(request.pinned):
            raise Unavailable("a replica of the route is lost")
        if not self._can_ever_start(request):
            raise TooLong(f"{request.capacity_tokens} tokens exceed the KV cache of every replica")
        if len(self._queue) >= self._queue_limit:
            raise Overloaded(f"{len(self._queue)} requests are waiting already")
        self._queue.append(request)

    def put_back(self, request: Request) -> None:
        """Make a request that could not start the first again."""
        self._queue.appendleft(request)

    def withdraw(self, request: Request) -> None:
        """Take a request out of the queue."""
        self._queue.remove(request)

    def next(self) -> tuple[Request, Route] | None:
        """Take out the first request with the route that it starts on now; None while it must wait."""
        if not self._queue:
            return None
        request = self._queue[0]
        has_room = partial(self._has_room, request)
        if request.pinned is None:
            route = self.router.pick(has_room)
        else:
            route = request.pinned if has_room(request.pinned) else None
        if route is None:
            return None
        return self._queue.popleft(), route

    def lose(self, replica_id: str, reason: str) -> list[Request]:
        """Never use a replica again; the requests in the queue that now can't start any more."""
        self.lost[replica_id] = reason
        self.router = self.router.drop(replica_id)
        return [request for request in self._queue if not self._can_ever_start(request)]

    def _is_lost(self, route: Route) -> bool:
        return route.prefill in self.lost or route.decode in self.lost

    def _can_ever_start(self, request: Request) -> bool:
        routes = self.router.routes if request.pinned is None else (request.pinned,)
        return any(not self._is_lost(route) and self._could_hold(request, route) for route in routes)

    def _could_hold(self, request: Request, route: Route) -> bool:
        """Whether the route has room for the request while it serves nothing else."""
        prefill, decode = self._replicas[route.prefill], self._replicas[route.decode]
        if request.one_token:
            return request.capacity_tokens <= prefill.kv_budget_tokens
        return (
            request.prompt_tokens <= prefill.kv_budget_tokens
            and request.capacity_tokens <= decode.kv_budget_tokens
        )

    def _has_room(self, request: Request, route: Route) -> bool:
        if not self._could_hold(request, route):
            return False
        prefill, decode = self._replicas[route.prefill], self._replicas[route.decode]
        if route.colocated:
            return prefill.has_room(request.prompt_tokens, prefill_only=False)
        if not prefill.has_room(request.prompt_tokens, prefill_only=True):
            return False
        return request.one_token or decode.has_room(request.prompt_tokens, prefill_only=False)
