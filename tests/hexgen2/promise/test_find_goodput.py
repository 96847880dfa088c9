"""Finding the rate at which enough requests are in time, where the answer is known."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexgen2.promise.goodput import find_goodput
from hexgen2.promise.trial import Trial, deviation
from hexgen2.workload.requests import Requests


@dataclass
class Scripted:
    """Runs whose late share is a * exp(b (rate / limit - 1)), at most all, with the noise of single
    requests."""

    limit: float
    growth: float
    at_limit: float = 0.1
    noisy: bool = False
    rates: list[float] = field(default_factory=list)

    def run(self, rate: float, count: int, draw: int) -> Trial:
        self.rates.append(rate)
        late = min(1.0, self.at_limit * math.exp(min(50.0, self.growth * (rate / self.limit - 1))))
        if self.noisy:
            in_time = np.random.default_rng(draw).random(count) >= late
        else:
            in_time = (np.arange(count) * 7919) % count >= round(late * count)
        nothing = np.zeros(count)
        requests = Requests(nothing, nothing, nothing, "")
        return Trial(rate, requests, in_time, nothing, nothing, nothing, True)


def found(runs: Scripted, start: float, **more):
    return find_goodput(runs, 0.9, start, lambda rate: 4000, runs=8, **more)


@given(st.floats(0.01, 1000), st.floats(5, 300), st.floats(0.8, 1.2))
def test_the_rate_is_found_from_any_start_nearby(limit, growth, start):
    goodput = found(Scripted(limit, growth), start * limit)
    assert goodput.req_s == pytest.approx(limit, rel=0.025)
    assert goodput.low_req_s <= goodput.req_s <= goodput.high_req_s


def test_one_run_in_time_may_be_enough():
    runs = Scripted(5.0, 30.0)
    assert found(runs, 4.0, one_in_time=True).req_s == 4.0 and runs.rates == [4.0]
    runs = Scripted(5.0, 30.0)
    goodput = found(runs, 5.5, one_in_time=True)
    *over, last = runs.rates
    assert last <= 5.0 < min(over) and goodput.req_s == pytest.approx(5.0, rel=0.025)


@pytest.mark.parametrize("growth", [10, 30, 90])
def test_the_interval_holds_the_truth_nearly_always(growth):
    """A start of its own gives each search rates, and so draws, of its own."""
    inside = 0
    for k in range(60):
        goodput = found(Scripted(5.0, growth, noisy=True), 4.6 + k / 100)
        inside += goodput.low_req_s <= 5.0 <= goodput.high_req_s
    assert inside >= 45


def test_no_rate_beyond_what_arrives_is_tried():
    runs = Scripted(10.0, 30.0)
    goodput = found(runs, 8.0, most_req_s=6.0)
    assert (goodput.req_s, goodput.low_req_s, goodput.high_req_s) == (6.0, 6.0, 6.0) and runs.rates == [6.0]


def test_what_is_never_in_time_has_no_goodput():
    runs = Scripted(10.0, 0.0, at_limit=0.95)
    assert found(runs, 8.0).req_s == 0 and min(runs.rates) < 0.2


def test_it_stops_when_told():
    runs = Scripted(10.0, 30.0)
    assert found(runs, 8.0, stop=lambda: True).req_s == 8.0 and len(runs.rates) == 1


def test_the_standard_error_is_that_of_independent_requests_where_they_are():
    rng = np.random.default_rng(5)
    nothing = np.zeros(4000)
    requests = Requests(nothing, nothing, nothing, "")
    runs = [Trial(1.0, requests, rng.random(4000) < 0.9, nothing, nothing, nothing, True) for _ in range(40)]
    assert deviation(runs) == pytest.approx(math.sqrt(0.09 / 160_000), rel=0.2)
    late_together = [
        Trial(1.0, requests, np.repeat(rng.random(20) < 0.9, 200), nothing, nothing, nothing, True)
        for _ in range(40)
    ]
    assert deviation(late_together) == pytest.approx(math.sqrt(0.09 / 800), rel=0.2)


@dataclass
class Overrun:
    """A fleet that falls behind from `limit` on. Short runs seem to end `seen` times what arrives there."""

    limit: float
    seen: float
    rates: list[float] = field(default_factory=list)

    def run(self, rate: float, count: int, draw: int) -> Trial:
        self.rates.append(rate)
        nothing, behind = np.zeros(count), rate > self.limit
        requests = Requests(nothing, nothing, nothing, "")
        most = self.seen * rate if behind else math.inf
        return Trial(rate, requests, np.ones(count, bool), nothing, nothing, nothing, True, most_req_s=most)


@given(st.floats(0.1, 1000), st.floats(1.0, 1.1), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_after_a_run_that_falls_behind_a_lower_rate_is_tried(limit, start, seen):
    runs = Overrun(limit, seen)
    goodput = found(runs, start * limit)
    worst = math.inf
    for rate in runs.rates:
        assert 0 < rate < worst
        worst = min(worst, rate) if rate > limit else worst
    assert goodput.req_s <= min((rate for rate in runs.rates if rate > limit), default=2 * limit)
    assert goodput.req_s >= 0.8 * limit or seen < 0.9
