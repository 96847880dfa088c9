"""Requests that decode together are as quick as each by itself, token for token."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.lengths import Window
from hexgen2.cluster import Cluster
from hexgen2.simulator.cohort import Cohort, Request, joined
from hexgen2.simulator.options import Failure, Options
from hexgen2.simulator.pipelined_replica import PipelinedReplica
from hexgen2.simulator.records import Records
from hexgen2.simulator.simulation import Simulation
from hexgen2.workload.arrivals import LengthSource, online
from tests.hexgen2.simulator.stepping import Times, engine_of
from tests.hexgen2.simulator.test_mixed import CASES, placement_of

ROWS = st.lists(
    st.tuples(st.integers(0, 60).map(lambda k: k * 0.05), st.integers(1, 80), st.integers(1, 40)),
    min_size=1,
    max_size=40,
).map(sorted)


class WindowTimes(Times):
    def __init__(self, stages: int, window: Window | None) -> None:
        super().__init__(stages)
        self.costs.model.window = window

    def step(self, work):
        stage_s, hop_s = super().step(work)
        return [seconds + 1e-5 * (work.context + work.prompt_attended) for seconds in stage_s], hop_s


def outcome(rows, kv_tokens: int, places: int, stages: int, window: Window | None, together: bool):
    """What happened to each request, the times between tokens with their counts, and the replica's record."""
    with patch.object(PipelinedReplica, "together", together):
        engine, clock, records, record = engine_of(rows, kv_tokens, places, times=WindowTimes(stages, window))
        for index, (arrival_s, _, _) in enumerate(rows):
            clock.schedule(arrival_s, lambda now, k: engine.submit(k, now), index)
        clock.run()
    gaps = Counter()
    for seconds, count in zip(records.gap_s, records.gaps, strict=True):
        gaps[round(seconds, 9)] += count
    record.running_s = round(record.running_s, 6)
    assert not engine._ready and not engine._running and not engine._flights
    assert engine._free_tokens == kv_tokens and engine.uncounted == 0
    return records.first_s.tolist(), records.end_s.tolist(), gaps, record


@settings(max_examples=60, deadline=None)
@given(
    ROWS, st.integers(120, 900), st.integers(1, 30), st.integers(2, 5), st.sampled_from([None, Window(20)])
)
def test_a_replica_does_the_same_with_cohorts_as_without(rows, kv_tokens, places, stages, window):
    found, expected = (outcome(rows, kv_tokens, places, stages, window, each) for each in (True, False))
    assert found == expected


def test_requests_are_preempted_out_of_cohorts():
    rows = [(0.0, 30, 40)] * 12
    found, expected = (outcome(rows, 400, 12, 3, None, each) for each in (True, False))
    assert found == expected and found[-1].preemptions > 0


@pytest.mark.parametrize("case", CASES)
def test_a_fleet_that_loses_a_replica_does_the_same_with_cohorts_as_without(case):
    placement = placement_of(*case)
    pipelined = [r.id for r in placement.replicas if r.role in ("colocated", "mixed") and len(r.stages) > 1]
    rate = 1.1 * placement.throughput.req_s
    options = Options(failures=[Failure(300 / rate, name) for name in pipelined[:1]])
    found = []
    for together in (True, False):
        records = Records(online(LengthSource(placement.workload), rate, 800, (9,)))
        with patch.object(PipelinedReplica, "together", together):
            Simulation(placement, Cluster.from_spec(placement.cluster), records, options).run()
        found.append((records.end_s.tolist(), records.first_s.tolist(), records.decode, records.failed))
    assert found[0] == found[1]


def cohort(tokens: list[int], totals: list[int], made: int = 0) -> Cohort:
    requests = [Request(k, k, n, 1, 0.0, n - 1, n - 1) for k, n in enumerate(tokens)]
    ends = [total - n + made for n, total in zip(tokens, totals, strict=True)]
    return Cohort(requests, list(totals), ends, 0.0, made)


@given(
    st.lists(st.tuples(st.integers(2, 50), st.integers(1, 9)), min_size=2, max_size=12),
    st.integers(1, 11),
    st.integers(0, 5),
)
def test_a_cohort_keeps_count_when_it_is_split_and_joined(rows, count, other_made):
    tokens, totals = [n for n, _ in rows], [n + more for n, more in rows]
    whole = cohort(tokens, totals)
    first = whole.split(min(count, len(rows) - 1))
    assert [*first.tokens, *whole.tokens] == tokens and first.context == sum(first.tokens)
    again = joined([first, whole, cohort(tokens, totals, other_made)])
    assert list(again.tokens) == tokens * 2 and again.context == 2 * sum(tokens)
    left = Counter(more for _, more in rows)
    for step in range(1, 10):
        again.step(float(step))
        assert len(again.take_ended()) == 2 * left[step]
        assert again.context == sum(again.tokens) and again.first_end == min(again.ends, default=0)
    assert not len(again)
