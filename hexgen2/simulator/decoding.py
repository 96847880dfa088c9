"""A decode replica: requests whose KV cache has landed join the running batch at the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from hexgen2.simulator.records import Records, ReplicaRecord
from hexgen2.simulator.running import Running
from hexgen2.simulator.timing import ReplicaTimes


class Decoder:
    """Continuous batching of up to max_batch requests.

    Parameters
    ----------
    isl, osl : prompt and output tokens of each request
    places : requests that decode at once
    ended : called with (request, now) at its last token
    """

    def __init__(
        self,
        times: ReplicaTimes,
        isl: Sequence[int],
        osl: Sequence[int],
        places: int,
        records: Records,
        record: ReplicaRecord,
        schedule: Callable,
        ended: Callable[[int, float], None],
    ) -> None:
        self._isl, self._osl, self._places = isl, osl, places
        self._records, self._record = records, record
        self._schedule, self._ended = schedule, ended
        self.running = Running(times.decode_turn, times.costs.model.sliding_window)
        self._joining: deque[tuple[int, int, float]] = deque()
        self._made: dict[int, int] = {}
        self._joined: list[int] = []
        self._version = 0
        self.alive = True

    def land(self, request: int, now: float, made: int = 1) -> None:
        """A request's KV cache is here, and so many of its tokens are made."""
        self._joining.append((request, made, now))
        running = self.running
        if not running:
            running.time_s = max(running.time_s, now)
        elif running.time_s < now:
            steps = running.steps_until(now)
            if steps == running.regime_steps:
                return  # It joins at the change that is due then.
            self._advance(steps)
        self._go_on()

    def lose(self, now: float) -> list[tuple[int, int]]:
        """The replica is gone: its requests, and how many tokens each has."""
        self.alive = False
        if self.running:
            self._advance(self.running.steps_before(now))
        lost = [(request, made) for request, made, _ in self._joining]
        for request in list(self.running):
            made = self.running.leave(request)
            if request not in self._joined:
                self._records.last_s[request] = self.running.time_s
            lost.append((request, made + self._made.pop(request)))
        self._joining.clear()
        self._version += 1
        return lost

    def _change(self, _: float, version: int) -> None:
        if version == self._version:
            self._advance(self.running.regime_steps)
            self._go_on()

    def _advance(self, steps: int) -> None:
        running, record = self.running, self._record
        if not steps:
            return
        count, span_s = len(running), running.span_s(steps)
        for request in self._joined:
            self._records.gap(running.time_s + running.step_s - self._records.last_s[request])
        gaps = count * steps - len(self._joined)
        self._joined.clear()
        if gaps > 0:
            self._records.gap(span_s / steps, gaps)
        record.busy_s += span_s
        record.running_s += span_s * count
        for request in running.advance(steps):
            record.requests += 1
            del self._made[request]
            self._ended(request, running.time_s)

    def _go_on(self) -> None:
        """Let in who waits, and find the next change."""
        running = self.running
        now = running.time_s
        while self._joining and len(running) < self._places:
            request, made, since = self._joining.popleft()
            self._record.waited_s += max(0.0, now - since)
            self._made[request] = made
            running.join(request, self._isl[request] + made, self._osl[request] - made)
            self._joined.append(request)
        running.settle()
        self._version += 1
        if not running:
            return
        self._record.peak_running = max(self._record.peak_running, len(running))
        self._schedule(running.change_s, self._change, self._version)
