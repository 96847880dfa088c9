"""The simulator's replicas compared with the runtime's own scheduler, step by step, with the same step times.

Blocks have one token here, because the simulator counts tokens, and all tokens take the same time.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from pytest import approx
from stepping import Clock, Times, engine_of

from cost_model.base import Work
from hexgen2.simulator.batching import Batching
from hexgen2.simulator.prefill_replica import PrefillReplica
from hexgen2.simulator.records import Records, ReplicaRecord
from runtime.kv_cache.blocks import BlockPool
from runtime.protocol.between_workers import Step
from runtime.protocol.message import Sampling
from runtime.protocol.to_workers import Decode, Prefill
from runtime.routing.kv_budget import KvBudget
from runtime.worker.scheduled_request import Reservation
from runtime.worker.scheduler import Scheduler

PREFILL, MIXED = 24, 8
BATCHING = Batching(step_tokens=PREFILL, chunk_tokens=MIXED)
UNIT_S = 2**-10
"""All times are multiples of a power of two, so that sums are exact and both sides agree whether a request
arrives just when a step ends."""
TIMES = Times(unit_s=UNIT_S)


class Reference:
    """The runtime's scheduler in a pipeline, given each event at its time.

    Attributes
    ----------
    token_s : when each request's tokens arrived
    steps : when each step began, and its tokens per request
    odd : whether the last token of a prompt was left over: the runtime decodes it, the simulator prefills it
    """

    def __init__(self, times: Times, kv_tokens: int, places: int, sent_s: float = 0.0) -> None:
        self.pool = BlockPool(kv_tokens, 1, reuse=False)
        self.scheduler = Scheduler(
            max_batch=places,
            max_prefill_tokens=PREFILL,
            max_mixed_tokens=MIXED,
            in_flight=times.in_flight,
            pool=self.pool,
        )
        self.clock, self.token_s, self.steps, self.odd = Clock(), dict[int, list[float]](), [], False
        self._times, self._sent_s, self._free_s = times, sent_s, [0.0] * times.stages
        self._begun: set[str] = set()

    def prefill(self, at_s: float, k: int, isl: int, osl: int, target: str = "") -> None:
        sampling = Sampling(max_tokens=osl, ignore_eos=True)
        message = Prefill(
            request_id=str(k), prompt=(5,) * isl, sampling=sampling, target=target, target_tokens=isl
        )
        self._at(at_s, lambda: self.scheduler.prefill(message))

    def expect(self, k: int, isl: int) -> None:
        begun = self.pool.begin(isl, ())
        assert begun is not None
        self.scheduler.expect(Reservation(str(k), (5,) * isl, begun[0], 0, []))

    def land(self, at_s: float, k: int, osl: int) -> None:
        sampling = Sampling(max_tokens=osl, ignore_eos=True)
        message = Decode(request_id=str(k), last_token=7, index=1, sampling=sampling)
        self.token_s[k] = [at_s]
        self._at(at_s, lambda: self.scheduler.decode(message))
        self._at(at_s, lambda: self.scheduler.landed(str(k)))

    def run(self) -> None:
        self.clock.run()
        assert not len(self.scheduler) and self.pool.free == self.pool.blocks

    def _at(self, at_s: float, call) -> None:
        self.clock.schedule(at_s, self._told(call))

    def _told(self, call):
        return lambda now: (call(), self._go_on(now))

    def _go_on(self, now: float) -> None:
        free_s = self._free_s
        while free_s[0] <= now and (step := self.scheduler.next_step()):
            tokens = [len(s.tokens) for s in step.sequences]
            self.steps.append((now, tokens))
            self.odd |= any(s.request_id in self._begun and len(s.tokens) == 1 for s in step.sequences)
            self._begun -= {s.request_id for s in step.sequences}
            self._begun |= {s.request_id for s in step.sequences if not s.samples}
            stage_s, hop_s = self._times.step(Work(sum(tokens), 0.0, 0.0, 0.0, 0.0))
            at = now
            for j, seconds in enumerate(stage_s):
                at = free_s[j] = max(at, free_s[j]) + seconds
                at += hop_s[j] if j < len(hop_s) else 0.0
            self.clock.schedule(at, self._complete, step)
            self.clock.schedule(free_s[0], self._go_on)

    def _complete(self, now: float, step: Step) -> None:
        sampled = [s.request_id for s in step.sequences if s.samples]
        for output in self.scheduler.complete(step.step, [7] * len(sampled)).outputs:
            self.token_s.setdefault(int(output.request_id), []).append(now)
            if self._sent_s:
                sent = partial(self.scheduler.sent, output.request_id)
                self.clock.schedule_first(now + self._sent_s, self._told(sent))
        self._go_on(now)


def check(records: Records, record: ReplicaRecord, reference: Reference) -> None:
    """Check that ends, preemptions and times between tokens agree, and that nothing is held any more."""
    assume(not reference.odd)
    token_s = [reference.token_s[k] for k in range(len(records.requests))]
    assert records.end_s.tolist() == approx([times[-1] for times in token_s])
    assert record.preemptions == reference.scheduler.preemptions
    assert sum(records.gaps) == records.requests.osl.sum() - len(records.requests)
    spans = (records.end_s - records.first_s).sum()
    assert np.dot(records.gap_s, records.gaps) == approx(spans)


GAP_S = st.integers(1, 400).map(lambda quarters: quarters * UNIT_S / 4)
LENGTHS = st.tuples(GAP_S, st.integers(1, 60), st.integers(2, 40))
ROWS = st.lists(LENGTHS, min_size=1, max_size=10).map(
    lambda rows: [(sum(gap for gap, *_ in rows[: k + 1]), isl, osl) for k, (_, isl, osl) in enumerate(rows)]
)
LANDS_AFTER_WHAT_IS_PREEMPTED = [
    (units * UNIT_S, 1, osl) for units, osl in ((0.25, 11), (0.5, 7), (59.5, 2), (59.75, 2))
]
ONE_TOKEN_IS_LEFT_OF_A_PROMPT = [(UNIT_S / 4, 25, 3), (UNIT_S / 2, 4, 9), (UNIT_S, 17, 2)]
SENT_AS_A_STEP_ENDS = [((k + 1) * UNIT_S / 4, isl, 2) for k, isl in enumerate((49, 1, 1, 22, 24, 25, 27))]
MANY = settings(max_examples=70, deadline=None)


@MANY
@given(ROWS, st.integers(1, 6), st.integers(100, 250))
def test_a_colocated_replica_makes_every_step_that_the_runtime_makes(rows, places, kv_tokens):
    engine, clock, records, record = engine_of(rows, kv_tokens, places, BATCHING, TIMES)
    reference = Reference(TIMES, kv_tokens, places)
    for k, (at, isl, osl) in enumerate(rows):
        clock.schedule(at, lambda now, k: engine.submit(k, now), k)
        reference.prefill(at, k, isl, osl)
    clock.run()
    reference.run()
    check(records, record, reference)
    assert records.first_s.tolist() == approx([reference.token_s[k][0] for k in range(len(rows))])


@MANY
@given(ROWS, st.integers(1, 6), st.integers(0, 30))
@example([(62.5 * UNIT_S, 1, 5), (63.5 * UNIT_S, 1, 6), (133.5 * UNIT_S, 1, 2)], 2, 0)  # lands as a step ends
@example(LANDS_AFTER_WHAT_IS_PREEMPTED, 3, 2)
def test_a_decode_replica_makes_every_step_that_the_runtime_makes(rows, places, spare):
    """All requests are expected from the start; their KV caches arrive one after the other."""
    kv_tokens = sum(isl for _, isl, _ in rows) + max(osl for *_, osl in rows) + spare
    engine, clock, records, record = engine_of(rows, kv_tokens, places, BATCHING, TIMES)
    reference = Reference(TIMES, kv_tokens, places)
    for k, (at, isl, osl) in enumerate(rows):
        engine.expect(k, isl, 0.0)
        records.first(k, at)
        clock.schedule(at, lambda now, k: engine.land(k, now), k)
        reference.expect(k, isl)
        reference.land(at, k, osl)
    clock.run()
    reference.run()
    check(records, record, reference)


@MANY
@given(ROWS, st.integers(1, 3), st.integers(0, 3), st.integers(60, 150), GAP_S)
@example(SENT_AS_A_STEP_ENDS, 3, 0, 97, UNIT_S / 4)
def test_a_prefill_replica_makes_every_step_that_the_runtime_makes(rows, stages, more, kv_tokens, sent_s):
    """Also in a pipeline, with as many steps in flight as stages or more; the KV cache of a prompt takes
    `sent_s` to send after its prefill. The end of a transfer precedes other events of the same time, which
    the two sides would otherwise order differently."""
    clock, times, found, steps = Clock(), Times(stages, UNIT_S), {}, []
    times.in_flight += more

    def computed(request, now):
        found[request] = now
        clock.schedule_first(now + sent_s, lambda now: prefiller.release(request, rows[request][1], now))

    def begun(prompts, begun_s, _):
        steps.append((approx(begun_s), [tokens for _, tokens in prompts]))

    prefiller = PrefillReplica(
        PREFILL, times, KvBudget(kv_tokens, 99), ReplicaRecord(), clock.schedule, begun, computed
    )
    reference = Reference(times, kv_tokens, 99, sent_s)
    for k, (at, isl, osl) in enumerate(rows):
        clock.schedule(at, lambda now, k, isl: prefiller.submit(k, isl, now), k, isl)
        reference.prefill(at, k, isl, osl, "decode")
    clock.run()
    reference.run()
    assert reference.steps == steps
    assert found == {k: approx(token_s[0]) for k, token_s in reference.token_s.items()}


@MANY
@given(ROWS, st.integers(2, 4), st.integers(1, 6), st.integers(100, 250))
@example(ONE_TOKEN_IS_LEFT_OF_A_PROMPT, 2, 3, 100)
def test_a_colocated_pipeline_makes_every_step_that_the_runtime_makes(rows, stages, places, kv_tokens):
    """Chunks of a prompt follow each other while others decode; each step has its share of the decodes."""
    times = Times(stages, UNIT_S)
    engine, clock, records, record = engine_of(rows, kv_tokens, places, BATCHING, times)
    reference = Reference(times, kv_tokens, places)
    for k, (at, isl, osl) in enumerate(rows):
        clock.schedule(at, lambda now, k: engine.submit(k, now), k)
        reference.prefill(at, k, isl, osl)
    clock.run()
    reference.run()
    token_s = [reference.token_s[k] for k in range(len(rows))]
    assert records.first_s.tolist() == approx([times[0] for times in token_s])
    assert records.end_s.tolist() == approx([times[-1] for times in token_s])
    assert record.preemptions == reference.scheduler.preemptions
    gaps = np.repeat(records.gap_s, records.gaps)
    assert np.sort(gaps) == approx(np.sort(np.concatenate([np.diff(times) for times in token_s])))
    assert record.requests == len(rows) and record.peak_running <= places
