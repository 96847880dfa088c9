"""Requests drawn at random have exactly the load that was asked for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexgen2.workload.arrivals import LengthSource, arrivals, online
from hexgen2.workload.classes import load_workload
from hexgen2.workload.lengths import RequestClass, Workload

SEEDS = st.integers(0, 2**32)


def source(name: str = "online") -> LengthSource:
    return LengthSource(load_workload(name))


@given(st.floats(0.01, 1e4), st.integers(2, 2000), SEEDS, st.floats(0.1, 5))
def test_the_rate_of_a_run_is_the_one_asked_for(rate, count, seed, burstiness):
    requests = online(source(), rate, count, seed, burstiness)
    assert len(requests) == count and requests.arrival_s[0] == 0
    assert requests.arrival_s[-1] == pytest.approx((count - 1) / rate)
    assert (np.diff(requests.arrival_s) >= 0).all()


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=5), st.integers(1, 3000), SEEDS)
def test_classes_have_their_shares_to_the_request(weights, count, seed):
    classes = tuple(
        RequestClass(name=f"c{k}", isl=10 + k, osl=5, weight=weight) for k, weight in enumerate(weights)
    )
    isl, _ = LengthSource(Workload(name="w", classes=classes)).sample(np.random.default_rng(seed), count)
    for k, weight in enumerate(weights):
        assert abs(np.count_nonzero(isl == 10 + k) - count * weight / sum(weights)) <= 1


def test_seeds_differ_and_repeat():
    one, same, other = (online(source(), 5.0, 1000, seed) for seed in (3, 3, 4))
    assert np.array_equal(one.arrival_s, same.arrival_s) and np.array_equal(one.isl, same.isl)
    assert not np.array_equal(one.arrival_s, other.arrival_s) and not np.array_equal(one.isl, other.isl)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_times_between_arrivals_vary_as_asked(burstiness):
    gaps = np.diff(online(source("HPLD"), 2.0, 50_000, 1, burstiness).arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_arrivals_for_a_while_are_as_many_as_the_rate_says():
    requests = arrivals(source(), 3.0, False, None, 100.0, 1.0, 0)
    assert len(requests) == 300 and requests.arrival_s[-1] <= 100.0
    assert len(arrivals(source(), 3.0, False, 50, 100.0, 1.0, 0)) == 50
    assert len(arrivals(source(), 0.001, False, None, 1.0, 1.0, 0)) == 1


def test_a_single_request_arrives_at_once():
    assert online(source(), 2.0, 1, 0).arrival_s.tolist() == [0.0]
