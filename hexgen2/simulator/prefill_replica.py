"""A prefill replica: prompts queue, pass through the stages in chunks, and their KV caches are sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cost_model.base import Work
from hexgen2.prediction.step_times import StepTimes
from hexgen2.simulator.prompt_queue import Chunk, Prompt, PromptQueue, attended
from hexgen2.simulator.records import ReplicaRecord
from hexgen2.simulator.windowed_use import WindowedUse
from runtime.routing.kv_budget import KvBudget

Begun = Callable[[Sequence[tuple[Any, int]], float, float], None]


def nobody(*_: object) -> None:
    """Hears of requests that go on elsewhere where there are none."""


class PrefillReplica:
    """Serves prompts first come, first served.

    A step holds chunks of at most `step_tokens` tokens in total. It begins when the first stage is free and
    fewer steps are in flight than there are stages. A prompt begins when its whole KV cache fits.

    Parameters
    ----------
    step_tokens : most tokens in a step
    kv_budget : the front end's account of the replica's KV cache
    schedule : the simulation's schedule(time_s, call, argument)
    begun : called with (sent, begun_s, ends_s) when a step begins: the requests in it, each with its tokens
    computed : called with (request, now) when the step with the last chunk of a prompt ends
    """

    def __init__(
        self,
        step_tokens: int,
        times: StepTimes,
        kv_budget: KvBudget,
        record: ReplicaRecord,
        schedule: Callable,
        begun: Begun,
        computed: Callable[[Any, float], None],
    ) -> None:
        self._step_tokens, self._times, self._record = step_tokens, times, record
        self._schedule, self._begun, self._computed = schedule, begun, computed
        self._window = times.costs.model.window
        self._free_tokens = kv_budget.kv_budget_tokens
        self._windowed = WindowedUse(kv_budget)
        self._prompts = PromptQueue(self._take_room)
        self._stage_free_s = [0.0] * times.stages
        self._in_flight = 0
        self._wakes_s = 0.0
        self._now = 0.0
        self._alive = True

    def submit(self, request: object, tokens: int, now: float) -> None:
        """Append a prompt to the queue."""
        self._prompts.add(Prompt(request, tokens, now))
        self._begin(now)

    def withdraw(self, request: object, now: float) -> bool:
        """Stop computing a prompt; returns False if none of it is left to compute."""
        prompt = self._prompts.withdraw(request)
        if prompt is None:
            return False
        if prompt.begun:
            self.release(request, prompt.tokens, now)
        return True

    def release(self, request: object, tokens: int, now: float) -> None:
        """Free the KV cache of a prompt: it has been sent, or is no longer needed."""
        self._free_tokens += tokens
        self._windowed.release(request)
        self._begin(now)

    def lose(self) -> None:
        """The replica is lost."""
        self._alive = False
        self._prompts.clear()

    def _begin(self, now: float, _: object = None) -> None:
        self._now = now
        queue = self._prompts.queue
        while self._in_flight < self._times.in_flight and queue:
            free_s = self._stage_free_s[0]
            if free_s > now:
                if free_s > self._wakes_s:
                    self._wakes_s = free_s
                    self._schedule(free_s, self._begin, None)
                return
            chunks = self._prompts.take(self._step_tokens)
            if not chunks:
                return
            self._run(chunks, now)

    def _take_room(self, prompt: Prompt) -> bool:
        windowed = self._windowed.computing(prompt.tokens)
        if prompt.tokens > self._free_tokens or windowed > self._windowed.free:
            return False
        self._free_tokens -= prompt.tokens
        self._windowed.hold(prompt.request, windowed)
        self._record.waited_s += self._now - prompt.since_s
        return True

    def _run(self, chunks: list[Chunk], now: float) -> None:
        tokens = ends = 0
        for chunk in chunks:
            tokens += chunk.tokens
            ends += chunk.last
        stage_s, hop_s = self._times.step(Work(tokens, attended(chunks, self._window), 0.0, 0.0, ends))
        at = now
        free_s = self._stage_free_s
        for j, (seconds, after_s) in enumerate(zip(stage_s, (*hop_s, 0.0), strict=True)):
            free_s[j] = at = (at if at > free_s[j] else free_s[j]) + seconds
            at += after_s
        self._record.busy_s += max(stage_s)
        self._record.requests += ends
        self._in_flight += 1
        self._schedule(at, self._end, chunks)
        self._begun([(chunk.prompt.request, chunk.tokens) for chunk in chunks], now, at)

    def _end(self, now: float, chunks: list[Chunk]) -> None:
        if self._alive:
            self._in_flight -= 1
            for chunk in chunks:
                if chunk.last:
                    self._windowed.hold(chunk.prompt.request, self._windowed.kept(chunk.prompt.tokens))
                    self._computed(chunk.prompt.request, now)
            self._begin(now)
