"""Queues compared with closed forms, scipy's distributions, and a simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from shapes import LLAMA_70B

from cost_model.lengths import RequestLengths
from cost_model.queueing import DecodeQueue, PrefillQueue, ServiceMix

ALIKE = ServiceMix((1.0,), (1.0,))
UNLIKE = ServiceMix((0.7, 0.3), (0.4, 2.4))
loads = st.floats(0.01, 0.99)
shares = st.floats(0.5, 0.999)


def waits(rng: np.random.Generator, rate: float, service_s: np.ndarray) -> np.ndarray:
    """Waiting times in one queue with these service times, by Lindley's recursion: W' = max(0, W + S - A)."""
    steps = service_s[:-1] - rng.exponential(1 / rate, len(service_s) - 1)
    walk = np.concatenate([[0.0], np.cumsum(steps)])
    return walk - np.minimum.accumulate(walk)


@given(loads, st.floats(0.01, 100))
def test_deterministic_service_waits_half_of_what_exponential_service_does(load, capacity):
    """M/D/1 waits load / (2 (1 - load)) services. M/M/1 waits twice that, because its E[S^2] is 2 E[S]^2."""
    expected = load / (2 * (1 - load)) / capacity
    assert PrefillQueue(capacity, 0.1, 1, ALIKE).mean_wait_s(load * capacity) == pytest.approx(expected)
    twice = ServiceMix((0.5, 0.5), (0.0, 2.0))
    assert twice.second_moment == 2
    assert PrefillQueue(capacity, 0.1, 1, twice).mean_wait_s(load * capacity) == pytest.approx(2 * expected)


@given(loads, st.floats(0, 20))
def test_the_tail_is_exact_for_exponential_service(load, services):
    """M/M/1: P(W > t) = load exp(-(1 - load) t / E[S])."""
    queue = PrefillQueue(2.0, 0.1, 1, ServiceMix((0.5, 0.5), (0.0, 2.0)))
    tail = load * np.exp(-(1 - load) * services)
    assert queue.wait_tail(2 * load, services / 2) == pytest.approx(tail)


@pytest.mark.parametrize("mix", [ALIKE, UNLIKE], ids=["alike", "unlike"])
@pytest.mark.parametrize("load", [0.5, 0.8])
def test_waits_are_those_of_a_simulated_queue(mix, load):
    rng = np.random.default_rng(7)
    capacity = 4.0
    service_s = rng.choice(mix.relative, size=400_000, p=mix.shares) / capacity
    simulated = waits(rng, load * capacity, service_s)
    queue = PrefillQueue(capacity, 0.0, 1, mix)
    assert queue.mean_wait_s(load * capacity) == pytest.approx(simulated.mean(), rel=0.05)
    for quantile in (0.8, 0.9, 0.95):
        late = queue.wait_tail(load * capacity, float(np.quantile(simulated, quantile)))
        assert late == pytest.approx(1 - quantile, abs=0.035)


@given(st.floats(0.1, 50), st.floats(0.01, 3), st.integers(1, 8), st.floats(0.01, 20), shares)
def test_the_largest_rate_is_where_the_share_is_just_met(capacity, latency, batch, ttft_s, share):
    queue = PrefillQueue(capacity, latency, batch, UNLIKE)
    rate = queue.largest_rate(ttft_s, share)
    assert 0 <= rate <= capacity
    if rate == 0:
        assert queue.attained(0.0, ttft_s) <= share or queue.soonest_s(share) > ttft_s
    elif rate > 1e-6 * capacity:
        assert queue.attained(rate * 0.999, ttft_s) >= share > queue.attained(rate * 1.001, ttft_s) - 1e-9


@given(loads, st.floats(0.05, 5), st.floats(0.05, 5))
def test_more_load_or_less_time_serves_no_more_in_time(load, one, two):
    queue = PrefillQueue(3.0, 0.2, 2, UNLIKE)
    less, more = sorted((one, two))
    assert queue.attained(3 * load, less) <= queue.attained(3 * load, more)
    assert queue.attained(3 * load, less) <= queue.attained(1.5 * load, less)
    assert queue.largest_rate(less, 0.9) <= queue.largest_rate(more, 0.9) * (1 + 1e-9)


def test_a_mixture_whose_long_prompts_miss_cannot_reach_their_share():
    """Three in ten prompts take 2.4 times the mean of 1 s."""
    queue = PrefillQueue(1.0, 1.0, 1, UNLIKE)
    assert queue.attained(0.0, 2.0) == pytest.approx(0.7)
    assert queue.largest_rate(2.0, 0.8) == 0 and queue.largest_rate(2.5, 0.8) > 0
    assert queue.soonest_s(0.7) == pytest.approx(0.4) and queue.soonest_s(0.71) == pytest.approx(2.4)
    # In a batch of 4, a long prompt shares the batch with three mean ones.
    assert PrefillQueue(4.0, 1.0, 4, UNLIKE).services[1] == (0.3, pytest.approx((2.4 + 3) / 4))


def test_classes_take_time_by_their_flops():
    """Without attention, time is proportional to tokens; with it, long prompts take a little more."""
    mix = ServiceMix.of(LLAMA_70B, RequestLengths.of([(100, 10, 3), (300, 10, 1)]))
    assert mix.shares == (0.75, 0.25)
    assert sum(w * r for w, r in zip(mix.shares, mix.relative, strict=True)) == pytest.approx(1)
    assert 3 < mix.relative[1] / mix.relative[0] < 3.1


def decode(places: int) -> DecodeQueue:
    """A step takes 20 ms plus 0.1 ms per request."""
    return DecodeQueue(places, lambda requests: 0.02 + 1e-4 * requests, osl=100)


@given(st.integers(1, 300), shares)
def test_decode_takes_what_leaves_a_place_free(places, share):
    """The number of others is Poisson, and at most places - 1 for `share` of the arrivals (scipy.stats)."""
    queue = decode(places)
    rate = queue.largest_rate(share)
    others = queue.under_way(rate)
    assert others == pytest.approx(rate * 100 * queue.mean_tpot_s(others), rel=1e-6)
    assert stats.poisson.cdf(places - 1, others) == pytest.approx(share, rel=1e-6)
    assert queue.attained(rate * (1 - 1e-6)) >= share - 1e-4
    assert 0 < rate <= queue.capacity_req_s


@given(st.integers(1, 300), shares, st.floats(0, 0.1), st.integers(1, 64))
def test_where_more_requests_are_served_more_slowly_the_share_still_finds_a_place(places, share, rise, tile):
    """A step takes `rise` longer for each whole tile of requests."""
    queue = DecodeQueue(places, lambda n: 0.02 * (1 + rise * math.ceil(n / tile)) + 1e-4 * n, 100, tiled=True)
    rate = queue.largest_rate(share)
    assert 0 < rate <= queue.capacity_req_s
    assert queue.attained(rate * (1 - 1e-6)) >= share - 1e-4


@given(st.integers(1, 300), st.floats(0.001, 0.06))
def test_places_within_a_target_are_the_most(places, tpot_s):
    queue = decode(places)
    within = queue.places_within(tpot_s)
    assert within == 0 or queue.tpot_s(within) <= tpot_s
    assert within == places or queue.tpot_s(within + 1) > tpot_s
    assert queue.places_within(None) == places
    # Where the rate is out of reach, it may say so sooner; else it finds the same.
    assert queue.places_within(tpot_s, above=0.0) == within
    reached = within / (queue.osl * queue.tpot_s(within)) if within else 0.0
    assert queue.places_within(tpot_s, above=reached * 0.99) == within


@given(st.floats(0.01, 0.99), st.floats(0.02, 0.06), st.floats(0.02, 0.06))
def test_decode_serves_no_more_in_time_under_more_load(load, one, two):
    queue = decode(200)
    less, more = sorted((one, two))
    rate = load * queue.capacity_req_s
    assert queue.attained(rate, less) <= queue.attained(rate, more) + 1e-12
    assert queue.attained(rate) <= queue.attained(rate / 2) + 1e-12
    assert queue.attained(queue.capacity_req_s) == 0


def test_requests_under_way_are_those_of_a_simulated_replica():
    """Poisson arrivals that never wait; each is in flight for 100 tokens at the mean time per token."""
    rng = np.random.default_rng(3)
    queue, rate = decode(100), 15.0
    others = queue.under_way(rate)
    stay = 100 * queue.mean_tpot_s(others) * rng.uniform(0.1, 1.9, 200_000)
    arrivals = np.cumsum(rng.exponential(1 / rate, len(stay)))
    ends = np.sort(arrivals + stay)
    seen = np.arange(len(arrivals)) - np.searchsorted(ends, arrivals)
    settled = seen[5000:-5000]
    assert settled.mean() == pytest.approx(others, rel=0.02)
    assert (settled <= 40).mean() == pytest.approx(stats.poisson.cdf(40, others), abs=0.02)
