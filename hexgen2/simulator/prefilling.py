"""A prefill replica: prompts queue, pass through the stages in batches, and send their KV caches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from cost_model.base import PREFILL_TOKENS, Work
from cost_model.lengths import attended_tokens
from hexgen2.simulator.records import ReplicaRecord
from hexgen2.simulator.timing import ReplicaTimes


class Prompt(Protocol):
    """What a prefill replica must know of a request."""

    @property
    def prompt_tokens(self) -> int: ...


class Prefiller:
    """First come, first served. A batch holds up to PREFILL_TOKENS tokens (a longer prompt runs alone), and
    begins when the first stage is free, fewer batches are under way than there are stages, and there is room
    for its KV caches.

    Parameters
    ----------
    budget_tokens : KV cache that fits
    schedule : (time_s, call, argument) of the simulation
    begun : called with (prompts, begun_s, ends_s) as a batch begins
    computed : called with (prompts, now) as it ends
    """

    def __init__(
        self,
        times: ReplicaTimes,
        budget_tokens: int,
        record: ReplicaRecord,
        schedule: Callable,
        begun: Callable[[Sequence, float, float], None],
        computed: Callable[[Sequence, float], None],
    ) -> None:
        self._times, self._record = times, record
        self._schedule, self._begun, self._computed = schedule, begun, computed
        self._window = times.costs.model.sliding_window
        self._free_tokens = budget_tokens
        self._queue: deque[tuple[Prompt, float]] = deque()
        self._stage_free_s = [0.0] * times.stages
        self._in_flight = 0
        self._alive = True

    def submit(self, prompt: Prompt, now: float) -> None:
        """A prompt joins the queue."""
        self._queue.append((prompt, now))
        self._begin(now)

    def withdraw(self, prompt: Prompt) -> bool:
        """Take a prompt out of the queue; False if it has begun."""
        found = next((pair for pair in self._queue if pair[0] is prompt), None)
        if found is not None:
            self._queue.remove(found)
        return found is not None

    def release(self, prompt: Prompt, now: float) -> None:
        """The KV cache of a prompt that was computed is sent, or of no more use."""
        self._free_tokens += prompt.prompt_tokens
        self._begin(now)

    def lose(self) -> None:
        """The replica is gone."""
        self._alive = False
        self._queue.clear()

    def _begin(self, now: float, _: object = None) -> None:
        while self._queue and self._in_flight < self._times.in_flight:
            if self._stage_free_s[0] > now:
                return  # It begins as soon as the first stage is free: that is scheduled.
            batch = self._next_batch(now)
            if not batch:
                return
            self._run(batch, now)

    def _next_batch(self, now: float) -> list[Prompt]:
        batch: list[Prompt] = []
        tokens = 0
        while self._queue:
            prompt, since = self._queue[0]
            own = prompt.prompt_tokens
            if (batch and tokens + own > PREFILL_TOKENS) or own > self._free_tokens:
                break
            self._queue.popleft()
            self._free_tokens -= own
            self._record.waited_s += now - since
            tokens += own
            batch.append(prompt)
        return batch

    def _run(self, batch: list[Prompt], now: float) -> None:
        lengths = [prompt.prompt_tokens for prompt in batch]
        attended = sum(attended_tokens(length, self._window) for length in lengths)
        stage_s, hop_s = self._times.step(Work(sum(lengths), attended, 0.0, 0.0, len(batch)))
        at = now
        for j, seconds in enumerate(stage_s):
            at = max(at, self._stage_free_s[j]) + seconds
            self._stage_free_s[j] = at
            at += hop_s[j] if j < len(hop_s) else 0.0
        self._record.busy_s += max(stage_s)
        self._record.requests += len(batch)
        self._in_flight += 1
        self._schedule(at, self._end, batch)
        if self._stage_free_s[0] < at and self._times.in_flight > 1:
            self._schedule(self._stage_free_s[0], self._begin, None)
        self._begun(batch, now, at)

    def _end(self, now: float, batch: list[Prompt]) -> None:
        if self._alive:
            self._in_flight -= 1
            self._computed(batch, now)
            self._begin(now)
