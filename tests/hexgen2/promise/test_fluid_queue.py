"""A fitted queue against the queue that it was fitted to, and against long simulations of it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexgen2.goal import Goal
from hexgen2.promise.fluid_queue import ClassOfWork, FluidQueue, fit, waits_s
from hexgen2.promise.precise_goodput import precise_goodput
from hexgen2.promise.trial import Trial
from hexgen2.workload.arrivals import LengthSource, online
from hexgen2.workload.lengths import RequestClass, Workload

ALIKE = Workload(name="alike", classes=(RequestClass(name="a", isl=500, osl=100),))
UNLIKE = Workload(
    name="unlike",
    classes=(
        RequestClass(name="long", isl=500, osl=300, weight=1),
        RequestClass(name="short", isl=500, osl=60, weight=3),
    ),
)
GOAL = Goal(objective="goodput", ttft_ms=1000.0)
SERVICE_S = 0.2
"""Seconds to the first token of a request that does not wait."""


class Fleet:
    """One server that serves `capacity` requests/s and works in proportion to the answers; requests are late
    that wait longer than the target allows."""

    placement = SimpleNamespace(places=16, replicas=())

    def __init__(self, workload: Workload, capacity: float, seed: int) -> None:
        self.workload, self.capacity, self.seed = workload, capacity, seed

    def run(self, rate: float, count: int, draw: int) -> Trial:
        requests = online(LengthSource(self.workload), rate, count, (self.seed, draw))
        work_s = requests.osl / self.workload.osl / self.capacity
        ttft_s = SERVICE_S + waits_s(requests.arrival_s, work_s)
        tpot_s = np.full(count, 0.01)
        return Trial(rate, requests, ttft_s <= GOAL.ttft_ms / 1e3, ttft_s, tpot_s, ttft_s + 1, True)

    def full_req_s(self, rate: float, count: int, draw: int) -> float:
        return min(rate, self.capacity * (1 + 0.004 * (-1) ** draw))

    def late(self, rate: float, count: int = 1_000_000) -> float:
        return 1 - self.run(rate, count, 10_000).share


def queue_of(workload: Workload, capacity: float) -> FluidQueue:
    total = sum(c.weight for c in workload.classes)
    classes = tuple(
        ClassOfWork(c.weight / total, c.osl / workload.osl, GOAL.ttft_ms / 1e3 - SERVICE_S, 0.0)
        for c in workload.classes
    )
    return FluidQueue(capacity, classes, capacity, 0.0)


@given(st.lists(st.tuples(st.floats(0.01, 2), st.floats(0.01, 2)), min_size=2, max_size=50))
def test_waits_are_those_of_a_server_that_takes_one_after_the_other(steps):
    arrival_s = np.cumsum([gap for gap, _ in steps])
    service_s = np.array([service for _, service in steps])
    free = 0.0
    for at, service, wait in zip(arrival_s, service_s, waits_s(arrival_s, service_s), strict=True):
        begins = max(at, free)
        assert wait == pytest.approx(begins - at, abs=1e-9)
        free = begins + service


@pytest.mark.parametrize("workload", [ALIKE, UNLIKE], ids=["alike", "unlike"])
@pytest.mark.parametrize("load", [0.85, 0.93, 0.97])
def test_the_long_run_share_is_that_of_a_long_simulation(workload, load):
    fleet, queue = Fleet(workload, 20.0, 1), queue_of(workload, 20.0)
    assert queue.late(20.0 * load) == pytest.approx(fleet.late(20.0 * load), rel=0.15, abs=0.004)


@given(st.floats(1, 1000), st.floats(0.01, 0.5))
def test_the_largest_rate_is_the_one_at_which_so_many_are_late(capacity, late):
    queue = queue_of(UNLIKE, capacity)
    rate = queue.largest_rate(late)
    assert 0 <= rate < capacity
    if rate > 0.01 * capacity:
        assert queue.late(rate) == pytest.approx(late, rel=0.01)
    assert queue.late(capacity) == 1


@pytest.mark.parametrize("workload", [ALIKE, UNLIKE], ids=["alike", "unlike"])
def test_a_queue_is_known_from_a_few_short_runs_better_than_by_their_shares(workload):
    """Of 12 fits to two runs each, all are nearer to the truth than runs are to each other."""
    capacity, shares, rates = 20.0, [], []
    truth = queue_of(workload, capacity).largest_rate(0.1)
    for seed in range(12):
        fleet = Fleet(workload, capacity, seed)
        runs = [fleet.run(truth * times, 4000, draw) for draw, times in enumerate((0.99, 1.01))]
        shares += [run.share for run in runs]
        rates.append(fit(runs, workload, GOAL, capacity * 1.01).largest_rate(0.1))
    late = [queue_of(workload, capacity).late(rate) for rate in rates]
    assert np.std(late) < 0.5 * np.std(shares)
    assert np.mean(late) == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("start", [0.85, 1.0, 1.2])
def test_a_goodput_is_found_from_any_start_nearby(start):
    truth = queue_of(ALIKE, 20.0).largest_rate(0.1)
    fleet = Fleet(ALIKE, 20.0, 3)
    found = precise_goodput(fleet, ALIKE, GOAL, start * truth, lambda _, length: 4000 * length, 4000, runs=5)
    assert found.req_s == pytest.approx(truth, rel=0.012)
    assert found.low_req_s <= found.req_s <= found.high_req_s and 1 <= len(found.trials) <= 5


def test_no_more_than_arrives_is_promised_and_no_run_is_made_once_told_to_stop():
    fleet = Fleet(ALIKE, 20.0, 3)
    enough = precise_goodput(
        fleet, ALIKE, GOAL, 12.0, lambda _, length: 2000 * length, 2000, runs=5, most_req_s=10.0
    )
    assert enough.req_s == 10.0 and len(enough.trials) == 1
    stopped = precise_goodput(
        fleet, ALIKE, GOAL, 12.0, lambda _, length: 2000 * length, 2000, runs=5, stop=lambda: True
    )
    assert len(stopped.trials) == 1 and stopped.req_s > 0


def test_once_the_capacity_says_that_it_is_not_worthwhile_no_rate_is_tried():
    for least, tried in ((19.0, True), (19.7, False)):
        fleet, asked = Fleet(ALIKE, 20.0, 3), []
        found = precise_goodput(
            fleet,
            ALIKE,
            GOAL,
            18.0,
            lambda _, length: 2000 * length,
            2000,
            runs=5,
            worthwhile=lambda most, least=least, asked=asked: asked.append(most) or most > least,
        )
        assert asked == [pytest.approx(0.98 * 20.0, rel=0.01)]
        assert (found.req_s > 0) == bool(found.trials) == tried


def test_a_rate_at_which_none_is_late_is_shown_once_by_a_long_run():
    """Right below the capacity, where a shorter run a little below it has shown the same; and nothing else is
    to be shown of mixed replicas."""

    class Patient(Fleet):
        def run(self, rate: float, count: int, draw: int) -> Trial:
            own = super().run(rate, count, draw)
            return Trial(rate, own.requests, own.in_time | True, own.ttft_s, own.tpot_s, own.e2el_s, True)

    for role in ("decode", "mixed"):
        fleet = Patient(ALIKE, 20.0, 3)
        fleet.placement = SimpleNamespace(places=16, replicas=[SimpleNamespace(role=role)])
        found = precise_goodput(fleet, ALIKE, GOAL, 19.0, lambda _, length: 4000 * length, 4000, runs=5)
        assert [len(trial.in_time) for trial in found.trials] == [4000, 12_000]
        assert found.req_s == found.trials[-1].rate == pytest.approx(0.98 * 20.0, rel=0.01)


def test_where_nothing_is_ever_in_time_nothing_is_promised():
    fleet = Fleet(ALIKE, 20.0, 3)
    hopeless = Goal(objective="goodput", ttft_ms=100.0)

    class Late(Fleet):
        def run(self, rate: float, count: int, draw: int) -> Trial:
            trial = super().run(rate, count, draw)
            nothing = np.zeros(count, dtype=bool)
            return Trial(rate, trial.requests, nothing, trial.ttft_s, trial.tpot_s, trial.e2el_s, True)

    found = precise_goodput(
        Late(ALIKE, 20.0, 3), ALIKE, hopeless, 15.0, lambda _, length: 1000 * length, 1000, runs=3
    )
    assert found.req_s == 0 and math.isfinite(found.high_req_s)
    assert fleet.run(5.0, 100, 0).share == 1


def test_a_longer_run_corrects_what_is_promised_of_mixed_replicas():
    """Of a fleet that becomes slower by 3 % once a run is long."""

    class Slowing(Fleet):
        def run(self, rate, count, draw):
            if count > 4000:
                return Fleet(ALIKE, 0.97 * 20.0, 3).run(rate, count, draw)
            return super().run(rate, count, draw)

    short, true = (queue_of(ALIKE, 20.0 * times).largest_rate(0.1) for times in (1, 0.97))
    for roles, expected in ((("prefill", "decode"), short), (("mixed", "decode"), true)):
        fleet = Slowing(ALIKE, 20.0, 3)
        fleet.placement = SimpleNamespace(places=16, replicas=[SimpleNamespace(role=role) for role in roles])
        found = precise_goodput(fleet, ALIKE, GOAL, short, lambda _, length: 4000 * length, 4000, runs=5)
        assert found.req_s == pytest.approx(expected, rel=0.012)
        assert found.low_req_s <= found.req_s <= found.high_req_s
