"""A replica that decodes: requests run as a batch, and prompts are mixed into its steps.

On a decode replica, requests join the batch at the first step after their KV cache has arrived, and the only
prompts are those of requests that it preempted. On a colocated replica every request starts as a prompt. On a
mixed one there are both, and prompts of requests that go on elsewhere.

KV cache is accounted for as in the runtime's scheduler, by what requests hold now, but in tokens instead of
blocks. When the next tokens do not fit, the youngest request is preempted; it is recomputed later from its
prompt and the tokens generated so far. There is no prefix caching, since only the lengths of prompts are
known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from cost_model.base import Work
from hexgen2.prediction.step_times import StepTimes
from hexgen2.simulator.batching import Batching
from hexgen2.simulator.decode_batch import DecodeBatch
from hexgen2.simulator.prefill_replica import Begun, nobody
from hexgen2.simulator.prompt_gate import PromptGate
from hexgen2.simulator.prompt_queue import Chunk, Prompt, PromptQueue, attended
from hexgen2.simulator.records import BatchGaps, Records, ReplicaRecord
from hexgen2.simulator.windowed_use import WindowedUse
from runtime.routing.kv_budget import KvBudget


class DecodeReplica:
    """One decode, colocated or mixed replica.

    Parameters
    ----------
    isl, osl : prompt and output tokens of each request
    kv_budget : the front end's account of the replica's KV cache, without the tokens that requests have
        generated since they joined the batch
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
        # Requests that go on elsewhere, by numbers below 0 that stand for them here.
        self._outgoing: dict[int, Any] = {}
        self._window = times.costs.model.window
        self.running = DecodeBatch(times.decode_turn, self._window)
        self._prompts = PromptQueue(self._take_room)
        self._gate = PromptGate(batching, self._prompts)
        self._computing: dict[int, Prompt] = {}
        self._joining: deque[tuple[int, float]] = deque()
        # Tokens in the KV cache, without those generated since joining the batch.
        self._held: dict[int, int] = {}
        self._held_tokens = 0
        # Of the layers with a window, what others take than those that decode.
        self._windowed = WindowedUse(kv_budget)
        # Tokens that the requests here will have in the end, where none may be preempted.
        self._promised_tokens = self._promised_windowed = 0
        self._made: dict[int, int] = {}
        self._gaps = BatchGaps(records)
        self._busy = False
        self._planned = self._version = self._grown = 0
        self._grown_at = -1.0, 0
        self._sent = 0

    # -- arrival and departure of requests

    def expect(self, request: int, tokens: int, now: float) -> None:
        """Reserve room for the prompt of a request whose KV cache will arrive."""
        self._hold(request, tokens)
        running = self.running
        if running.count and not self._busy and self._planned > self._steps_with_room():
            self._interrupt(now)

    def forget(self, request: int, now: float) -> None:
        """Release the reservation of a request that will not come."""
        self._free(request)
        if self._prompts:
            self._interrupt(now)

    def land(self, request: int, now: float, made: int = 1) -> None:
        """The KV cache of an expected request has arrived; `made` of its tokens are generated."""
        self._made[request] = made
        self._joining.append((request, now))
        self._interrupt(now)

    def submit(self, request: int, now: float, made: int = 0) -> None:
        """Queue a request to be prefilled here; `made` of its tokens were generated before a restart."""
        self._made[request] = made
        first, gate = not self._prompts.queue, self._gate
        if first and gate.counts:
            self._interrupt(now)  # Steps until now do not count.
            gate.arrived()
        self._prompts.add(Prompt(request, self._isl[request] + made, now))
        if first or gate.counts:
            self._interrupt(now)  # Otherwise the prompt ahead is being computed, or waits for room.

    def submit_for_another(self, request: Any, tokens: int, now: float) -> None:
        """Queue the prompt of a request that goes on elsewhere."""
        first = not self._prompts
        number = -1 - self._sent
        self._sent += 1
        self._outgoing[number] = request
        self._prompts.add_other(Prompt(number, tokens, now))
        if first:
            self._interrupt(now)

    def withdraw(self, request: Any, now: float) -> bool:
        """Stop computing a prompt of a request that would go on elsewhere; returns False if none of it is
        left to compute."""
        number = self._number_of(request)
        prompt = self._prompts.withdraw(number)
        if prompt is None:
            return False
        self._computing.pop(number, None)
        if prompt.begun:
            self.release(request, prompt.tokens, now)
        else:
            del self._outgoing[number]
        return True

    def release(self, request: Any, _: int, now: float) -> None:
        """Free the KV cache of a request that goes on elsewhere: it has been sent, or is no longer needed."""
        number = self._number_of(request)
        del self._outgoing[number]
        self._free(number)
        if self._prompts:
            self._interrupt(now)

    def _number_of(self, request: Any) -> int:
        return next(number for number, other in self._outgoing.items() if other is request)

    def lose(self, now: float) -> list[tuple[int, int]]:
        """The replica is lost; returns its requests with the number of tokens that each has."""
        running = self.running
        if running.count and not self._busy:
            self._decode(min(running.steps_before(now), self._planned))
        self._version += 1
        for request in list(running):
            self._records.last_s[request] = self._gaps.leave(request, running.time_s)
            self._made[request] += running.leave(request)
        return list(self._made.items())

    def grown(self, now: float) -> int:
        """Tokens that the running requests have generated since they joined the batch."""
        asked = now, self._version
        if self._grown_at != asked:  # Each route to this replica asks.
            running = self.running
            self._grown_at, self._grown = asked, running.made
            if running.count and not self._busy:
                self._grown += min(running.steps_before(now), self._planned) * running.count
        return self._grown

    def grown_at_most(self) -> int:
        """An upper bound of `grown` until the next step is chosen."""
        return self.running.made + self._planned * self.running.count

    def uncounted(self, now: float) -> Iterator[tuple[int, int]]:
        """The requests that decode, and the tokens of each by now."""
        running, held = self.running, self._held
        steps = 0 if self._busy or not running.count else min(running.steps_before(now), self._planned)
        return ((request, held[request] + made) for request, made in running.made_by_each(steps))

    # -- steps

    def _interrupt(self, now: float) -> None:
        """Something changed: choose again what follows the step in flight."""
        if self._busy:
            return
        running = self.running
        if running.count:
            steps = running.steps_until(now)
            if steps >= self._planned:
                return  # The next choice is due by then anyway.
            self._decode(steps)
        self._go_on(running.time_s if running.count else max(now, running.time_s))

    def _go_on(self, at_s: float) -> None:
        """Choose the next step at at_s. Choose it now if no prompt is queued and nothing can be preempted:
        only such a choice can be revised when something changes before at_s."""
        self._version += 1
        if self._prompts or self._room < len(self._joining):
            self._busy = True
            self._schedule(at_s, self._choose, self._version)
        else:
            self._choose(at_s, self._version)

    def _choose(self, now: float, version: int) -> None:
        if version != self._version:
            return
        running, record = self.running, self._record
        running.time_s = now
        self._busy = False
        if self._joining:
            self._admit_arrived(now)
        if self._room < 0:
            self._make_room(now)
        if running.count > record.peak_running:
            record.peak_running = running.count
        gate = self._gate
        if self._prompts and gate.open(running.count) and (steps := self._chunks()):
            gate.ran_prompts()
            self._run(steps, now)
            return
        running.settle()
        if running.count:
            joins = self._joining and self._has_place()  # It takes the place of one preempted just now.
            self._planned = 1 if joins else min(running.regime_steps, self._steps_with_room())
            if gate.counts and self._prompts.queue:
                self._planned = int(min(self._planned, gate.steps_left()))
            self._schedule(now + running.span_s(self._planned), self._change, self._version)

    def _change(self, _: float, version: int) -> None:
        if version == self._version:
            self._decode(self._planned)
            self._go_on(self.running.time_s)

    def _decode(self, steps: int) -> None:
        """Run `steps` steps with decodes only."""
        if not steps:
            return
        running, record = self.running, self._record
        count, span_s = running.count, running.span_s(steps)
        self._gate.decoded(steps)
        self._gaps.note(running.time_s + running.step_s, span_s / steps, count * steps)
        record.busy_s += span_s
        record.running_s += span_s * count
        for request in running.advance(steps):
            self._end(request, running.time_s)

    def _chunks(self) -> list[list[Chunk]]:
        """The chunks for each of the steps that are in flight together, as far as there are prompts."""
        in_flight, batching, decodes = self._times.in_flight, self._batching, self.running.count
        steps: list[list[Chunk]] = []
        while self._prompts and len(steps) < in_flight:
            own = -(-decodes // in_flight)
            limit = batching.prompt_tokens(own)
            chunks = self._prompts.take(limit, batching.whole, batching.any_length(own))
            if not chunks:
                break
            steps.append(chunks)
            if len(steps) < in_flight:
                decodes += sum(chunk.last for chunk in chunks)
        return steps

    def _run(self, steps: list[list[Chunk]], now: float) -> None:
        """Run one turn of the pipeline: steps with these chunks, and all decodes spread evenly over them
        unless the policy lets decodes wait."""
        running = self.running
        decodes = 0
        if self._batching.prefill_first:
            self._gaps.hold_up(running, now)
        else:
            decodes = running.count
        count = max(len(steps), min(self._times.in_flight, decodes))
        own, context = decodes / count, running.context / count if decodes else 0.0
        works = []
        for chunks in steps:
            tokens = ends = 0
            for chunk in chunks:
                tokens += chunk.tokens
                ends += chunk.last
            works.append(Work(tokens, attended(chunks, self._window), own, context, own + ends))
        if count > len(steps):
            works += [Work(0.0, 0.0, own, context, own)] * (count - len(steps))
        seconds = self._times.turn_s(works)
        self._record.busy_s += seconds
        self._record.running_s += seconds * running.count
        self._busy = True
        if self._outgoing:
            self._announce(steps, now, now + seconds)
        chunks = steps[0] if len(steps) == 1 else list(chain(*steps))
        self._schedule(now + seconds, self._ran, (chunks, decodes, self._version))

    def _announce(self, steps: list[list[Chunk]], begun_s: float, ends_s: float) -> None:
        """Tell of the chunks that are for others."""
        own = ((self._outgoing.get(chunk.prompt.request), chunk.tokens) for chunk in chain(*steps))
        sent = [(request, tokens) for request, tokens in own if request is not None]
        if sent:
            self._begun(sent, begun_s, ends_s)

    def _ran(self, now: float, turn: tuple[list[Chunk], int, int]) -> None:
        chunks, decodes, version = turn
        if version != self._version:
            return
        if decodes:
            self._gaps.note(now, now - self.running.time_s, decodes)
            for request in self.running.step_at(now):
                self._end(request, now)
        for chunk in chunks:
            if chunk.last:
                self._first(chunk.prompt.request, now)
        self._go_on(now)

    # -- the batch

    def _has_place(self) -> bool:
        """Whether the batch has a place beside the running requests and those whose prompt is being
        computed."""
        return self.running.count + self._places_taken < self._kv_budget.max_batch

    @property
    def _places_taken(self) -> int:
        """Requests whose prompts are being computed, and that will decode here."""
        if not self._outgoing:
            return len(self._computing)
        return sum(request >= 0 for request in self._computing)

    def _admit_arrived(self, now: float) -> None:
        while self._joining and self._has_place():
            request, since_s = self._joining.popleft()
            self._record.waited_s += max(0.0, now - since_s)
            self._gaps.hold_up((request,), self._records.last_s[request])
            self._join(request)

    def _first(self, request: int, now: float) -> None:
        """A prompt is computed, and the token after it generated."""
        del self._computing[request]
        if request in self._outgoing:
            self._record.requests += 1
            self._computed(self._outgoing[request], now)
            return
        self._made[request] += 1
        self._kv_budget.grow(request)
        self._records.first(request, now)
        if self._made[request] >= self._osl[request]:
            self._end(request, now)
        else:
            self._join(request)

    def _join(self, request: int) -> None:
        made = self._made[request]
        self._hold(request, 1)
        self._windowed.release(request)
        self.running.join(request, self._isl[request] + made, self._osl[request] - made)

    def _end(self, request: int, now: float) -> None:
        self._free(request)
        promise = self._promise(request)
        self._promised_tokens -= promise
        self._promised_windowed -= self._windowed.kept(promise)
        del self._made[request]
        self._record.requests += 1
        self._ended(request, now)

    # -- KV cache

    def _hold(self, request: int, tokens: int) -> None:
        self._held[request] = self._held.get(request, 0) + tokens
        self._held_tokens += tokens
        self._windowed.hold(request, self._windowed.kept(self._held[request]))

    def _free(self, request: int) -> None:
        self._held_tokens -= self._held.pop(request)
        self._windowed.release(request)

    @property
    def _free_tokens(self) -> int:
        """Tokens of KV cache that remain free."""
        return self._kv_budget.kv_budget_tokens - self._held_tokens - self.running.made

    @property
    def _free_windowed(self) -> float:
        """Tokens that remain free of the layers with a window."""
        return self._windowed.free - self._windowed.of_batch(self.running)

    @property
    def _room(self) -> float:
        """Tokens that remain free in all layers."""
        return min(self._free_tokens, self._free_windowed)

    def _steps_with_room(self) -> int:
        """Steps that the current batch can run before its tokens no longer fit; at least one, since the next
        step always fits or its request is alone."""
        running = self.running
        steps = max(0, self._free_tokens) // running.count
        if self._windowed and running.growing:
            steps = min(steps, int(max(0.0, self._free_windowed)) // running.growing)
        return 1 + steps

    def _promise(self, request: int) -> int:
        """Tokens that are kept free for a request until it ends."""
        if self._batching.preempts or request in self._outgoing:
            return 0
        return self._isl[request] + self._osl[request]

    def _take_room(self, prompt: Prompt) -> bool:
        """Reserve room for a prompt if it fits together with one more token of every other request, or, where
        none may be preempted, with all of their answers."""
        running = self.running.count + self._places_taken
        if prompt.request not in self._outgoing and running >= self._kv_budget.max_batch:
            return False
        windowed = self._windowed
        if prompt.tokens + running > self._free_tokens:
            return False
        if windowed.kept(prompt.tokens) + running > self._free_windowed:
            return False
        promise = self._promise(prompt.request)
        if self._promised_tokens + promise > self._kv_budget.kv_budget_tokens:
            return False
        if self._promised_windowed + windowed.kept(promise) > windowed.tokens:
            return False
        self._promised_tokens += promise
        self._promised_windowed += windowed.kept(promise)
        self._hold(prompt.request, prompt.tokens)
        self._computing[prompt.request] = prompt
        self._record.waited_s += max(0.0, self.running.time_s - prompt.since_s)
        return True

    def _make_room(self, now: float) -> None:
        """Preempt the youngest requests until the next tokens fit."""
        while self.running.count and self._room < 0 and len(self._held) > 1:
            self._preempt(max(chain(self.running, self._computing)), now)  # never one that goes on elsewhere

    def _preempt(self, request: int, now: float) -> None:
        self._record.preemptions += 1
        self._free(request)
        prompt = self._computing.pop(request, None)
        if prompt is not None:
            prompt.done, prompt.begun = 0, False
            return  # It is still at the head of the queue.
        made = self.running.leave(request)
        self._made[request] += made
        self._kv_budget.grow(request, made)
        self._records.last_s[request] = self._gaps.leave(request, now)
        self._prompts.put_first(Prompt(request, self._isl[request] + self._made[request], now))
