"""A limit of requests in flight, which turns arrivals into a closed loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hexgen2.simulator.records import Records


class Clients:
    """Sends requests in order, each when it arrives or, if as many as allowed are in flight, when one of them
    ends. If all arrive at once, these are `limit` clients that each send their next request as soon as their
    last one has ended.

    Parameters
    ----------
    limit : most requests in flight
    delay_s : seconds from a client to the queue
    schedule : the simulation's schedule(time_s, call, argument)
    submit : called with (now, request) when a request reaches the queue
    """

    def __init__(
        self,
        limit: int,
        delay_s: float,
        records: Records,
        schedule: Callable,
        submit: Callable[[float, int], None],
    ) -> None:
        self._limit, self._delay_s, self._records = limit, delay_s, records
        self._schedule, self._submit = schedule, submit
        self._unsent: deque[int] = deque()
        self._in_flight = 0

    def arrive(self, now: float, request: int) -> None:
        """Send a request, now or later."""
        if self._in_flight < self._limit:
            self._in_flight += 1
            self._send(now, request)
        else:
            self._unsent.append(request)

    def ended(self, now: float) -> None:
        """A request has ended, successfully or not."""
        # As an event of its own: whoever reports the end is not done with it yet.
        self._schedule(now, self._next, None)

    def give_up(self, now: float) -> list[int]:
        """Send all that is left although nobody will answer; returns these requests."""
        left = list(self._unsent)
        self._unsent.clear()
        for request in left:
            self._records.sent(request, now)
        return left

    def _next(self, now: float, _: None) -> None:
        if self._unsent:
            self._send(now, self._unsent.popleft())
        else:
            self._in_flight -= 1

    def _send(self, now: float, request: int) -> None:
        self._records.sent(request, now)
        if self._delay_s:
            self._schedule(now + self._delay_s, self._submit, request)
        else:
            self._submit(now, request)
