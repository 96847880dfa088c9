"""A colocated or mixed replica with several steps in flight, step by step as the runtime makes them.

Prompts delay some of a pipeline's steps and not others, so its steps cannot be taken together, as those of
decode_batch.py are. Rules and names are those of runtime/worker/scheduler.py: a request has tokens, of which
the first `computed` are in the KV cache or will be after the steps in flight, and a request with one token to
run decodes. KV cache is counted in tokens, not in blocks.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cost_model.base import Work
from cost_model.lengths import attended_tokens, context_tokens
from hexgen2.prediction.step_times import StepTimes
from hexgen2.simulator.batching import Batching
from hexgen2.simulator.prefill_replica import Begun, nobody
from hexgen2.simulator.records import Records, ReplicaRecord
from runtime.routing.kv_budget import KvBudget


@dataclass(slots=True, eq=False)
class _Request:
    """One request.

    Attributes
    ----------
    arrival : its number in the order of arrival
    tokens, prompt : all tokens so far, and those of the client
    since_s : when it began to wait
    held : tokens of KV cache that it holds
    place : its place in the order in which requests are looked at
    steps : steps in flight that it takes part in
    decoding : whether its latest token came from this batch
    outgoing : the simulation's request, if it goes on elsewhere
    """

    index: int
    arrival: int
    tokens: int
    prompt: int
    since_s: float
    computed: int = 0
    held: int = 0
    place: int = 0
    steps: int = 0
    decoding: bool = False
    outgoing: Any = None

    @property
    def to_run(self) -> int:
        """Tokens that have not been computed."""
        return self.tokens - self.computed

    @property
    def decodes(self) -> bool:
        """Whether a long prompt in the same step would delay its next token."""
        return self.tokens > self.prompt and self.tokens - self.computed <= 1


def _place(request: _Request) -> int:
    return request.place


Flight = list[tuple[_Request, bool]]
"""The requests of a step, and whether each gets a token from it."""


class PipelinedReplica:
    """One colocated or mixed replica under the policy "mixed".

    A step begins when the first stage is free and fewer steps are in flight than may be. It decodes an equal
    share of all requests, those first whose last token is oldest, beside chunks of prompts.

    Parameters
    ----------
    isl, osl : prompt and output tokens of each request
    kv_budget : the front end's account of the replica's KV cache, which is told of every token
    schedule : the simulation's schedule(time_s, call, argument)
    ended : called with (request, now) when a request has its last token
    begun, computed : as of PrefillReplica, for prompts of requests that go on elsewhere
    """

    def __init__(
        self,
        batching: Batching,
        times: StepTimes,
        isl: Sequence[int],
        osl: Sequence[int],
        kv_budget: KvBudget,
        records: Records,
        record: ReplicaRecord,
        schedule: Callable,
        ended: Callable[[int, float], None],
        begun: Begun = nobody,
        computed: Callable[[Any, float], None] = nobody,
    ) -> None:
        self._batching, self._times, self._isl, self._osl = batching, times, isl, osl
        self._kv_budget, self._records, self._record = kv_budget, records, record
        self._schedule, self._ended = schedule, ended
        self._begun, self._computed = begun, computed
        # KV cache tokens that are kept for requests that will arrive; those that have and wait for a place;
        # and requests that go on elsewhere.
        self._expected: dict[int, int] = {}
        self._landed: deque[_Request] = deque()
        self._outgoing: dict[Any, _Request] = {}
        self._window = times.costs.model.window
        self._free_tokens = kv_budget.kv_budget_tokens
        # Requests that wait to begin; and prompts for others, which pass them where they find no room.
        self._waiting: deque[_Request] = deque()
        self._others: deque[_Request] = deque()
        self._running: dict[int, _Request] = {}
        # Of those that run and are in no step, in order of place: those with one token to run.
        self._ready: list[_Request] = []
        # Those that run with more tokens to run, in order of place.
        self._unfinished: dict[int, _Request] = {}
        # Of those that run, the ones that decode here.
        self._growing = 0
        self._arrivals = self._places = self._in_flight = self._decoding = 0
        self._stage_free_s = [0.0] * times.stages
        self._alive = True

    def submit(self, request: int, now: float, made: int = 0) -> None:
        """Queue a request; `made` of its tokens were generated before a restart."""
        self._arrivals += 1
        tokens = self._isl[request] + made
        self._waiting.append(_Request(request, self._arrivals, tokens, self._isl[request], now))
        self._go_on(now, None)

    def submit_for_another(self, request: Any, tokens: int, now: float) -> None:
        """Queue the prompt of a request that goes on elsewhere."""
        self._arrivals += 1
        waiting = _Request(-self._arrivals, self._arrivals, tokens, tokens, now, outgoing=request)
        self._outgoing[request] = waiting
        self._others.append(waiting)
        self._go_on(now, None)

    def withdraw(self, request: Any, now: float) -> bool:
        """Stop computing a prompt of a request that would go on elsewhere; returns False if none of it is
        left to compute, or a step in flight has to end first."""
        own = self._outgoing[request]
        if own in self._others:
            self._others.remove(own)
            del self._outgoing[request]
            return True
        if own.index not in self._running or own.steps:
            return False
        self._leave(own)
        self.release(request, 0, now)
        return True

    def release(self, request: Any, _: int, now: float) -> None:
        """Free the KV cache of a request that goes on elsewhere: it has been sent, or is no longer needed."""
        self._free_tokens += self._outgoing.pop(request).held
        self._go_on(now, None)

    def expect(self, request: int, tokens: int, _: float) -> None:
        """Reserve room for the prompt of a request whose KV cache will arrive."""
        self._expected[request] = tokens
        self._free_tokens -= tokens

    def forget(self, request: int, now: float) -> None:
        """Release the reservation of a request that will not come."""
        self._free_tokens += self._expected.pop(request)
        self._go_on(now, None)

    def land(self, request: int, now: float, made: int = 1) -> None:
        """The KV cache of an expected request has arrived; `made` of its tokens are generated."""
        self._arrivals += 1
        prompt, held = self._isl[request], self._expected.pop(request)
        tokens = prompt + made
        self._landed.append(_Request(request, self._arrivals, tokens, prompt, now, tokens - 1, held))
        self._go_on(now, None)

    def lose(self, _: float) -> list[tuple[int, int]]:
        """The replica is lost; returns its requests with the number of tokens that each has."""
        self._alive = False
        left = (*sorted(self._running.values(), key=_place), *self._waiting, *self._landed)
        return [(each.index, each.tokens - each.prompt) for each in left if each.outgoing is None]

    # -- steps

    def _go_on(self, now: float, _: None) -> None:
        while self._alive and self._stage_free_s[0] <= now and self._in_flight < self._times.in_flight:
            self._join(now)
            decodes = self._decodes(now)
            mixed = any(request.decodes for request in self._running.values())
            chunks = self._chunks(self._batching.prompt_tokens(int(mixed)), now)
            if not decodes and not chunks:
                return
            self._run(decodes, chunks, now)

    def _join(self, now: float) -> None:
        """Requests whose KV caches have arrived take the places that are free."""
        while self._landed and self._growing < self._kv_budget.max_batch:
            request = self._landed.popleft()
            self._record.waited_s += now - request.since_s
            self._start_decoding(request)
            self._enter(request)
            self._ready.append(request)

    def _start_decoding(self, request: _Request) -> None:
        request.decoding = True
        self._decoding += 1
        self._record.peak_running = max(self._record.peak_running, self._decoding)

    def _decodes(self, now: float) -> list[_Request]:
        """The requests that decode in this step, an equal share of all."""
        share = -(-self._growing // self._times.in_flight)
        wanted = self._ready[:share]
        for request in wanted:
            if request.computed < request.held or request.index not in self._running:
                continue
            while self._free_tokens <= 0 and request.index in self._running:
                own = (each for each in self._running.values() if each.outgoing is None)
                movable = (each for each in own if not each.steps)
                self._preempt(max(movable, key=lambda each: each.arrival), now)
            if request.index in self._running:
                self._free_tokens -= 1
                request.held += 1
        chosen = [request for request in wanted if request.index in self._running]
        del self._ready[: len(chosen)]
        return chosen

    def _preempt(self, request: _Request, now: float) -> None:
        """Take a request's KV cache away; it is recomputed when there is room again."""
        self._leave(request)
        if request in self._ready:
            self._ready.remove(request)
        self._free_tokens += request.held
        request.computed = request.held = 0
        self._decoding -= request.decoding
        request.decoding, request.since_s = False, now
        self._waiting.appendleft(request)
        self._record.preemptions += 1

    def _leave(self, request: _Request) -> None:
        """Take a request out of those that run; one that is ready for a step stays in that list."""
        del self._running[request.index]
        self._growing -= request.outgoing is None
        self._unfinished.pop(request.index, None)

    def _chunks(self, limit: int, now: float) -> list[tuple[_Request, int]]:
        """Prompts and chunks of prompts for this step, at most `limit` tokens in all."""
        chunks = list[tuple[_Request, int]]()
        for request in list(self._unfinished.values()):
            if limit <= 0:
                return chunks
            count = min(request.to_run, limit)
            chunks.append((request, count))
            limit -= count
        while limit > 0 and (begun := self._next_prompt()) is not None:
            request = begun
            self._free_tokens -= request.tokens
            request.held = request.tokens
            self._record.waited_s += now - request.since_s
            self._enter(request)
            count = min(request.to_run, limit)
            chunks.append((request, count))
            limit -= count
        return chunks

    def _next_prompt(self) -> _Request | None:
        """Take the next prompt that begins out of its queue; None if there is no room for one now."""
        own, others = self._waiting, self._others
        if own and not (others and others[0].arrival < own[0].arrival) and self._fits(own[0]):
            return own.popleft()
        return others.popleft() if others and self._fits(others[0]) else None

    def _fits(self, request: _Request) -> bool:
        if request.outgoing is None and self._growing >= self._kv_budget.max_batch:
            return False
        return request.tokens + self._growing <= self._free_tokens

    def _enter(self, request: _Request) -> None:
        """Put a request last among those that run."""
        self._growing += request.outgoing is None
        self._places += 1
        request.place = self._places
        self._running[request.index] = request

    def _run(self, decodes: list[_Request], chunks: list[tuple[_Request, int]], now: float) -> None:
        """Send a step through the stages."""
        tokens = attended = own = context = ends = 0.0
        window = self._window
        flight: Flight = [(request, True) for request in decodes]
        for request in decodes:
            reached = request.tokens if window is None else context_tokens(request.tokens, window)
            if request.tokens > request.prompt:
                context += reached
                own += 1
            else:  # the last token of a prompt
                tokens, ends = tokens + 1, ends + 1
                attended += reached
            request.computed = request.tokens
            request.steps += 1
        for request, count in chunks:
            tokens += count
            attended += attended_tokens(count, window, request.computed)
            request.computed += count
            request.steps += 1
            last = request.to_run == 0
            ends += last
            flight.append((request, last))
            if request.to_run > 1 or (request.outgoing is not None and request.to_run):
                self._unfinished[request.index] = request
            else:
                self._unfinished.pop(request.index, None)
        stage_s, hop_s = self._step_s(Work(tokens, attended, own, context, own + ends), decodes, chunks)
        at, free_s = now, self._stage_free_s
        for j, (seconds, after_s) in enumerate(zip(stage_s, (*hop_s, 0.0), strict=True)):
            free_s[j] = at = max(at, free_s[j]) + seconds
            at += after_s
        self._record.busy_s += max(stage_s)
        if self._outgoing:
            sent = [(each.outgoing, count) for each, count in chunks if each.outgoing is not None]
            if sent:
                self._begun(sent, now, at)
        self._in_flight += 1
        self._schedule(at, self._completed, flight)
        self._schedule(free_s[0], self._go_on, None)

    def _step_s(
        self, work: Work, decodes: list[_Request], chunks: list[tuple[_Request, int]]
    ) -> tuple[Sequence[float], Sequence[float]]:
        """Seconds of each stage and each hop for a step of this work."""
        return self._times.step(work)

    def _completed(self, now: float, flight: Flight) -> None:
        """A step has left the last stage."""
        if not self._alive:
            return
        self._in_flight -= 1
        since_s, gaps, running_s = 0.0, 0, 0.0
        all_last_s, grow, isl, osl = self._records.last_s, self._kv_budget.grow, self._isl, self._osl
        for request, samples in flight:
            request.steps -= 1
            if not samples:
                if request.to_run == 1 and not request.steps and request.outgoing is None:
                    insort(self._ready, request, key=_place)
                continue
            if request.outgoing is not None:
                self._leave(request)
                self._record.requests += 1
                self._computed(request.outgoing, now)
                continue
            index = request.index
            if request.decoding:
                last_s = all_last_s[index]
                if gaps and last_s != since_s:
                    self._records.gap(now - since_s, gaps)
                    gaps = 0
                since_s, gaps = last_s, gaps + 1
                all_last_s[index] = now
                running_s += now - last_s
            else:
                self._start_decoding(request)
                self._records.first(index, now)
            request.tokens += 1
            grow(index)
            if request.tokens < isl[index] + osl[index]:
                # It goes to the end of those that run.
                self._places += 1
                request.place = self._places
                self._ready.append(request)
            else:
                self._end(request, now)
        self._record.running_s += running_s
        if gaps:
            self._records.gap(now - since_s, gaps)
        self._go_on(now, None)

    def _end(self, request: _Request, now: float) -> None:
        """A request has its last token."""
        self._leave(request)
        self._free_tokens += request.held
        self._decoding -= 1
        self._record.requests += 1
        self._ended(request.index, now)
