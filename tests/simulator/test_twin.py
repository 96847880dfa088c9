"""Replicas of the simulator against the runtime's own scheduler, step by step, over the same step times.

Blocks have one token here, since the simulator counts tokens, and all tokens take the same time.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pytest import approx
from stepping import STEP_S, TOKEN_S, Clock, Times, engine_of

import hexgen2.simulator.policies as policies
import hexgen2.simulator.prefilling as prefilling
from hexgen2.simulator.prefilling import Prefiller
from hexgen2.simulator.records import Records, ReplicaRecord
from runtime.engine.blocks import BlockPool
from runtime.engine.scheduler import Reservation, Scheduler
from runtime.messages import Decode, Prefill, Sampling

PREFILL, MIXED = 24, 8


class Reference:
    """The runtime's scheduler of a replica of one stage, driven by messages at their times."""

    def __init__(self, kv_tokens: int, places: int) -> None:
        self.pool = BlockPool(kv_tokens, 1, reuse=False)
        self.scheduler = Scheduler(
            max_batch=places, max_prefill_tokens=PREFILL, max_mixed_tokens=MIXED, stages=1, pool=self.pool
        )
        self.token_s: dict[str, list[float]] = {}
        self.odd = False

    def expect(self, name: str, isl: int) -> None:
        begun = self.pool.begin(isl, ())
        assert begun is not None
        self.scheduler.expect(Reservation(name, (5,) * isl, begun[0], 0, []))

    def land(self, name: str, osl: int) -> None:
        assert not self.scheduler.decode(Decode(request_id=name, last_token=7, index=1, sampling=rule(osl)))
        self.scheduler.landed(name)

    def run(self, messages) -> None:
        """messages: (time_s, call) in order of time. A step takes in what came while it ran as it ends."""
        due, now = list(messages)[::-1], 0.0
        begun: set[str] = set()
        while True:
            while due and due[-1][0] <= now:
                due.pop()[1]()
            step = self.scheduler.next_step()
            if step is None:
                if not due:
                    return
                now = due[-1][0]
                continue
            # The last token of a prompt, left over, is a decode to the runtime and a chunk to the simulator.
            self.odd |= any(s.request_id in begun and len(s.tokens) == 1 for s in step.sequences)
            begun = {s.request_id for s in step.sequences if not s.samples}
            now += STEP_S + TOKEN_S * sum(len(s.tokens) for s in step.sequences)
            done = self.scheduler.complete(step.step, [7] * sum(s.samples for s in step.sequences))
            for output in done.outputs:
                self.token_s.setdefault(output.request_id, []).append(now)


def rule(tokens: int) -> Sampling:
    return Sampling(max_tokens=tokens, ignore_eos=True)


def check(records: Records, record: ReplicaRecord, reference: Reference) -> None:
    """The same ends, preemptions and times between tokens; nothing is held any more."""
    assume(not reference.odd)
    token_s = [reference.token_s[str(k)] for k in range(len(records.requests))]
    assert records.end_s.tolist() == approx([times[-1] for times in token_s])
    assert record.preemptions == reference.scheduler.preemptions
    assert sum(records.gaps) == records.requests.osl.sum() - len(records.requests)
    spans = (records.end_s - records.first_s).sum()
    assert np.dot(records.gap_s, records.gaps) == approx(spans)
    assert not len(reference.scheduler) and reference.pool.free == reference.pool.blocks


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch):
    monkeypatch.setattr(policies, "PREFILL_TOKENS", PREFILL)
    monkeypatch.setattr(policies, "CHUNK_TOKENS", MIXED)
    monkeypatch.setattr(prefilling, "PREFILL_TOKENS", PREFILL)


GAP_S = st.floats(0.0, 0.1)
LENGTHS = st.tuples(GAP_S, st.integers(1, 60), st.integers(2, 40))
ROWS = st.lists(LENGTHS, min_size=1, max_size=10).map(
    lambda rows: [(sum(gap for gap, *_ in rows[: k + 1]), isl, osl) for k, (_, isl, osl) in enumerate(rows)]
)
MANY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@MANY
@given(ROWS, st.integers(1, 6), st.integers(100, 250))
def test_a_colocated_replica_makes_every_step_that_the_runtime_makes(rows, places, kv_tokens):
    engine, clock, records, record = engine_of(rows, kv_tokens, places)
    reference = Reference(kv_tokens, places)
    messages = []
    for k, (at, isl, osl) in enumerate(rows):
        clock.schedule(at, lambda now, k: engine.submit(k, now), k)
        prefill = Prefill(request_id=str(k), prompt=(5,) * isl, sampling=rule(osl), target="")
        messages.append((at, partial(reference.scheduler.prefill, prefill)))
    clock.run()
    reference.run(messages)
    check(records, record, reference)
    assert records.first_s.tolist() == approx([reference.token_s[str(k)][0] for k in range(len(rows))])


@MANY
@given(ROWS, st.integers(1, 6), st.integers(0, 30))
def test_a_decode_replica_makes_every_step_that_the_runtime_makes(rows, places, spare):
    """All are expected from the start; their KV caches land one after the other."""
    kv_tokens = sum(isl for _, isl, _ in rows) + max(osl for *_, osl in rows) + spare
    engine, clock, records, record = engine_of(rows, kv_tokens, places)
    reference = Reference(kv_tokens, places)
    messages = []
    for k, (at, isl, osl) in enumerate(rows):
        engine.expect(k, isl, 0.0)
        records.first(k, at)
        clock.schedule(at, lambda now, k: engine.land(k, now), k)
        reference.expect(str(k), isl)
        reference.token_s[str(k)] = [at]
        messages.append((at, partial(reference.land, str(k), osl)))
    clock.run()
    reference.run(messages)
    check(records, record, reference)


@MANY
@given(ROWS, st.integers(1, 3), st.integers(60, 150), st.floats(0, 0.1))
def test_a_prefill_replica_makes_every_step_that_the_runtime_makes(rows, stages, kv_tokens, sent_s):
    """The KV cache of a prompt is sent so long after it was computed."""
    clock, times, found = Clock(), Times(stages), {}

    def computed(request, now):
        found[request] = now
        clock.schedule(now + sent_s, lambda now: prefiller.release(rows[request][1], now))

    steps = []
    begun = lambda chunks, begun_s, ends_s: steps.append((begun_s, [chunk.tokens for chunk in chunks]))  # noqa: E731
    prefiller = Prefiller(times, kv_tokens, ReplicaRecord(), clock.schedule, begun, computed)
    for k, (at, isl, _) in enumerate(rows):
        clock.schedule(at, lambda now, k, isl: prefiller.submit(k, isl, now), k, isl)
    clock.run()
    expected, made = prefilled(rows, times, kv_tokens, sent_s)
    assert steps == [(approx(begun_s), tokens) for begun_s, tokens in made]
    assert found == {k: approx(end_s) for k, end_s in expected.items()}


def prefilled(rows, times: Times, kv_tokens: int, sent_s: float):
    """When the runtime's scheduler has computed each prompt in a pipeline, and its steps."""
    pool = BlockPool(kv_tokens, 1, reuse=False)
    scheduler = Scheduler(
        max_batch=99, max_prefill_tokens=PREFILL, max_mixed_tokens=MIXED, stages=times.stages, pool=pool
    )
    clock, free_s = Clock(), [0.0] * times.stages
    computed, steps = {}, []

    def go_on(now):
        while free_s[0] <= now and (step := scheduler.next_step()):
            tokens = [len(s.tokens) for s in step.sequences]
            steps.append((now, tokens))
            stage_s, hop_s = times.step(SimpleNamespace(prompt_tokens=sum(tokens), decodes=0))
            at = now
            for j, seconds in enumerate(stage_s):
                at = free_s[j] = max(at, free_s[j]) + seconds
                at += hop_s[j] if j < len(hop_s) else 0.0
            clock.schedule(at, complete, step)
            clock.schedule(free_s[0], go_on)

    def complete(now, step):
        done = [s.request_id for s in step.sequences if s.samples]
        scheduler.complete(step.step, [7] * len(done))
        for name in done:
            computed[int(name)] = now
            clock.schedule(now + sent_s, sent, name)
        go_on(now)

    def sent(now, name):
        assert scheduler.sent(name)
        go_on(now)

    def arrive(now, k, isl):
        message = Prefill(
            request_id=str(k), prompt=(5,) * isl, sampling=rule(9), target="d", target_tokens=isl
        )
        scheduler.prefill(message)
        go_on(now)

    for k, (at, isl, _) in enumerate(rows):
        clock.schedule(at, arrive, k, isl)
    clock.run()
    assert not len(scheduler) and pool.free == kv_tokens
    return computed, steps
