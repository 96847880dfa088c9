"""The goodput that a placement is promised to have: the largest rate at which, in the long run, the share of
requests asked for is in time.

One run with more requests than the fleet can serve shows its capacity. Then a few runs at rates ever closer
to the goodput show how long requests may wait (see fluid_queue.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from hexgen2.goal import Goal
from hexgen2.promise.fluid_queue import FluidQueue, fit
from hexgen2.promise.goodput import NORMAL_95, PRECISE, Found
from hexgen2.promise.trial import OutOfTimeError, Trial, Trials
from hexgen2.workload.lengths import Workload

OVERLOAD = 1.6
"""So many times the rate to begin with arrive in the run that shows the capacity, so that the fleet soon is
full."""
REACHED = 0.9
"""A fleet that serves this share of what arrives may have more capacity than that."""
SUSTAINED = 0.98
"""No more than this share of the capacity is promised, unless runs beyond show more: there, queues may grow
for longer than a run."""
FEW = 0.3
"""Runs in which less than this share was in time show little of how long requests may wait."""
HARDLY = 0.2
"""Where no run has more than this share of the late requests that are allowed, they say nothing of the rate
at which more would be late."""
STEP = 0.07
"""The rate changes by at most this share from run to run."""
EASY_STEP = 0.25
"""But by so much where hardly any request was late."""
LONGER = 3
"""Where hardly any was late at the largest rate allowed, a run of so many times the requests must show the
same."""
LONGER_DRAW = 1000
"""The number of that run's requests, which no other run has."""
MOST_LATE = 0.95
"""Of a queue nearly all of whose requests are late, nothing more can be said."""
HIGHER = 1.05
"""Where enough was in time at the largest rate allowed, one so many times as large is tried, if a run can
show it: a full fleet may serve less than one that never was full. But until it is full, a fleet takes in more
requests than it serves."""
NEARBY = 0.01
"""Rates that differ by this share are about the same."""
CAPACITY_KNOWN = 0.0025
"""The standard error of the capacity, as a share of it: what is left of a goodput's when many runs agree."""


def precise_goodput(
    trials: Trials,
    workload: Workload,
    goal: Goal,
    start_req_s: float,
    count: Callable[[float, int], int],
    overload_count: int,
    runs: int,
    most_req_s: float = math.inf,
    stop: Callable[[], bool] = lambda: False,
    easy_req_s: float = 0.0,
    worthwhile: Callable[[float], bool] = lambda most_req_s: True,
) -> Found:
    """Find the goodput of a placement that is about start_req_s.

    Parameters
    ----------
    count : (rate, 1 or LONGER) -> requests of a run, and of one so many times as long
    overload_count : requests of the run that shows the capacity: several times those that fill the fleet
    runs : how many at most, beside that
    most_req_s : no higher rate is of interest; if it serves enough in time, it is the answer
    stop : asked before each run but the first
    easy_req_s : a rate at which shorter runs had hardly any late request
    worthwhile : asked with the most that the capacity lets be promised; where it is not, the answer is 0
    """
    capacity = _capacity_req_s(trials, start_req_s, overload_count, runs)
    if capacity <= 0:
        return Found(0.0, 0.0, 0.0, ())
    ceiling, late = min(most_req_s, SUSTAINED * capacity), 1 - goal.attainment
    if not worthwhile(ceiling):
        return Found(0.0, 0.0, 0.0, ())
    done: list[Trial] = []
    queue: FluidQueue | None = None
    found = Found(0.0, 0.0, 0.0, ())
    rate = min(easy_req_s * (1 + EASY_STEP) or start_req_s, ceiling)
    length = LONGER if easy_req_s > 0 and ceiling <= rate < most_req_s else 1
    while len(done) < runs and not (done and stop()):
        try:
            trial = trials.run(rate, count(rate, length), len(done))
        except OutOfTimeError:
            break
        done.append(trial)
        if rate >= most_req_s and trial.share >= goal.attainment:
            return Found(most_req_s, most_req_s, most_req_s, tuple(done))
        known = [t for t in done if t.whole and t.in_time.mean() > FEW]
        if not known:
            rate = (rate + easy_req_s) / 2 if easy_req_s > 0 else rate * (1 - STEP)
            continue
        if not trial.kept_up:
            ceiling = min(ceiling, SUSTAINED * max(capacity, min(trial.most_req_s, rate)))
        queue = fit(known, workload, goal, capacity)
        highest, easy = max(t.rate for t in known), max(1 - t.share for t in known) < HARDLY * late
        if not easy and rate >= ceiling and trial.share >= goal.attainment:
            higher = ceiling * HIGHER
            if count(higher, 1) * (1 - capacity / higher) > trials.placement.places:
                ceiling = min(most_req_s, higher)
        found = _read_off(queue, late, ceiling, highest if easy else 0.0)
        if easy and highest >= ceiling:
            if length > 1:
                break
            length = LONGER
            continue
        if easy:
            too_high = min((t.rate for t in done if t.rate > highest), default=math.inf)
            rate = min(highest * (1 + EASY_STEP), (highest + too_high) / 2, ceiling)
            if ceiling <= rate < most_req_s and rate <= highest * (1 + STEP):
                length = LONGER  # A short run so close to that one would show little more.
            continue
        precise = found.high_req_s - found.low_req_s <= 2 * PRECISE * found.req_s
        if len(known) > 2 and precise and found.req_s <= highest * (1 + NEARBY):
            break
        rate = min(max(found.req_s, rate * (1 - STEP)), rate * (1 + STEP))
    mixed = any(replica.role == "mixed" for replica in trials.placement.replicas)
    if mixed and done and not (stop() or _was_shown(found, done, late, count)):
        found, longer = _as_shown(found, queue, trials, late, count)
        done += longer
    return replace(found, trials=tuple(done))


def _was_shown(found: Found, done: Sequence[Trial], late: float, count: Callable[[float, int], int]) -> bool:
    """Whether a longer run at that rate has shown it already."""
    return any(
        trial.whole
        and 1 - trial.share <= late
        and trial.rate >= found.req_s
        and len(trial.in_time) >= count(found.req_s, LONGER)
        for trial in done
    )


def _as_shown(
    found: Found, queue: FluidQueue | None, trials: Trials, late: float, count: Callable[[float, int], int]
) -> tuple[Found, list[Trial]]:
    """What a longer run at that rate leaves of it, and the run. In mixed replicas, the work of one request
    delays those of others, so that queues grow in ways that one server does not show: more may be late in a
    longer run, as many as with the queue at a larger rate. By that factor it is too large."""
    if queue is None or found.req_s <= 0:
        return found, []
    try:
        trial = trials.run(found.req_s, count(found.req_s, LONGER), LONGER_DRAW)
    except OutOfTimeError:
        return found, []
    if not trial.whole or 1 - trial.share <= late:
        return found, [trial]
    factor = min(1.0, found.req_s / queue.largest_rate(min(1 - trial.share, MOST_LATE)))
    low, high = factor * found.low_req_s, factor * found.high_req_s
    return Found(factor * found.req_s, low, high, ()), [trial]


def _capacity_req_s(trials: Trials, start_req_s: float, count: int, runs: int) -> float:
    """What the fleet serves at full load."""
    rate = start_req_s
    for draw in range(runs):
        rate *= OVERLOAD
        served = trials.full_req_s(rate, count, runs + draw)
        if served < REACHED * rate:
            break
    return served


def _read_off(queue: FluidQueue, late: float, ceiling_req_s: float, easy_req_s: float) -> Found:
    """The goodput by the queue, with its 95 % confidence interval; at least a rate at which hardly any
    request was late."""
    req_s = min(max(queue.largest_rate(late), easy_req_s), ceiling_req_s)
    if req_s <= 0:
        return Found(0.0, 0.0, 0.0, ())
    nearby = req_s * (1 - NEARBY)
    slope = max((queue.late(req_s) - queue.late(nearby)) / (req_s - nearby), late / req_s)
    half = NORMAL_95 * math.hypot(queue.error / slope, CAPACITY_KNOWN * req_s)
    return Found(req_s, max(0.0, req_s - half), req_s + half, ())
