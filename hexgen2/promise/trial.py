"""Simulated runs of a placement under random arrivals, and the share of their requests that were in time."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from cost_model.base import CostModel
from hexgen2.cluster import Cluster
from hexgen2.goal import Goal
from hexgen2.placement import Placement
from hexgen2.prediction.step_times import StepTimes
from hexgen2.simulator.event_loop import PROGRESS
from hexgen2.simulator.fleet import Fleet
from hexgen2.simulator.options import Options
from hexgen2.simulator.records import Records
from hexgen2.simulator.run import TURNS
from hexgen2.simulator.simulation import Simulation
from hexgen2.workload.arrivals import LengthSource, online
from hexgen2.workload.requests import Requests

SEEDS = 7_919
"""Seeds of trials are far from those that users draw requests with, so that nobody checks a promise with the
requests that it was made from."""
BATCHES = 20
"""Consecutive parts of a run, whose shares are taken as independent of each other."""
GROWN = 0.01
"""A fleet keeps up if from halfway to the end, beside chance, the requests that wait for their first token
became more by at most this share of those that arrived."""
CHANCE = 3.0
"""The number of requests that wait varies by so many times its root (standard deviations)."""
FIRST_TURN, AGREEMENT = 4, 0.005
"""Where requests are alike, a run beyond the capacity has shown the steady state once the rates of its last
two turns agree this closely, but not before this turn."""
STEADY_FROM = 0.5
"""Of the turns of a run beyond the capacity, so many are left out of its rate: waves begin in step."""
ENOUGH_TURNS = 2.5
"""A run beyond the capacity that has to stop has shown something once all that the fleet decodes at a time
has ended so often."""
REPORTED = 0.4
"""Events from one report of a run beyond the capacity to the next, for each request that the fleet decodes at
a time: some ten reports in a turn."""
MOST_OFTEN = 16
"""Events from one such report to the next, at least."""
FULL_FROM = 0.45
"""Of the requests of a run far beyond the capacity, the fleet is full once this share has arrived."""
LOOKS = 8
"""Of so many reports of a simulation, one is looked at: to see which requests are late takes time."""
HOPELESS = 2.5
"""A run ends early once this many times as many requests as allowed are late."""


@dataclass(frozen=True)
class Trial:
    """One run.

    Attributes
    ----------
    rate : requests/s
    requests : those of the run
    in_time : [n] whether each request met the targets, in the order of arrival; all true without targets
    ttft_s, tpot_s, e2el_s : [n] seconds; nan where a run that ended early has none
    whole : whether the run went on to its end
    inside : requests that were in the fleet when the last one arrived, as far as the run went
    most_req_s : requests/s that the fleet ended while more and more waited, at most the rate; infinite if it
        kept up, or if the run ended early
    """

    rate: float
    requests: Requests
    in_time: np.ndarray
    ttft_s: np.ndarray
    tpot_s: np.ndarray
    e2el_s: np.ndarray
    whole: bool
    inside: int = 0
    most_req_s: float = math.inf

    @property
    def kept_up(self) -> bool:
        """Whether the fleet ended requests about as fast as they arrived, as far as the run shows."""
        return self.most_req_s == math.inf

    @property
    def share(self) -> float:
        """The share of requests in time; 0 where the fleet did not keep up, since sooner or later none is."""
        return float(np.count_nonzero(self.in_time)) / len(self.in_time) if self.kept_up else 0.0

    @property
    def mean_e2el_s(self) -> float:
        """Mean seconds from arrival to the last token; infinite if the run ended early."""
        return math.fsum(self.e2el_s.tolist()) / len(self.e2el_s) if self.whole else math.inf


class Trials:
    """Runs of one placement, each with requests of its own, which arrive at random at an idle fleet.

    Parameters
    ----------
    goal : whose targets count
    seed : another seed draws other requests
    costs : replaces the placement's cost model
    times : step times that are known already (see Fleet)
    stop : whether to end a run at once: `run` raises OutOfTimeError then, served_req_s gives 0

    Attributes
    ----------
    requests : simulated so far
    """

    def __init__(
        self,
        placement: Placement,
        cluster: Cluster,
        goal: Goal,
        seed: int,
        costs: CostModel | None = None,
        times: dict[Hashable, StepTimes] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.placement, self.requests, self._stop = placement, 0, stop
        self._cluster, self._goal, self._seed = cluster, goal, seed
        self._lengths = LengthSource(placement.workload)
        self._fleet = Fleet(placement, cluster, Options(), costs, times)

    def run(self, rate: float, count: int, draw: int, to_its_end: bool = False) -> Trial:
        """A run of `count` requests, the draw-th of this seed; to its end, or until far too many are late.

        Raises
        ------
        OutOfTimeError : it was time to stop before the run ended
        """
        records = self._records(rate, count, draw)
        watch = _Watch(Goal() if to_its_end else self._goal, records, count, self._stop)
        self._simulate(records, watch)
        return watch.trial(rate, self._goal)

    def served_req_s(self, rate: float, count: int, draw: int, turns: int = TURNS) -> float:
        """Requests/s that the fleet serves of `count` that arrive at a rate beyond its capacity, once it is
        full and its rate is steady; 0 where it cannot serve them all. A run that has to stop before says what
        it has shown, or 0 if all that the fleet decodes at a time has not ended ENOUGH_TURNS times.

        Parameters
        ----------
        turns : all that the fleet decodes at a time ends so many times in the run if it went on to its end;
            it ends two turns before at the latest, since prompts have to wait until then
        """
        records = self._records(rate, count, draw)
        alike = len(self.placement.workload.classes) == 1
        watch = _SteadyRate(records.requests, count / turns, turns - 2, alike, self._stop)
        every = int(max(MOST_OFTEN, min(PROGRESS, REPORTED * count / turns)))
        simulation = self._run(records, watch, every)
        if len(records.failed) * turns > simulation.ended:
            return 0.0
        return watch.req_s

    def full_req_s(self, rate: float, count: int, draw: int) -> float:
        """Requests/s that the fleet ends while requests arrive at a rate far beyond its capacity, from when
        it is full to the last arrival; 0 where it ends none, or has to stop before. Later, no prompts are
        left beside the answers, and a request ends sooner.

        Parameters
        ----------
        count : of the requests; at 1.6 times the capacity, six times those that it decodes at a time
        """
        records = self._records(rate, count, draw)
        last_s = float(records.sent_s[-1])

        def until_all_arrived(simulation: Simulation) -> None:
            if simulation.now > last_s or self._stop():
                raise _OverError

        self._simulate(records, until_all_arrived)
        if self._stop():
            return 0.0
        # Equal requests that begin together end together, in waves: what ends in the middle of the time
        # counts most, so that it matters little where in a wave that time begins and ends.
        first_s = float(records.sent_s[int(FULL_FROM * count)])
        span_s = last_s - first_s
        ended = (records.end_s[(records.end_s > first_s) & (records.end_s < last_s)] - first_s) / span_s
        return math.fsum((30 * (ended * (1 - ended)) ** 2).tolist()) / span_s

    def _records(self, rate: float, count: int, draw: int) -> Records:
        return Records(online(self._lengths, rate, count, (SEEDS, self._seed, draw)))

    def _simulate(self, records: Records, watch: Callable[[Simulation], None]) -> None:
        """Run until every request has ended or the watch ends the run. It looks LOOKS times as rarely as the
        simulation reports, but at once when it is time to stop."""
        reports = itertools.count(1)

        def report(now: Simulation) -> None:
            if next(reports) % LOOKS == 0 or self._stop():
                watch(now)

        self._run(records, report, PROGRESS)

    def _run(self, records: Records, report: Callable[[Simulation], None], every: int) -> Simulation:
        """The simulation of these requests, which reports once for `every` so many events, until that ends
        it."""
        simulation = Simulation(self.placement, self._cluster, records, Options(), fleet=self._fleet)
        with suppress(_OverError):
            simulation.run(report, every)
        self.requests += len(records.requests)
        return simulation


class OutOfTimeError(Exception):
    """A run was ended because the time for it is over; it has shown nothing."""


class _OverError(Exception):
    """The run has shown what it is to show."""


class _SteadyRate:
    """Ends a run beyond the capacity once it shows how many requests/s the fleet serves in its steady state.

    What ends comes in waves: equal requests that begin together end together. What is decoded does not, so a
    request counts from its first token on, with the share of its tokens that it has. And it counts as many
    times as its prompt and its answer are longer than the mean of all: longer ones may come before others.

    Parameters
    ----------
    requests : of the run
    turn : requests that the fleet decodes at a time
    last : turns after which the run ends in any case
    alike : whether requests have equal lengths, so that it may end before

    Attributes
    ----------
    req_s : requests/s; 0 as long as the run has not shown any
    """

    def __init__(
        self, requests: Requests, turn: float, last: int, alike: bool, stop: Callable[[], bool]
    ) -> None:
        self._mean = [int(lengths.sum()) / len(lengths) for lengths in (requests.isl, requests.osl)]
        self._turn, self._last, self._stop = turn, last, stop
        self._next, self.req_s = min(FIRST_TURN, last) if alike else last, 0.0
        # Turns that have ended, seconds, and requests served by then.
        self._shown: list[tuple[float, float, float]] = []

    def __call__(self, simulation: Simulation) -> None:
        turns = simulation.ended / self._turn
        prompts, answers = map(operator.truediv, simulation.served_tokens(), self._mean)
        self._shown.append((turns, simulation.now, (prompts + answers) / 2))
        if self._stop():
            if turns >= ENOUGH_TURNS:
                self.req_s = self._rate(STEADY_FROM * turns, turns)
            raise _OverError
        if turns < self._next:
            return
        before, now = self._rate(turns - 2, turns - 1), self._rate(turns - 1, turns)
        if turns >= self._last or (now > 0 and abs(before - now) <= AGREEMENT * now):
            self.req_s = self._rate(STEADY_FROM * turns, turns)
            raise _OverError
        self._next = int(turns) + 1

    def _rate(self, first: float, last: float) -> float:
        """Requests/s from one turn to another, by least squares."""
        shown = [(at_s, served) for turns, at_s, served in self._shown if first <= turns <= last]
        mean_s = math.fsum(at_s for at_s, _ in shown) / max(1, len(shown))
        spread = math.fsum((at_s - mean_s) * (at_s - mean_s) for at_s, _ in shown)
        return math.fsum((at_s - mean_s) * served for at_s, served in shown) / spread if spread else 0.0


class _Watch:
    """Ends a run early in which far too many requests are late."""

    def __init__(self, goal: Goal, records: Records, count: int, stop: Callable[[], bool]) -> None:
        self._goal, self._records, self._stop = goal, records, stop
        targets = goal.ttft_ms is not None or goal.tpot_ms is not None
        self._limit = HOPELESS * (1 - goal.attainment) * count if targets else math.inf
        self._whole = True

    def __call__(self, simulation: Simulation) -> None:
        if self._stop():
            raise OutOfTimeError
        if self._limit == math.inf or self._goal.ttft_ms is None:
            return
        records = self._records
        # A request without its first token may be late by now, too.
        first_s = np.where(np.isnan(records.first_s), simulation.now, records.first_s)
        late = first_s - records.sent_s > self._goal.ttft_ms / 1e3
        if np.count_nonzero(late) > self._limit:
            self._whole = False
            raise _OverError

    def trial(self, rate: float, goal: Goal) -> Trial:
        """What the run has shown of the goal's targets."""
        records = self._records
        first_s, end_s = records.first_s, records.end_s
        ttft_s, e2el_s = first_s - records.sent_s, end_s - records.sent_s
        tpot_s = (end_s - first_s) / np.maximum(records.requests.osl - 1, 1)
        in_time = ~np.isnan(end_s)
        for seconds, target_ms in ((ttft_s, goal.ttft_ms), (tpot_s, goal.tpot_ms)):
            if target_ms is not None:
                in_time &= seconds <= target_ms / 1e3
        halfway, at_the_end, inside, ended_req_s = _in_the_fleet(records)
        grown = CHANCE * math.sqrt(halfway) + GROWN * len(in_time) / 2
        kept_up = at_the_end <= halfway + grown or not self._whole
        most_req_s = math.inf if kept_up else min(rate, ended_req_s)
        return Trial(rate, records.requests, in_time, ttft_s, tpot_s, e2el_s, self._whole, inside, most_req_s)


def _in_the_fleet(records: Records) -> tuple[int, int, int, float]:
    """Requests that wait for their first token when half of all, and when all, have arrived; requests in the
    fleet at the end; and the requests/s that ended in between."""
    sent_s, first_s, end_s = records.sent_s, records.first_s, records.end_s
    half_s, all_s = float(sent_s[len(sent_s) // 2]), float(sent_s[-1])

    def by(times_s: np.ndarray, at_s: float) -> int:
        return int(np.count_nonzero(times_s <= at_s))

    waiting = [by(sent_s, at_s) - by(first_s, at_s) for at_s in (half_s, all_s)]
    ended = by(end_s, all_s) - by(end_s, half_s)
    return waiting[0], waiting[1], by(sent_s, all_s) - by(end_s, all_s), ended / (all_s - half_s)


def deviation(trials: Sequence[Trial]) -> float:
    """The standard error of the mean share of runs, by the method of batch means: consecutive requests are
    late together, so parts of the runs are compared and not requests (Law, Simulation Modeling and Analysis,
    2015, section 9.5.3)."""
    shares: list[float] = []
    variance = 0.0
    for trial in trials:
        parts = [float(np.count_nonzero(p)) / len(p) for p in np.array_split(trial.in_time, BATCHES)]
        mean = math.fsum(parts) / BATCHES
        variance += math.fsum((p - mean) * (p - mean) for p in parts) / (BATCHES - 1) / BATCHES
        shares.append(mean)
    return math.sqrt(variance) / len(shares)
