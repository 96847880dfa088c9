"""A decode replica, checked by hand: steps take 10 ms plus 1 ms per token."""

import numpy as np
import pytest
from pytest import approx
from stepping import engine_of

from hexgen2.simulator.batching import POLICIES, Batching


def gaps_of(records) -> dict[float, int]:
    found: dict[float, int] = {}
    for seconds, count in zip(records.gap_s, records.gaps, strict=True):
        found[round(seconds, 9)] = found.get(round(seconds, 9), 0) + count
    return found


def test_the_youngest_gives_way_and_is_recomputed_with_what_it_has():
    engine, clock, records, record = engine_of([(0.0, 10, 6), (0.0, 10, 6)], kv_tokens=25, places=4)
    for k in range(2):
        engine.expect(k, 10, 0.0)
        records.first(k, 0.0)
        clock.schedule(0.0, lambda now, k: engine.land(k, now), k)
    clock.run()
    # Both reach 11, 12, 13 tokens, which is one too many. The first goes on alone for three steps; then one
    # step recomputes the 13 of the second, and makes its fourth token.
    ends = [2 * 0.012 + 3 * 0.011, 2 * 0.012 + 3 * 0.011 + 0.023 + 2 * 0.011]
    assert records.end_s.tolist() == approx(ends)
    assert gaps_of(records) == {0.012: 4, 0.011: 5, round(3 * 0.011 + 0.023, 9): 1}
    assert record.preemptions == 1 and record.peak_running == 2


def test_a_prompt_goes_in_chunks_among_decodes_and_in_one_step_without():
    engine, clock, records, _ = engine_of([(0.0, 700, 50), (0.8, 1100, 2)], kv_tokens=9999, places=4)
    for k, at in enumerate((0.0, 0.8)):
        clock.schedule(at, lambda now, k: engine.submit(k, now), k)
    clock.run()
    first = 0.710
    begins = first + 9 * 0.011  # the end of the current step
    chunks = begins + 2 * (0.010 + 0.513) + (0.010 + 0.077)
    assert records.first_s.tolist() == approx([first, chunks])
    assert records.end_s.tolist() == approx([chunks + 0.012 + (50 - 1 - 9 - 3 - 1) * 0.011, chunks + 0.012])


def test_a_request_that_lands_joins_after_the_step_under_way():
    engine, clock, records, record = engine_of([(0.0, 10, 11), (0.03, 10, 3)], kv_tokens=100, places=4)
    for k, at in enumerate((0.0, 0.03)):
        engine.expect(k, 10, 0.0)
        clock.schedule(at, lambda now, k: (records.first(k, now), engine.land(k, now)), k)
    clock.run()
    assert records.end_s.tolist() == approx([3 * 0.011 + 2 * 0.012 + 5 * 0.011, 3 * 0.011 + 2 * 0.012])
    assert gaps_of(records) == {0.011: 8, 0.012: 3, 0.015: 1}
    assert record.running_s == approx(10 * 0.011 + 2 * 0.001 + 2 * 0.012)


def test_reservations_cut_short_what_the_batch_may_grow_by():
    """At 0.05 another prompt of 10 tokens is expected: the 30 tokens hold it and one request until that has
    20."""
    engine, clock, records, record = engine_of([(0.0, 10, 15), (0.0, 10, 2)], kv_tokens=30, places=4)
    engine.expect(0, 10, 0.0)
    records.first(0, 0.0)
    clock.schedule(0.0, lambda now, _: engine.land(0, now), None)
    clock.schedule(0.05, lambda now, _: engine.expect(1, 10, now), None)
    clock.schedule(0.5, lambda now, _: engine.forget(1, now), None)
    clock.run()
    assert record.preemptions == 1
    # It starts with 11 tokens and 20 fit: ten steps. Its 21 are recomputed when the other is forgotten.
    assert records.end_s[0] == approx(0.5 + 0.031 + (15 - 12) * 0.011)
    assert gaps_of(records) == {0.011: 13, round(0.5 + 0.031 - 0.11, 9): 1}


@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_and_times_add_up_whatever_is_short(policy):
    rng = np.random.default_rng(0)
    for places, kv_tokens in ((2, 4000), (8, 1500), (8, 9000)):
        arrival_s = np.sort(rng.uniform(0, 20, size=60))
        rows = [(at, int(rng.integers(1, 1200)), int(rng.integers(1, 200))) for at in arrival_s]
        engine, clock, records, record = engine_of(rows, kv_tokens, places, policy)
        for k, (at, *_) in enumerate(rows):
            clock.schedule(at, lambda now, k, engine=engine: engine.submit(k, now), k)
        clock.run()
        assert sum(records.gaps) == records.requests.osl.sum() - len(rows)
        assert np.dot(records.gap_s, records.gaps) == approx((records.end_s - records.first_s).sum())
        assert record.requests == len(rows) and record.peak_running <= places
        assert kv_tokens > 1500 or bool(record.preemptions) == (policy != "inflight")


def ends_of(batching: Batching, *rows: tuple[float, int, int], kv_tokens: int = 9999):
    """Milliseconds of first and last tokens, and preemptions, of requests (arrival_ms, isl, osl)."""
    rows = [(at / 1e3, isl, osl) for at, isl, osl in rows]
    engine, clock, records, record = engine_of(rows, kv_tokens, 4, batching)
    for k, (at, *_) in enumerate(rows):
        clock.schedule(at, lambda now, k: engine.submit(k, now), k)
    clock.run()
    return [[round(at * 1e3, 6) for at in times] for times in (records.first_s, records.end_s)], record


@pytest.mark.parametrize(
    ("policy", "first_ms", "end_ms"),
    [
        # The first request computes its 10 tokens until 20 and decodes until 53, with two tokens to go.
        # Then: 1 decode and 19 of the 30; 1 decode, the other 11 and all 5; 2 decodes.
        ("chunked", [20, 110, 110], [110, 122, 122]),
        # 1 decode and 8; 1 decode and 8; no decodes, so the other 14 and all 5; 2 decodes.
        ("mixed", [20, 120, 120], [91, 132, 132]),
        # 20 of the 30; the other 10 and all 5; 3 decodes; 1 decode.
        ("chunked-prefill-first", [20, 108, 108], [132, 121, 121]),
        # All 30, although the limit is 20; 5; 3 decodes; 1 decode.
        ("prefill-first", [20, 93, 108], [132, 121, 121]),
        # 30 are too many beside a decode, and 5 may not pass them: twice 1 decode; all 30; 1 decode and 5; 1
        # decode.
        ("inflight", [20, 115, 131], [75, 131, 142]),
    ],
)
def test_each_policy_fills_steps_as_its_engine_does(policy, first_ms, end_ms):
    batching = Batching(policy, step_tokens=20, chunk_tokens=8)
    found, _ = ends_of(batching, (0, 10, 6), (50, 30, 2), (50, 5, 2))
    assert found == [first_ms, end_ms]


def test_whole_prompts_ride_with_decodes_as_long_as_they_fit():
    # From 53 on: 1 decode and 12, beside which 9 do not fit; 2 decodes and 9; 1 decode.
    batching = Batching("inflight", step_tokens=20)
    found, _ = ends_of(batching, (0, 10, 6), (50, 12, 2), (50, 9, 2))
    assert found == [[20, 76, 97], [97, 97, 108]]


def test_inflight_batching_keeps_room_for_the_whole_answer():
    rows = (0, 10, 10), (0, 10, 10)
    found, record = ends_of(Batching("inflight"), *rows, kv_tokens=30)
    assert found == [[20, 139], [119, 238]] and not record.preemptions
    _, record = ends_of(Batching("chunked"), *rows, kv_tokens=30)
    assert record.preemptions


def test_decodes_that_fill_the_step_leave_no_room_for_prompts():
    # Steps of 2 tokens: two prompts of one token each decode, and the third waits until they have ended.
    found, _ = ends_of(Batching("chunked", step_tokens=2), (0, 1, 3), (0, 1, 3), (0, 1, 1))
    assert found == [[12, 12, 47], [36, 36, 47]]


def test_an_engine_that_looks_for_prompts_now_and_then():
    # The second comes at 30. The engine looks at 20, and after three more steps at 53.
    rows = (0, 10, 8), (30, 5, 10)
    found, _ = ends_of(Batching("chunked-prefill-first", look_steps=3), *rows)
    assert found == [[20, 68], [116, 171]]
    at_once, _ = ends_of(Batching("chunked-prefill-first"), *rows)
    assert at_once[0] == [20, 46]


def test_an_engine_looks_at_once_after_prompts_and_when_nothing_decodes():
    # While the second's prompt runs, from 53 to 68, the third comes. The fourth comes when nothing decodes.
    rows = (0, 10, 8), (30, 5, 1), (60, 5, 1), (300, 5, 1)
    found, _ = ends_of(Batching("chunked-prefill-first", look_steps=3), *rows)
    assert found[0] == [20, 68, 83, 315]


def test_prompts_that_start_together():
    # The second waits for the third, which comes at 60; the step after that begins at 64.
    found, _ = ends_of(Batching("chunked", gathered=2), (0, 10, 8), (30, 5, 4), (60, 5, 4))
    assert found == [[20, 85, 85], [111, 123, 123]]


def test_prompts_wait_for_others_no_longer_than_60_steps_or_until_nothing_decodes():
    # From 31 on it waits for 60 steps of 11 ms.
    found, _ = ends_of(Batching("chunked", gathered=2), (0, 10, 100), (30, 5, 1))
    assert found == [[20, 707], [1114, 707]]
    found, _ = ends_of(Batching("chunked", gathered=2), (0, 10, 5), (30, 5, 1))
    assert found == [[20, 79], [64, 79]]


@pytest.mark.parametrize("waiting", [{"gathered": 3}, {"look_steps": 7}, {"gathered": 4, "look_steps": 5}])
def test_tokens_and_times_add_up_where_prompts_wait(waiting):
    rng = np.random.default_rng(1)
    arrival_s = np.sort(rng.uniform(0, 20, size=60))
    rows = [(at, int(rng.integers(1, 1200)), int(rng.integers(1, 200))) for at in arrival_s]
    for policy in POLICIES:
        engine, clock, records, record = engine_of(rows, 4000, 6, Batching(policy, **waiting))
        for k, (at, *_) in enumerate(rows):
            clock.schedule(at, lambda now, k, engine=engine: engine.submit(k, now), k)
        clock.run()
        assert sum(records.gaps) == records.requests.osl.sum() - len(rows)
        assert np.dot(records.gap_s, records.gaps) == approx((records.end_s - records.first_s).sum())
        assert record.requests == len(rows) and record.peak_running <= 6
