"""The event loop of simulations: requests arrive, and events happen in the order of their times."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import chain, count
from typing import Any

from hexgen2.placement import Placement
from hexgen2.simulator.clients import Clients
from hexgen2.simulator.options import Options
from hexgen2.simulator.records import Records

PROGRESS = 512
"""Events from one report of progress to the next, unless told otherwise."""


class EventLoop(ABC):
    """What simulations of all kinds of placements have in common.

    Attributes
    ----------
    now : seconds since the start
    """

    def __init__(self, placement: Placement, records: Records, options: Options | None) -> None:
        self.options = options = options or Options()
        self.placement, self.records, self.now = placement, records, 0.0
        requests = records.requests
        self._isl: list[int] = requests.isl.tolist()
        self._osl: list[int] = requests.osl.tolist()
        self._clients: Clients | None = None
        delay_s = options.front_end_s
        if options.max_concurrency is not None:
            self._clients = Clients(options.max_concurrency, delay_s, records, self.schedule, self._submit)
            delay_s = 0.0
        self._arrival_s: list[float] = (requests.arrival_s + delay_s).tolist()
        self._events: list[tuple[float, int, Callable, Any]] = []
        self._order, self._done = count(), 0

    def run(self, progress: Callable[[Any], None] | None = None, every: int = PROGRESS) -> None:
        """Run until every request has ended. `progress` is called once for `every` so many events."""
        events, handled = self._events, 0
        arrive = self._submit if self._clients is None else self._clients.arrive
        for index, arrival_s in enumerate(chain(self._arrival_s, (math.inf,))):
            while events and events[0][0] < arrival_s:
                self.now, _, call, argument = heappop(events)
                call(self.now, argument)
                self._after_event()
                handled += 1
                if handled % every == 0 and progress:
                    progress(self)
            if arrival_s < math.inf:
                self.now = arrival_s
                arrive(arrival_s, index)
        left = list(self._left())
        if self._clients is not None:
            left += self._clients.give_up(self.now)
        for index in left:
            self.records.fail(index, "no replica is left to serve it")

    @property
    def ended(self) -> int:
        """Requests that have ended, successfully or not."""
        return self._done + len(self.records.failed)

    def schedule(self, time_s: float, call: Callable[[float, Any], None], argument: Any) -> None:
        """Schedule call(time_s, argument). Events at the same time run in the order in which they were
        scheduled."""
        heappush(self._events, (time_s, next(self._order), call, argument))

    @abstractmethod
    def _submit(self, now: float, index: int) -> None:
        """A request reaches the queue."""

    @abstractmethod
    def _left(self) -> Iterable[int]:
        """The requests that still wait when nothing happens any more."""

    def _after_event(self) -> None:  # noqa: B027 - not all have to do something
        """Called after every event."""
