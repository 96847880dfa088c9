"""A queue with one server that is late when a whole fleet is: what a few runs show, without their luck.

Near saturation, whether a run of a few thousand requests is in time depends on how its arrivals happen to
cluster: the share in time of single runs at the same rate differs by 5 to 15 points. But nearly all of that
is also seen by a single server that takes a fixed time for each request (Lindley's recursion). So such a
server is fitted to the runs of a placement, arrival by arrival: its speed, how long requests may wait, and
whether a request's work is that of its prompt or of its answer. How often its requests wait for too long in
the long run is known without simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cost_model.portable import exp, power
from hexgen2.goal import Goal
from hexgen2.promise.trial import BATCHES, Trial
from hexgen2.search.ties import least
from hexgen2.workload.lengths import Workload

SPEEDS = (0, 1, -1, 2, -2, *range(3, 25))
"""Speeds tried, in steps of SPEED_STEP above the capacity that is given."""
SPEED_STEP = 0.005
SPREAD = 0.02
"""Speeds this far from the capacity that is given, as a share of it, must explain the runs clearly better
(a standard deviation): where hardly any request was late, all speeds explain as much."""
UNEXPLAINED = 0.02
"""Shares of parts of a run are never explained better than this (a standard deviation)."""
TOGETHER = 2.0
"""So many consecutive parts of a run are off together."""
GROWTH = 20.0
"""What is late without waiting grows by about this power of the rate."""
UNHURRIED = 0.25
"""Of the requests that wait least, this share shows which are late without waiting."""
_HALVINGS = 60


@dataclass(frozen=True)
class ClassOfWork:
    """The requests of one class.

    share : of all requests
    work : of each, over the mean
    slack_s : how long it may wait; not above 0 if it is late in any case
    late : the share of them that is late without waiting, at the rate `seen_req_s`
    """

    share: float
    work: float
    slack_s: float
    late: float


@dataclass(frozen=True)
class FluidQueue:
    """One server, first come, first served.

    seen_req_s : mean rate of the runs that it was fitted to
    error : standard error of the share of requests that are late at that rate
    """

    capacity_req_s: float
    classes: tuple[ClassOfWork, ...]
    seen_req_s: float
    error: float

    def late(self, rate: float) -> float:
        """The share of requests that are late in the long run, at random arrivals of so many requests/s.

        The wait in an M/G/1 queue exceeds t with a probability near a exp(-d t), where d solves
        rate (E[exp(d S)] - 1) = d for the service time S, and a = (1 - load) / (rate E[S exp(d S)] - 1)
        (Cramer and Lundberg; Asmussen, Applied Probability and Queues, 2003, section XIII.5).
        """
        load = rate / self.capacity_req_s
        if load >= 1:
            return 1.0
        decay = self._decay(rate)
        slope = rate * self._moment(decay, lambda s: s)
        above = (1 - load) / (slope - 1)
        more = power(rate / self.seen_req_s, GROWTH)
        parts = []
        for c in self.classes:
            waits = min(1.0, above * exp(-decay * c.slack_s)) if c.slack_s > 0 else 1.0
            anyway = min(1.0, c.late * more)
            parts.append(c.share * (anyway + (1 - anyway) * waits))
        return math.fsum(parts)

    def largest_rate(self, late: float) -> float:
        """The largest rate at which no more than that share is late; 0 if there is none."""
        low, high = 0.0, self.capacity_req_s
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.late(middle) <= late else (low, middle)
        return low

    def _decay(self, rate: float) -> float:
        """The d of `late`: a convex function of d falls from 0 and rises again, and is 0 there."""

        def above(d: float) -> bool:
            return rate * (self._moment(d, lambda _: 1.0) - 1) > d

        high = 1.0
        while not above(high):
            high *= 2
        low = high / 2
        while above(low) and low > 1e-12:
            low, high = low / 2, low
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if above(middle) else (middle, high)
        return low

    def _moment(self, d: float, of: Callable[[float], float]) -> float:
        """E[of(S) exp(d S)]."""
        seconds = ((c.share, c.work / self.capacity_req_s) for c in self.classes)
        return math.fsum(share * of(s) * exp(d * s) for share, s in seconds)


def waits_s(arrival_s: np.ndarray, service_s: np.ndarray) -> np.ndarray:
    """[n] seconds that each request waits for a server that takes service_s [n] for each (Lindley)."""
    steps = np.concatenate(([0.0], np.cumsum(service_s[:-1] - np.diff(arrival_s))))
    return steps - np.minimum.accumulate(steps)


def fit(trials: Sequence[Trial], workload: Workload, goal: Goal, capacity_req_s: float) -> FluidQueue:
    """The queue that is late when the requests of these runs were.

    Parameters
    ----------
    trials : whole runs, at rates at which some requests were in time
    capacity_req_s : about what the fleet serves at full load
    """
    members = [_members(trial, workload) for trial in trials]
    slack_s = _slack_s(trials, members, workload, goal)
    late = [~trial.in_time for trial in trials]
    shares = np.concatenate([_by_batch(each) for each in late])
    tried = []
    for works in _works(workload):
        for speed in SPEEDS:
            capacity = capacity_req_s * (1 + SPEED_STEP * speed)
            scale, anyway, predicted = _explain(trials, members, late, works, slack_s, capacity)
            off = shares - np.concatenate([_by_batch(each) for each in predicted])
            tried.append((math.fsum((off * off).tolist()), speed, works, scale, anyway))
    best, count = min(each[0] for each in tried), len(shares)
    noise = TOGETHER * max(best / count, UNEXPLAINED * UNEXPLAINED)

    def unlikely(each: tuple[float, int, list[float], float, list[float]]) -> float:
        far = SPEED_STEP * each[1] / SPREAD
        return each[0] / noise + far * far

    squares, speed, works, scale, anyway = least(tried, unlikely)[0]
    total = math.fsum(c.weight for c in workload.classes)
    classes = tuple(
        ClassOfWork(c.weight / total, work, slack * scale, share)
        for c, work, slack, share in zip(workload.classes, works, slack_s, anyway, strict=True)
    )
    seen_req_s = math.fsum(trial.rate for trial in trials) / len(trials)
    error = math.sqrt(TOGETHER * squares) / count
    return FluidQueue(capacity_req_s * (1 + SPEED_STEP * speed), classes, seen_req_s, error)


def _works(workload: Workload) -> Iterator[list[float]]:
    """What the work of a request of each class may be, over the mean."""
    alike = [1.0] * len(workload.classes)
    yield alike
    for works in (
        [c.isl / workload.isl for c in workload.classes],
        [c.osl / workload.osl for c in workload.classes],
    ):
        if max(works) - min(works) > 0.01:
            yield works


def _members(trial: Trial, workload: Workload) -> np.ndarray:
    """[n] the class of each request, by its lengths."""
    isl, osl = trial.requests.isl[:, None], trial.requests.osl[:, None]
    classes = np.array([(c.isl, c.osl) for c in workload.classes])
    return np.argmin(np.abs(isl - classes[:, 0]) + np.abs(osl - classes[:, 1]), axis=1)


def _slack_s(
    trials: Sequence[Trial], members: Sequence[np.ndarray], workload: Workload, goal: Goal
) -> list[float]:
    """How long requests of each class may wait for their first token; 1 without such a target."""
    if goal.ttft_ms is None:
        return [1.0] * len(workload.classes)
    target_s = goal.ttft_ms / 1e3
    ttft_s, kind = np.concatenate([t.ttft_s for t in trials]), np.concatenate(members)
    found = []
    for k in range(len(workload.classes)):
        own = np.sort(ttft_s[kind == k])
        found.append(target_s - float(own[len(own) // 10]) if len(own) else target_s)
    return found


def _explain(
    trials: Sequence[Trial],
    members: Sequence[np.ndarray],
    late: Sequence[np.ndarray],
    works: list[float],
    slack_s: list[float],
    capacity: float,
) -> tuple[float, list[float], list[np.ndarray]]:
    """By a server of that capacity: how much of its slack a request may wait so that as many are late as in
    the runs, the share of each class that is late in any case, and what is expected of each request."""
    slack, work = np.array(slack_s), np.array(works)
    # Waits as shares of the slack; infinite where there is none.
    waits = [
        np.where(
            slack[kind] > 0,
            waits_s(trial.requests.arrival_s, work[kind] / capacity) / np.maximum(slack[kind], 1e-9),
            math.inf,
        )
        for trial, kind in zip(trials, members, strict=True)
    ]
    every, kinds, was_late = np.concatenate(waits), np.concatenate(members), np.concatenate(late)
    unhurried = every <= np.sort(every)[int(len(every) * UNHURRIED)]
    first = []
    for k in range(len(works)):
        own = unhurried & (kinds == k)
        first.append(float(np.count_nonzero(was_late[own])) / max(1, int(np.count_nonzero(own))))
    in_any_case = np.array(first)[kinds]
    order = np.argsort(-every, kind="stable")
    more = np.count_nonzero(was_late) - math.fsum(in_any_case.tolist())
    reached = np.cumsum((1 - in_any_case)[order])
    scale = float(every[order[min(int(np.searchsorted(reached, max(0.0, more))), len(order) - 1)]])
    base = np.array(first)
    predicted = [
        base[kind] + (1 - base[kind]) * (wait > scale) for wait, kind in zip(waits, members, strict=True)
    ]
    return scale, first, predicted


def _by_batch(values: np.ndarray) -> np.ndarray:
    """Means of consecutive parts of a run."""
    return np.array([math.fsum(part.tolist()) / len(part) for part in np.array_split(values, BATCHES)])
