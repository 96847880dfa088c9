"""Decode batches, compared with the same batches advanced step by step."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx

from cost_model.lengths import Window, context_tokens
from hexgen2.simulator.decode_batch import DecodeBatch

LINES = st.lists(
    st.tuples(st.floats(1e-3, 1e-1), st.sampled_from([0.0, 1e-6, 1e-5, 1e-4])), min_size=1, max_size=4
)
REQUESTS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 50), st.integers(1, 40)), min_size=1, max_size=8
)


def step_by_step(requests, lines, window):
    """{request: (begun, ended)}, where request k may join before step `at`, computed from first
    principles."""
    time_s, step, times = 0.0, 0, {}
    waiting = dict(enumerate(requests))
    own: dict[int, list[int]] = {}
    while waiting or own:
        for k, (at, context, steps) in list(waiting.items()):
            if at <= step:
                own[k] = [context, steps]
                times[k] = [time_s, None]
                del waiting[k]
        if own:
            attended = sum(context_tokens(context, window) for context, _ in own.values())
            scale = len(own)
            time_s += max(scale * a + b * attended for a, b in lines)
            for k in list(own):
                own[k][0] += 1
                own[k][1] -= 1
                if own[k][1] == 0:
                    times[k][1] = time_s
                    del own[k]
        step += 1
    return times


@settings(max_examples=200, deadline=None)
@given(
    REQUESTS, LINES, st.sampled_from([None, *(Window(t, s) for t in (10, 45, 80) for s in (1.0, 0.5, 0.8))])
)
def test_many_steps_at_once_are_as_many_single_ones(requests, lines, window):
    expected = step_by_step(requests, lines, window)
    running = DecodeBatch(lambda count: tuple((count * a, b) for a, b in lines), window)
    waiting = dict(enumerate(requests))
    times: dict[int, list[float]] = {}
    while waiting or running:
        for k, (at, context, steps) in list(waiting.items()):
            if at <= running.steps:
                running.join(k, context, steps)
                times[k] = [running.time_s, math.nan]
                del waiting[k]
        running.settle()
        due = min((at - running.steps for at, _, _ in waiting.values()), default=math.inf)
        if not running:
            running.steps += due
            continue
        for k in running.advance(int(min(due, running.regime_steps))):
            times[k][1] = running.time_s
    assert times.keys() == expected.keys()
    for k, (begun, ended) in expected.items():
        assert times[k] == [approx(begun), approx(ended)]


@given(st.floats(1e-4, 1.0), st.floats(0, 1e-3), st.integers(1, 300), st.floats(0, 1.2))
def test_steps_until_a_time(first, more, steps, share):
    running = DecodeBatch(lambda count: ((first, more),))
    running.join(0, 0, steps)
    running.settle()
    wait = running.span_s(running.regime_steps) * share
    needed = running.steps_until(wait)
    assert needed == running.regime_steps or running.span_s(needed) >= wait * (1 - 1e-9)
    assert needed == 0 or running.span_s(needed - 1) <= wait * (1 + 1e-9) + 1e-5 * first


def test_who_leaves_early_is_gone_and_the_others_go_on():
    running = DecodeBatch(lambda count: ((count * 1.0, 0.0),), window=Window(5))
    for k in range(3):
        running.join(k, 4, 10)
    running.settle()
    running.advance(1)
    assert running.leave(1) == 1
    running.settle()
    ended = []
    while running:
        ended += running.advance(running.regime_steps)
        running.settle()
    assert sorted(ended) == [0, 2]
    assert running.time_s == approx(3 + 9 * 2)
    assert running.context == 0
