"""The order of waiting requests: first come, first served, or fair between clients."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from runtime.routing.refusals import Overloaded, TooMany

QUEUE_LIMIT = 256
"""Default number of requests that may wait."""
IDLE_CLIENTS = 1024
"""Most clients to remember that have no requests waiting."""


class ClientRequest(Protocol):
    """A request of some client, with its cost in tokens."""

    @property
    def client(self) -> str: ...

    @property
    def cost_tokens(self) -> int: ...


Item = TypeVar("Item")
Request = TypeVar("Request", bound=ClientRequest)


class Queue(Protocol[Item]):
    """Waiting items, in the order in which they are served."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Item]: ...

    def make_way(self, item: Item) -> Item | None:
        """The item, if any, that must leave the queue for this one to join. Raises Overloaded, TooMany."""

    def append(self, item: Item) -> None:
        """Add an item to the queue."""

    def appendleft(self, item: Item) -> None:
        """Put an item at the head, free of charge: it has been charged when it was served before."""

    def first(self) -> Item:
        """The item to serve next."""

    def popleft(self) -> Item:
        """Remove and return the item to serve next."""

    def remove(self, item: Item) -> None:
        """Remove an item, wherever it is in the queue."""


class FirstCome(deque[Item]):
    """First come, first served, at most `limit` at a time."""

    def __init__(self, limit: int = QUEUE_LIMIT) -> None:
        super().__init__()
        self._limit = limit

    def make_way(self, item: Item) -> None:
        _check(len(self), self._limit)

    def first(self) -> Item:
        return self[0]


@dataclass(slots=True)
class _Line(Generic[Request]):
    """One client's waiting requests, each with its virtual end time; `finish` is that of the last one."""

    waiting: deque[tuple[float, Request]] = field(default_factory=deque)
    finish: float = 0.0


class FairQueue(Generic[Request]):
    """Gives clients with waiting requests equal shares of tokens; each client's are served in order.

    Parameters
    ----------
    limit : requests that may wait
    client_limit : requests of one client that may wait; None: the same as limit

    Notes
    -----
    Self-clocked fair queueing: in virtual time, a request starts when its client's previous one ends, or now,
    whichever is later, and lasts as long as it has tokens. The request that ends first is served first, and
    the virtual clock moves to its end. While two clients have requests waiting, their service differs by no
    more than the largest request of each; clients that come and go cannot starve the others.

    A full queue makes room for a client with fewer requests: the client with the most loses its last one.

    References
    ----------
    S. J. Golestani, A self-clocked fair queueing scheme for broadband applications, INFOCOM 1994.
    """

    def __init__(self, limit: int = QUEUE_LIMIT, client_limit: int | None = None) -> None:
        self._limit = limit
        self._client_limit = client_limit
        self._again: deque[Request] = deque()
        self._lines: dict[str, _Line[Request]] = {}
        self._now = 0.0
        self._waiting = 0
        self._next: str | None = None

    def __len__(self) -> int:
        return len(self._again) + self._waiting

    def __iter__(self) -> Iterator[Request]:
        yield from self._again
        tagged = [entry for line in self._lines.values() for entry in line.waiting]
        yield from (request for _, request in sorted(tagged, key=lambda entry: entry[0]))

    def waiting_of(self, client: str) -> int:
        """Waiting requests of a client, without those that were put back."""
        line = self._lines.get(client)
        return len(line.waiting) if line else 0

    def ahead(self, request: Request) -> int:
        """Requests that would be served before this one if it joined now and no other did."""
        line = self._lines.get(request.client)
        finish = (max(self._now, line.finish) if line else self._now) + request.cost_tokens
        tags = (tag for line in self._lines.values() for tag, _ in line.waiting)
        return len(self._again) + sum(tag <= finish for tag in tags)

    def make_way(self, request: Request) -> Request | None:
        longest = self._line_to_shorten(request.client)
        return longest.waiting[-1][1] if longest else None

    def check_place(self, client: str) -> None:
        """Raise Overloaded or TooMany if the queue has no place for one more request of a client."""
        self._line_to_shorten(client)

    def append(self, request: Request) -> None:
        line = self._lines.setdefault(request.client, _Line())
        line.finish = max(self._now, line.finish) + request.cost_tokens
        line.waiting.append((line.finish, request))
        self._waiting += 1
        self._next = None

    def appendleft(self, request: Request) -> None:
        self._again.appendleft(request)

    def first(self) -> Request:
        return self._again[0] if self._again else self._first_line().waiting[0][1]

    def popleft(self) -> Request:
        if self._again:
            return self._again.popleft()
        self._now, request = self._first_line().waiting.popleft()
        self._left()
        return request

    def remove(self, request: Request) -> None:
        if request in self._again:
            self._again.remove(request)
            return
        line = self._lines[request.client]
        place = next(place for place, (_, other) in enumerate(line.waiting) if other is request)
        kept = list(line.waiting)
        behind = [(tag - request.cost_tokens, other) for tag, other in kept[place + 1 :]]
        line.waiting = deque([*kept[:place], *behind])
        line.finish -= request.cost_tokens
        self._left()

    def _line_to_shorten(self, client: str) -> _Line[Request] | None:
        """The client queue that must lose its last request for this client's, if the queue is full."""
        own = self.waiting_of(client)
        if self._client_limit is not None and own >= self._client_limit:
            raise TooMany(f"{own} requests of this client are already waiting")
        if len(self) < self._limit:
            return None
        longest = max(self._lines.values(), key=lambda line: len(line.waiting), default=None)
        if longest is None or len(longest.waiting) <= own + 1:
            _check(len(self), self._limit)
            return None
        return longest

    def _first_line(self) -> _Line[Request]:
        if self._next is None:
            busy = (client for client, line in self._lines.items() if line.waiting)
            self._next = min(busy, key=lambda client: self._lines[client].waiting[0][0])
        return self._lines[self._next]

    def _left(self) -> None:
        """Forget clients once nobody waits, or, if there are many, those whose past no longer matters."""
        self._waiting -= 1
        self._next = None
        if not self._waiting:
            self._lines.clear()
            self._now = 0.0
        elif len(self._lines) > self._waiting + IDLE_CLIENTS:
            lines = self._lines.items()
            self._lines = {who: line for who, line in lines if line.waiting or line.finish > self._now}


def _check(waiting: int, limit: int) -> None:
    if waiting >= limit:
        raise Overloaded(f"{waiting} requests are already waiting")
