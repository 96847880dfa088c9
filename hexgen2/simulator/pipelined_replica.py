"""A colocated replica with several steps in flight, step by step as the runtime makes them.

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

from cost_model.base import Work
from cost_model.lengths import attended_tokens, context_tokens
from hexgen2.prediction.step_times import StepTimes
from hexgen2.simulator.batching import Batching
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

    @property
    def to_run(self) -> int:
        """Tokens that have not been computed."""
        return self.tokens - self.computed

    @property
    def decodes(self) -> bool:
        """Whether a long prompt in the same step would delay its next token."""
        return self.tokens > self.prompt and self.tokens - self.computed <= 1

    @property
    def needs_room(self) -> bool:
        """Whether the next token that it runs has no place in the KV cache yet."""
        return self.computed >= self.held


def _place(request: _Request) -> int:
    return request.place


Flight = list[tuple[_Request, bool]]
"""The requests of a step, and whether each gets a token from it."""


class PipelinedReplica:
    """One colocated replica under the policy "mixed".

    A step begins when the first stage is free and fewer steps are in flight than may be. It decodes an equal
    share of all requests, those first whose last token is oldest, beside chunks of prompts.

    Parameters
    ----------
    isl, osl : prompt and output tokens of each request
    kv_budget : the front end's account of the replica's KV cache, which is told of every token
    schedule : the simulation's schedule(time_s, call, argument)
    ended : called with (request, now) when a request has its last token
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
    ) -> None:
        self._batching, self._times, self._isl, self._osl = batching, times, isl, osl
        self._kv_budget, self._records, self._record = kv_budget, records, record
        self._schedule, self._ended = schedule, ended
        self._window = times.costs.model.window
        self._free_tokens = kv_budget.kv_budget_tokens
        self._waiting: deque[_Request] = deque()
        self._running: dict[int, _Request] = {}
        # Of those that run and are in no step, in order of place: those with one token to run.
        self._ready: list[_Request] = []
        # Those that run with more tokens to run, in order of place.
        self._unfinished: dict[int, _Request] = {}
        self._arrivals = self._places = self._in_flight = self._decoding = 0
        self._stage_free_s = [0.0] * times.stages
        self._alive = True

    def submit(self, request: int, now: float, made: int = 0) -> None:
        """Queue a request; `made` of its tokens were generated before a restart."""
        self._arrivals += 1
        tokens = self._isl[request] + made
        self._waiting.append(_Request(request, self._arrivals, tokens, self._isl[request], now))
        self._go_on(now, None)

    def lose(self, _: float) -> list[tuple[int, int]]:
        """The replica is lost; returns its requests with the number of tokens that each has."""
        self._alive = False
        left = (*self._running.values(), *self._waiting)
        return [(each.index, each.tokens - each.prompt) for each in left]

    # -- steps

    def _go_on(self, now: float, _: None) -> None:
        while self._alive and self._stage_free_s[0] <= now and self._in_flight < self._times.in_flight:
            decodes = self._decodes(now)
            mixed = any(request.decodes for request in self._running.values())
            chunks = self._chunks(self._batching.prompt_tokens(int(mixed)), now)
            if not decodes and not chunks:
                return
            self._run(decodes, chunks, now)

    def _decodes(self, now: float) -> list[_Request]:
        """The requests that decode in this step, an equal share of all."""
        share = -(-len(self._running) // self._times.in_flight)
        wanted = self._ready[:share]
        for request in wanted:
            if request.index not in self._running or not request.needs_room:
                continue
            while not self._free_tokens and request.index in self._running:
                movable = (each for each in self._running.values() if not each.steps)
                self._preempt(max(movable, key=lambda each: each.arrival), now)
            if request.index in self._running:
                self._free_tokens -= 1
                request.held += 1
        chosen = [request for request in wanted if request.index in self._running]
        del self._ready[: len(chosen)]
        return chosen

    def _preempt(self, request: _Request, now: float) -> None:
        """Take a request's KV cache away; it is recomputed when there is room again."""
        del self._running[request.index]
        self._unfinished.pop(request.index, None)
        if request in self._ready:
            self._ready.remove(request)
        self._free_tokens += request.held
        request.computed = request.held = 0
        self._decoding -= request.decoding
        request.decoding, request.since_s = False, now
        self._waiting.appendleft(request)
        self._record.preemptions += 1

    def _chunks(self, limit: int, now: float) -> list[tuple[_Request, int]]:
        """Prompts and chunks of prompts for this step, at most `limit` tokens in all."""
        chunks = list[tuple[_Request, int]]()
        for request in list(self._unfinished.values()):
            if limit <= 0:
                return chunks
            count = min(request.to_run, limit)
            chunks.append((request, count))
            limit -= count
        while self._waiting and limit > 0:
            request, occupied = self._waiting[0], len(self._running)
            if occupied >= self._kv_budget.max_batch or request.tokens + occupied > self._free_tokens:
                break
            self._waiting.popleft()
            self._free_tokens -= request.tokens
            request.held = request.tokens
            self._record.waited_s += now - request.since_s
            self._enter(request)
            count = min(request.to_run, limit)
            chunks.append((request, count))
            limit -= count
        return chunks

    def _enter(self, request: _Request) -> None:
        """Put a request last among those that run."""
        self._places += 1
        request.place = self._places
        self._running[request.index] = request

    def _run(self, decodes: list[_Request], chunks: list[tuple[_Request, int]], now: float) -> None:
        """Send a step through the stages."""
        tokens = attended = own = context = ends = 0.0
        flight: Flight = [(request, True) for request in decodes]
        for request in decodes:
            if request.tokens > request.prompt:
                context += context_tokens(request.tokens, self._window)
                own += 1
            else:  # the last token of a prompt
                tokens, ends = tokens + 1, ends + 1
                attended += context_tokens(request.tokens, self._window)
            request.computed = request.tokens
            request.steps += 1
        for request, count in chunks:
            tokens += count
            attended += attended_tokens(count, self._window, request.computed)
            request.computed += count
            request.steps += 1
            last = request.to_run == 0
            ends += last
            flight.append((request, last))
            if request.to_run > 1:
                self._unfinished[request.index] = request
            else:
                self._unfinished.pop(request.index, None)
        stage_s, hop_s = self._times.step(Work(tokens, attended, own, context, own + ends))
        at, free_s = now, self._stage_free_s
        for j, (seconds, after_s) in enumerate(zip(stage_s, (*hop_s, 0.0), strict=True)):
            free_s[j] = at = max(at, free_s[j]) + seconds
            at += after_s
        self._record.busy_s += max(stage_s)
        self._in_flight += 1
        self._schedule(at, self._completed, flight)
        self._schedule(free_s[0], self._go_on, None)

    def _completed(self, now: float, flight: Flight) -> None:
        """A step has left the last stage."""
        if not self._alive:
            return
        self._in_flight -= 1
        since_s, gaps = 0.0, 0
        for request, samples in flight:
            request.steps -= 1
            if not samples:
                if request.to_run == 1 and not request.steps:
                    insort(self._ready, request, key=_place)
                continue
            if request.decoding:
                last_s = self._records.last_s[request.index]
                if gaps and last_s != since_s:
                    self._records.gap(now - since_s, gaps)
                    gaps = 0
                since_s, gaps = last_s, gaps + 1
                self._records.last_s[request.index] = now
                self._record.running_s += now - last_s
            else:
                request.decoding = True
                self._decoding += 1
                self._record.peak_running = max(self._record.peak_running, self._decoding)
                self._records.first(request.index, now)
            self._take(request, now)
        if gaps:
            self._records.gap(now - since_s, gaps)
        self._go_on(now, None)

    def _take(self, request: _Request, now: float) -> None:
        """Give a request its next token."""
        request.tokens += 1
        self._kv_budget.grow(request.index)
        del self._running[request.index]
        if request.tokens < self._isl[request.index] + self._osl[request.index]:
            self._enter(request)
            self._ready.append(request)
            return
        self._free_tokens += request.held
        self._decoding -= 1
        self._record.requests += 1
        self._ended(request.index, now)
