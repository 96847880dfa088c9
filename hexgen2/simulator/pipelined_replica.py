"""A colocated or mixed replica with several steps in flight, step by step as the runtime makes them.

Prompts delay some of a pipeline's steps and not others, so its steps cannot be taken together, as those of
decode_batch.py are. Rules and names are those of runtime/worker/scheduler.py: a request has tokens, of which
the first `computed` are in the KV cache or will be after the steps in flight, and a request with one token to
run decodes. KV cache is counted in tokens, not in blocks.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar

from cost_model.base import Work
from cost_model.lengths import attended_tokens, context_tokens
from hexgen2.prediction.step_times import StepTimes
from hexgen2.simulator.batching import Batching
from hexgen2.simulator.cohort import Cohort, Request, joined
from hexgen2.simulator.prefill_replica import Begun, nobody
from hexgen2.simulator.records import Records, ReplicaRecord
from hexgen2.simulator.windowed_use import WindowedUse
from runtime.routing.kv_budget import KvBudget

Decodes = list[Request | Cohort]
"""What decodes in a step, in the order of places."""
Flight = tuple[Decodes, list[tuple[Request, bool]]]
"""What decodes in a step, and the requests with prompts in it: whether each gets a token from it."""


def _place(item: Request | Cohort) -> int:
    return item.place


class PipelinedReplica:
    """One colocated or mixed replica under the policy "mixed".

    A step begins when the first stage is free and fewer steps are in flight than may be. It decodes an equal
    share of all requests, those first whose last token is oldest, beside chunks of prompts.

    Parameters
    ----------
    isl, osl : prompt and output tokens of each request
    kv_budget : the front end's account of the replica's KV cache, which is told of tokens or asks for
        `uncounted`
    schedule : the simulation's schedule(time_s, call, argument)
    ended : called with (request, now) when a request has its last token
    begun, computed : as of PrefillReplica, for prompts of requests that go on elsewhere

    Attributes
    ----------
    uncounted : tokens that requests have had in their cohorts, of which kv_budget was not told
    """

    together: ClassVar[bool] = True
    """Whether requests may decode as cohorts."""

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
        self._landed: deque[Request] = deque()
        self._outgoing: dict[Any, Request] = {}
        self._window = times.costs.model.window
        self._free_tokens = kv_budget.kv_budget_tokens
        self._windowed = WindowedUse(kv_budget)
        # Requests that wait to begin; and prompts for others, which pass them where they find no room.
        self._waiting: deque[Request] = deque()
        self._others: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        # Of those that run and are in no step, in order of place: those with one token to run.
        self._ready: Decodes = []
        self._flights: dict[int, Flight] = {}
        # Those that run with more tokens to run, in order of place.
        self._unfinished: dict[int, Request] = {}
        # Of those that run, the ones that decode here.
        self._growing = 0
        self._arrivals = self._places = self._flown = self._decoding = self.uncounted = 0
        self._stage_free_s = [0.0] * times.stages
        self._alive = True

    def submit(self, request: int, now: float, made: int = 0) -> None:
        """Queue a request; `made` of its tokens were generated before a restart."""
        self._arrivals += 1
        tokens = self._isl[request] + made
        self._waiting.append(Request(request, self._arrivals, tokens, self._isl[request], now))
        self._go_on(now, None)

    def submit_for_another(self, request: Any, tokens: int, now: float) -> None:
        """Queue the prompt of a request that goes on elsewhere."""
        self._arrivals += 1
        waiting = Request(-self._arrivals, self._arrivals, tokens, tokens, now, outgoing=request)
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
        self._give(self._outgoing.pop(request).held)
        self._go_on(now, None)

    def expect(self, request: int, tokens: int, _: float) -> None:
        """Reserve room for the prompt of a request whose KV cache will arrive."""
        self._expected[request] = tokens
        self._take(tokens)

    def forget(self, request: int, now: float) -> None:
        """Release the reservation of a request that will not come."""
        self._give(self._expected.pop(request))
        self._go_on(now, None)

    def land(self, request: int, now: float, made: int = 1) -> None:
        """The KV cache of an expected request has arrived; `made` of its tokens are generated."""
        self._arrivals += 1
        prompt, held = self._isl[request], self._expected.pop(request)
        tokens = prompt + made
        self._landed.append(Request(request, self._arrivals, tokens, prompt, now, tokens - 1, held))
        self._go_on(now, None)

    def lose(self, _: float) -> list[tuple[int, int]]:
        """The replica is lost; returns its requests with the number of tokens that each has."""
        self._alive = False
        for flight in self._flights.values():
            self._dissolve(flight[0], True)
        self._dissolve(self._ready, False)
        left = (*sorted(self._running.values(), key=_place), *self._waiting, *self._landed)
        return [(each.index, each.tokens - each.prompt) for each in left if each.outgoing is None]

    def uncounted_of(self) -> Iterator[tuple[int, int]]:
        """The requests in cohorts, and the tokens of each by now."""
        held = self._kv_budget.held
        for item in chain(self._ready, *(decodes for decodes, _ in self._flights.values())):
            if isinstance(item, Cohort):
                for request, tokens in zip(item.requests, item.tokens, strict=True):
                    yield request.index, held[request.index] + tokens - request.tokens

    def _take(self, tokens: int) -> None:
        """So many tokens of a request are to have KV cache here."""
        self._free_tokens -= tokens
        self._windowed.free -= self._windowed.kept(tokens)

    def _give(self, tokens: int) -> None:
        """Free the KV cache of a request, which holds so many tokens."""
        self._free_tokens += tokens
        self._windowed.free += self._windowed.kept(tokens)

    # -- steps

    def _go_on(self, now: float, _: None) -> None:
        while self._alive and self._stage_free_s[0] <= now and len(self._flights) < self._times.in_flight:
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

    def _start_decoding(self, request: Request) -> None:
        request.decoding = True
        self._decoding += 1
        self._record.peak_running = max(self._record.peak_running, self._decoding)

    def _decodes(self, now: float) -> Decodes:
        """What decodes in this step, an equal share of all requests."""
        share = -(-self._growing // self._times.in_flight)
        chosen: Decodes = []
        wanted = more = 0
        for item in self._ready:
            if wanted >= share:
                break
            if isinstance(item, Request):
                wanted, more = wanted + 1, more + (item.computed >= item.held)
                chosen.append(item)
                continue
            taken = item if len(item) <= share - wanted else item.split(share - wanted)
            wanted, more = wanted + len(taken), more + len(taken)
            chosen.append(taken)
            if taken is not item:
                self._ready.insert(len(chosen) - 1, taken)
                break
        windowed = self._more_windowed(chosen) if self._windowed else 0
        if more > self._free_tokens or windowed > self._windowed.free:
            self._ready = self._dissolve(self._ready, False)
            return self._decodes_beside_preemption(share, now)
        self._free_tokens -= more
        self._windowed.free -= windowed
        for item in chosen:
            if isinstance(item, Request) and item.computed >= item.held:
                item.held += 1
        del self._ready[: len(chosen)]
        return chosen

    def _more_windowed(self, items: Decodes) -> int:
        """Tokens that a step with these takes more of the layers with a window."""
        most, more = self._windowed.most, 0
        for item in items:
            if isinstance(item, Cohort):
                more += sum(tokens <= most for tokens in item.tokens)
            else:
                more += most > item.held <= item.computed
        return more

    def _decodes_beside_preemption(self, share: int, now: float) -> Decodes:
        """So many requests that decode in this step, each by itself; others are preempted for them."""
        wanted = [item for item in self._ready[:share] if isinstance(item, Request)]
        for request in wanted:
            if request.computed < request.held or request.index not in self._running:
                continue
            while request.index in self._running and not self._grows(request):
                self._preempt(max(self._movable(), key=lambda each: each.arrival), now)
        chosen: Decodes = [request for request in wanted if request.index in self._running]
        del self._ready[: len(chosen)]
        return chosen

    def _grows(self, request: Request) -> bool:
        """Take one more token for a request; False without room for it."""
        windowed = self._windowed
        more = windowed.kept(request.held + 1) - windowed.kept(request.held)
        if self._free_tokens <= 0 or more > windowed.free:
            return False
        self._free_tokens -= 1
        windowed.free -= more
        request.held += 1
        return True

    def _movable(self) -> list[Request]:
        """The requests of this replica that are in no step."""
        flying = {
            request.index
            for decodes, _ in self._flights.values()
            for item in decodes
            if isinstance(item, Cohort)
            for request in item.requests
        }
        own = (each for each in self._running.values() if each.outgoing is None)
        return [each for each in own if not each.steps and each.index not in flying]

    def _dissolve(self, items: Decodes, in_flight: bool) -> Decodes:
        """All their requests, each by itself; in_flight: they are in a step."""
        found: Decodes = []
        for item in items:
            if isinstance(item, Request):
                found.append(item)
                continue
            own = zip(item.requests, item.tokens, strict=True)
            for place, (request, tokens) in enumerate(own, item.place):
                request.place, self._records.last_s[request.index] = place, item.last_s
                self._leaves_cohort(request, tokens, in_flight)
                found.append(request)
        return found

    def _leaves_cohort(self, request: Request, tokens: int, in_flight: bool) -> None:
        """A request goes on by itself, or ends, with so many tokens."""
        had = tokens - request.tokens
        self.uncounted -= had
        self._kv_budget.grow(request.index, had)
        request.has(tokens, in_flight)

    def _preempt(self, request: Request, now: float) -> None:
        """Take a request's KV cache away; it is recomputed when there is room again."""
        self._leave(request)
        if request in self._ready:
            self._ready.remove(request)
        self._give(request.held)
        request.computed = request.held = 0
        self._decoding -= request.decoding
        request.decoding, request.since_s = False, now
        self._waiting.appendleft(request)
        self._record.preemptions += 1

    def _leave(self, request: Request) -> None:
        """Take a request out of those that run; one that is ready for a step stays in that list."""
        del self._running[request.index]
        self._growing -= request.outgoing is None
        self._unfinished.pop(request.index, None)

    def _chunks(self, limit: int, now: float) -> list[tuple[Request, int]]:
        """Prompts and chunks of prompts for this step, at most `limit` tokens in all."""
        chunks = list[tuple[Request, int]]()
        for request in list(self._unfinished.values()):
            if limit <= 0:
                return chunks
            count = min(request.to_run, limit)
            chunks.append((request, count))
            limit -= count
        while limit > 0 and (begun := self._next_prompt()) is not None:
            request = begun
            self._take(request.tokens)
            request.held = request.tokens
            self._record.waited_s += now - request.since_s
            self._enter(request)
            count = min(request.to_run, limit)
            chunks.append((request, count))
            limit -= count
        return chunks

    def _next_prompt(self) -> Request | None:
        """Take the next prompt that begins out of its queue; None if there is no room for one now."""
        own, others = self._waiting, self._others
        if own and not (others and others[0].arrival < own[0].arrival) and self._fits(own[0]):
            return own.popleft()
        return others.popleft() if others and self._fits(others[0]) else None

    def _fits(self, request: Request) -> bool:
        if request.outgoing is None and self._growing >= self._kv_budget.max_batch:
            return False
        windowed = self._windowed
        if windowed.kept(request.tokens) + self._growing > windowed.free:
            return False
        return request.tokens + self._growing <= self._free_tokens

    def _enter(self, request: Request) -> None:
        """Put a request last among those that run."""
        self._growing += request.outgoing is None
        self._places += 1
        request.place = self._places
        self._running[request.index] = request

    def _run(self, decodes: Decodes, chunks: list[tuple[Request, int]], now: float) -> None:
        """Send a step through the stages."""
        tokens = attended = own = context = ends = 0.0
        window = self._window
        alone, prompts = list[Request](), list[tuple[Request, bool]]()
        for item in decodes:
            if isinstance(item, Cohort):
                own += len(item)
                if window is None:
                    context += item.context
                else:
                    for reached in item.tokens:
                        context += context_tokens(reached, window)
                continue
            alone.append(item)
            attends = item.tokens if window is None else context_tokens(item.tokens, window)
            if item.tokens > item.prompt:
                context += attends
                own += 1
            else:  # the last token of a prompt
                tokens, ends = tokens + 1, ends + 1
                attended += attends
            item.computed = item.tokens
            item.steps += 1
        for request, count in chunks:
            tokens += count
            attended += attended_tokens(count, window, request.computed)
            request.computed += count
            request.steps += 1
            last = request.to_run == 0
            ends += last
            prompts.append((request, last))
            if request.to_run > 1 or (request.outgoing is not None and request.to_run):
                self._unfinished[request.index] = request
            else:
                self._unfinished.pop(request.index, None)
        stage_s, hop_s = self._step_s(Work(tokens, attended, own, context, own + ends), alone, chunks)
        at, free_s = now, self._stage_free_s
        for j, (seconds, after_s) in enumerate(zip(stage_s, (*hop_s, 0.0), strict=True)):
            free_s[j] = at = max(at, free_s[j]) + seconds
            at += after_s
        self._record.busy_s += max(stage_s)
        if self._outgoing:
            sent = [(each.outgoing, count) for each, count in chunks if each.outgoing is not None]
            if sent:
                self._begun(sent, now, at)
        self._flown += 1
        self._flights[self._flown] = decodes, prompts
        self._schedule(at, self._completed, self._flown)
        self._schedule(free_s[0], self._go_on, None)

    def _step_s(
        self, work: Work, decodes: list[Request], chunks: list[tuple[Request, int]]
    ) -> tuple[Sequence[float], Sequence[float]]:
        """Seconds of each stage and each hop for a step of this work."""
        return self._times.step(work)

    def _completed(self, now: float, flight: int) -> None:
        """A step has left the last stage."""
        if not self._alive:
            return
        decodes, prompts = self._flights.pop(flight)
        since_s, gaps, running_s = 0.0, 0, 0.0
        all_last_s, staying = self._records.last_s, list[Request | Cohort]()
        for item in decodes:
            if isinstance(item, Request):
                item.steps -= 1
                if not item.decoding:
                    if self._first_token(item, now):
                        staying.append(item)
                    continue
                last_s, count = all_last_s[item.index], 1
                all_last_s[item.index] = now
            else:
                last_s, count = item.last_s, len(item)
            if gaps and last_s != since_s:
                self._records.gap(now - since_s, gaps)
                gaps = 0
            since_s, gaps = last_s, gaps + count
            running_s += count * (now - last_s)
            if isinstance(item, Request):
                if self._next_token(item, now):
                    staying.append(item)
                continue
            item.step(now)
            self.uncounted += count
            for request in item.take_ended():
                self._leaves_cohort(request, self._total(request), False)
                self._end(request, now)
            if len(item):
                staying.append(item)
        self._append(staying, now)
        for request, samples in prompts:
            request.steps -= 1
            if not samples:
                if request.to_run == 1 and not request.steps and request.outgoing is None:
                    insort(self._ready, request, key=_place)
            elif request.outgoing is not None:
                self._leave(request)
                self._record.requests += 1
                self._computed(request.outgoing, now)
            elif self._first_token(request, now):
                self._places += 1
                request.place = self._places
                self._ready.append(request)
        self._record.running_s += running_s
        if gaps:
            self._records.gap(now - since_s, gaps)
        self._go_on(now, None)

    def _first_token(self, request: Request, now: float) -> bool:
        """A request has its first token of this replica; returns whether it goes on."""
        self._start_decoding(request)
        self._records.first(request.index, now)
        return self._next_token(request, now)

    def _next_token(self, request: Request, now: float) -> bool:
        """A request that decodes by itself has one more token; returns whether it goes on."""
        request.tokens += 1
        self._kv_budget.grow(request.index)
        if request.tokens < self._total(request):
            return True
        self._end(request, now)
        return False

    def _total(self, request: Request) -> int:
        """The tokens that a request has when it ends."""
        return self._isl[request.index] + self._osl[request.index]

    def _append(self, items: Sequence[Request | Cohort], now: float) -> None:
        """What has had a token from the step that ends now goes to the end of those that run."""
        parts, alone = list[Cohort](), list[Request]()
        for item in items:
            if isinstance(item, Cohort):
                if alone:
                    parts.append(self._cohort(alone, now))
                    alone = []
                parts.append(item)
            elif self.together:
                alone.append(item)
            else:
                self._places += 1
                item.place = self._places
                self._ready.append(item)
        if alone:
            parts.append(self._cohort(alone, now))
        if parts:
            cohort = joined(parts)
            cohort.place = self._places + 1
            self._places += len(cohort)
            self._ready.append(cohort)

    def _cohort(self, requests: list[Request], now: float) -> Cohort:
        totals = list(map(self._total, requests))
        ends = [total - request.tokens for total, request in zip(totals, requests, strict=True)]
        return Cohort(requests, totals, ends, now)

    def _end(self, request: Request, now: float) -> None:
        """A request has its last token."""
        self._leave(request)
        self._give(request.held)
        self._decoding -= 1
        self._record.requests += 1
        self._ended(request.index, now)
