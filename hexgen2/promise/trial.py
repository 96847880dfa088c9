"""Simulated runs of a placement under random arrivals, and the share of their requests that were in time."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from cost_model.base import CostModel
from hexgen2.cluster import Cluster
from hexgen2.goal import Goal
from hexgen2.placement import Placement
from hexgen2.prediction.step_times import StepTimes
from hexgen2.simulator.fleet import Fleet
from hexgen2.simulator.options import Options
from hexgen2.simulator.records import Records
from hexgen2.simulator.simulation import Simulation
from hexgen2.workload.lengths import Workload
from hexgen2.workload.requests import Requests

SEEDS = 7_919
"""Seeds of trials are far from those that users draw requests with, so that nobody checks a promise with the
requests that it was made from."""
BATCHES = 20
"""Consecutive parts of a run, whose shares are taken as independent of each other."""
GROWN = 0.01
"""A fleet keeps up if from halfway to the end, beside chance, it gained at most this share of the requests
that arrived."""
FULL, FILLING = 3.0, 0.08
"""Where fewer than so many times the requests in the fleet arrive in half a run, it may still be filling, and
gain this share of them."""
CHANCE = 3.0
"""The number of requests in a fleet varies by so many times its root (standard deviations)."""
HOPELESS = 2.5
"""A run ends early once this many times as many requests as allowed are late."""


@dataclass(frozen=True)
class Trial:
    """One run.

    Attributes
    ----------
    rate : requests/s
    in_time : [n] whether each request met the targets, in the order of arrival; all true without targets
    ttft_s, tpot_s, e2el_s : [n] seconds; nan where a run that ended early has none
    whole : whether the run went on to its end
    inside : requests that were in the fleet when the last one arrived, as far as the run went
    most_req_s : requests/s that the fleet ended while it did not keep up; infinite if it did, or if the run
        ended early
    """

    rate: float
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
    """Runs of one placement, each with requests of its own.

    Arrivals are Poisson, but exactly `rate` requests/s arrive over the run, and the classes of requests have
    exactly their shares: otherwise the luck of a draw would hide how the share depends on the rate. A run
    starts with an idle fleet.

    Parameters
    ----------
    goal : whose targets count
    seed : another seed draws other requests
    costs : replaces the placement's cost model
    times : step times that are known already (see Fleet)

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
    ) -> None:
        self.placement, self.requests = placement, 0
        self._cluster, self._goal, self._seed = cluster, goal, seed
        self._fleet = Fleet(placement, cluster, Options(), costs, times)

    def run(self, rate: float, count: int, draw: int) -> Trial:
        """A run of `count` requests, the draw-th of this seed."""
        requests = self._drawn(rate, count, draw)
        records = Records(requests)
        simulation = Simulation(self.placement, self._cluster, records, Options(), fleet=self._fleet)
        watch = _Watch(self._goal, records, count)
        with suppress(_HopelessError):
            simulation.run(watch)
        self.requests += count
        return watch.trial(rate)

    def _drawn(self, rate: float, count: int, draw: int) -> Requests:
        """Requests whose mean rate, and share of each class, are exactly those of the workload."""
        rng = np.random.default_rng([SEEDS, self._seed, draw])
        arrival_s = np.cumsum(np.round(rng.exponential(1.0, size=count), 9))
        arrival_s = (arrival_s - arrival_s[0]) * ((count - 1) / rate / float(arrival_s[-1] - arrival_s[0]))
        classes = self.placement.workload.classes
        ends = np.cumsum([c.weight for c in classes])
        chosen = np.searchsorted(ends, (np.arange(count) + 0.5) / count * ends[-1])
        means = np.array([(c.isl, c.osl) for c in classes])[rng.permutation(chosen)]
        isl, osl = np.maximum(1, np.floor(means + rng.random(means.shape))).astype(np.int64).T
        return Requests(arrival_s, isl, osl, f"{count} requests at {rate:g} requests/s")


class _HopelessError(Exception):
    """Far too many requests are late: the rate is too high."""


class _Watch:
    """Ends a run early in which far too many requests are late."""

    def __init__(self, goal: Goal, records: Records, count: int) -> None:
        self._goal, self._records = goal, records
        targets = goal.ttft_ms is not None or goal.tpot_ms is not None
        self._limit = HOPELESS * (1 - goal.attainment) * count if targets else math.inf
        self._whole = True

    def __call__(self, simulation: Simulation) -> None:
        if self._limit == math.inf or self._goal.ttft_ms is None:
            return
        records = self._records
        # A request without its first token may be late by now, too.
        first_s = np.where(np.isnan(records.first_s), simulation.now, records.first_s)
        late = first_s - records.sent_s > self._goal.ttft_ms / 1e3
        if np.count_nonzero(late) > self._limit:
            self._whole = False
            raise _HopelessError

    def trial(self, rate: float) -> Trial:
        """What the run has shown."""
        records = self._records
        first_s, end_s = records.first_s, records.end_s
        ttft_s, e2el_s = first_s - records.sent_s, end_s - records.sent_s
        tpot_s = (end_s - first_s) / np.maximum(records.requests.osl - 1, 1)
        in_time = ~np.isnan(end_s)
        for seconds, target_ms in ((ttft_s, self._goal.ttft_ms), (tpot_s, self._goal.tpot_ms)):
            if target_ms is not None:
                in_time &= seconds <= target_ms / 1e3
        halfway, inside, ended_req_s = _in_the_fleet(records)
        arrived = len(in_time) / 2
        grown = GROWN if arrived >= FULL * halfway else FILLING
        kept_up = inside <= halfway + CHANCE * math.sqrt(halfway) + grown * arrived
        most_req_s = math.inf if kept_up or not self._whole else ended_req_s
        return Trial(rate, in_time, ttft_s, tpot_s, e2el_s, self._whole, inside, most_req_s)


def _in_the_fleet(records: Records) -> tuple[int, int, float]:
    """Requests in the fleet when half of them, and when all, had arrived, and the requests/s that ended in
    between."""
    sent_s, end_s = records.sent_s, records.end_s
    times_s = float(sent_s[len(sent_s) // 2]), float(sent_s[-1])
    ended = [int(np.count_nonzero(end_s <= at_s)) for at_s in times_s]
    sent = [int(np.count_nonzero(sent_s <= at_s)) for at_s in times_s]
    return sent[0] - ended[0], sent[1] - ended[1], (ended[1] - ended[0]) / (times_s[1] - times_s[0])


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


def load_varies(workload: Workload, requests: int) -> float:
    """The standard deviation of the load of so many requests, as a share of its mean: that of the time in
    which they arrive (Poisson), and of the mean of their lengths, prompts or outputs, whichever varies
    more."""
    total = math.fsum(c.weight for c in workload.classes)
    squares = []
    for lengths in ([c.isl for c in workload.classes], [c.osl for c in workload.classes]):
        shares = [c.weight / total for c in workload.classes]
        mean = math.fsum(w * n for w, n in zip(shares, lengths, strict=True))
        square = math.fsum(w * n * n for w, n in zip(shares, lengths, strict=True))
        squares.append(square / (mean * mean) - 1)
    return math.sqrt((1 + max(squares)) / requests)
