"""A running batch of decodes, advanced many steps at once.

While no request joins or ends, the context length of every step is known in advance, and the time of a step
is the maximum of a few linear functions of it (see StepTimes.decode_turn). The time of many steps is then the
sum of an arithmetic series, so that the simulation jumps from one change to the next.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from cost_model.lengths import Window
from hexgen2.prediction.step_times import Line


class _Member(NamedTuple):
    """One request: the context of its first step, and the batch's step counts when it joins and when it
    ends."""

    context: int
    joined: int
    end: int


class DecodeBatch:
    """Requests that decode together; each step generates one token for every one of them.

    Parameters
    ----------
    turn : number of requests -> the linear functions whose maximum is the time of a step
    window : sliding window of attention; None: no limit

    Attributes
    ----------
    count : running requests
    time_s : when the last step ended (or, if no request runs, the last change)
    steps : steps run so far
    """

    def __init__(self, turn: Callable[[int], tuple[Line, ...]], window: Window | None = None) -> None:
        self._turn, self._window = turn, window
        self._reach = window.tokens if window else math.inf
        self.time_s = 0.0
        self.count = 0
        # Tokens that the next step attends to, over all requests: in layers with the window, and in others.
        self._limited = self._unlimited = 0
        self.steps = 0
        self._members: dict[int, _Member] = {}
        # Heaps of (step, request): when requests end, and when the window stops their context's growth.
        # Entries of requests that have left are skipped.
        self._ends: list[tuple[int, int]] = []
        self._stops: list[tuple[int, int]] = []
        self._growing = 0
        self._joined_steps = 0
        self._first_s = self._more_s = 0.0
        self._regime = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(self._members)

    @property
    def context(self) -> float:
        """Tokens that the next step attends to, over all requests, as a mean over the layers."""
        return self._mean(self._limited, self._unlimited)

    @property
    def limited(self) -> int:
        """Tokens that the next step attends to in layers with the window, over all requests."""
        return self._limited

    @property
    def growing(self) -> int:
        """Requests that attend to more tokens there with each step."""
        return self._growing

    def made_by_each(self, steps: int = 0) -> Iterator[tuple[int, int]]:
        """The running requests, and the tokens that each will have generated here after so many steps."""
        return ((request, self.steps + steps - own.joined) for request, own in self._members.items())

    @property
    def made(self) -> int:
        """Tokens that the running requests have generated since they joined."""
        return self.count * self.steps - self._joined_steps

    def join(self, request: int, context: int, steps: int) -> None:
        """Add a request from the next step on, which attends to `context` tokens; it leaves after `steps`
        steps, at least one. Call `settle` when all have joined."""
        end = self.steps + steps
        stop = self.steps + self._reach - context
        self.count += 1
        self._members[request] = _Member(context, self.steps, end)
        self._joined_steps += self.steps
        heapq.heappush(self._ends, (end, request))
        if stop > self.steps:
            self._growing += 1
            if stop <= end:
                heapq.heappush(self._stops, (int(stop), request))
        self._limited += int(min(context, self._reach))
        self._unlimited += context

    def leave(self, request: int) -> int:
        """Remove a request; returns the number of tokens that it generated in the batch."""
        own = self._members.pop(request)
        self.count -= 1
        made = self.steps - own.joined
        self._joined_steps -= own.joined
        self._limited -= int(min(own.context + made, self._reach))
        self._unlimited -= own.context + made
        self._growing -= own.context + made < self._reach
        return made

    def settle(self) -> None:
        """Prepare the next steps after requests have joined or left."""
        self._regime = 0
        if not self.count:
            return
        self._skip_old()
        limit = self._ends[0][0] - self.steps
        if self._stops:
            limit = min(limit, self._stops[0][0] - self.steps)
        lines, context = self._turn(self.count), self.context
        growth = self._mean(self._growing, self.count)
        first_s = slope = -1.0
        for a, b in lines:
            own = a + b * context
            if own > first_s or (own == first_s and b > slope):
                first_s, slope = own, b
        self._first_s = first_s
        self._more_s = slope * growth
        if growth and len(lines) > 1:
            for a, b in lines:
                if b > slope:
                    # The number of steps until this line becomes the maximum.
                    gap = self._first_s - (a + b * context)
                    limit = min(limit, max(1, math.ceil(gap / ((b - slope) * growth))))
        self._regime = limit

    def _mean(self, limited: int, unlimited: int) -> float:
        """The mean over the layers of a figure of those with the window and of those without."""
        return self._window.mean(limited, unlimited) if self._window else limited

    def _skip_old(self) -> None:
        while (
            self._ends[0][1] not in self._members or self._members[self._ends[0][1]].end != self._ends[0][0]
        ):
            heapq.heappop(self._ends)
        while self._stops:
            step, request = self._stops[0]
            own = self._members.get(request)
            if own is not None and own.joined + self._reach - own.context == step:
                return
            heapq.heappop(self._stops)

    @property
    def regime_steps(self) -> int:
        """Steps until a request ends, stops growing, or another line becomes the maximum."""
        return self._regime

    def span_s(self, steps: int) -> float:
        """Seconds that the next `steps` steps take; at most regime_steps."""
        return steps * self._first_s + self._more_s * (steps * (steps - 1) / 2)

    @property
    def step_s(self) -> float:
        """Seconds that the next step takes."""
        return self._first_s

    def steps_until(self, time_s: float) -> int:
        """The fewest steps that end at time_s or later, at most regime_steps."""
        wait = time_s - self.time_s
        if wait <= 0:
            return 0
        a, d = self._first_s, self._more_s
        if d <= 1e-12 * a:
            estimate = wait / a
        else:
            half = a / d - 0.5
            estimate = math.sqrt(half * half + 2 * wait / d) - half
        steps = max(1, math.ceil(estimate - 1e-6))
        if steps < self._regime and self.span_s(steps) < wait * (1 - 1e-12):
            steps += 1
        return min(steps, self._regime)

    def steps_before(self, time_s: float) -> int:
        """The most steps that end at time_s or earlier, at most regime_steps."""
        steps = self.steps_until(time_s)
        return steps - (steps > 0 and self.time_s + self.span_s(steps) > time_s)

    def advance(self, steps: int) -> list[int]:
        """Run `steps` steps, at most regime_steps; returns the requests that end with the last one."""
        return self._tally(steps, self.time_s + self.span_s(steps))

    def step_at(self, time_s: float) -> list[int]:
        """Run one step that ends at time_s because it does more than decode; returns the requests that
        end."""
        return self._tally(1, time_s)

    def _tally(self, steps: int, time_s: float) -> list[int]:
        self.time_s = time_s
        self.steps += steps
        self._limited += self._growing * steps
        self._unlimited += self.count * steps
        while self._stops and self._stops[0][0] <= self.steps:
            _, request = heapq.heappop(self._stops)
            self._growing -= request in self._members
        ended = []
        while self._ends and self._ends[0][0] <= self.steps:
            end, request = heapq.heappop(self._ends)
            if request in self._members and self._members[request].end == end:
                self.leave(request)
                ended.append(request)
        return ended
