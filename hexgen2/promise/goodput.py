"""Roughly the goodput of a placement: the largest rate at which the share of requests asked for is in time.
What is promised is found from there (see precise_goodput.py).

The share that is late grows with the rate, about exponentially until the fleet is full, and every run gives
it with an error. So the rate is bracketed and closed in on, each run with other requests, and then read off a
straight line through the logarithms of what the runs around it found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from cost_model.portable import log
from hexgen2.promise.trial import OutOfTimeError, Trial, Trials, deviation

SMALLEST_STEP, LARGEST_STEP = 0.02, 0.08
"""Shares of the rate by which it changes, at least and at most, until it is bracketed."""
LATE, LATE_STEPS = 0.5, (0.12, 0.5)
"""Where less than this share of what is asked for is in time, the rate falls by the first of these shares,
and later by the second: how late requests are does not say then how much it is too high."""
FALL = 0.03
"""After runs in which more and more waited, the rate is below what the fleet ended by this share for each."""
GROWTH = 20.0
"""The late share grows by about this power of the rate, where nothing better is known."""
INSIDE = 0.2
"""No run is closer to an end of the bracket than this share of it."""
CLIFF, FENCE = 0.35, 0.7
"""Below a run that ended early, the goodput is taken to be at most so far above the last good run, as a share
of the way: by these two alone, and if others show how the late share grows."""
NEAR = 0.06
"""Runs count for the line whose rates are within this share of the estimate."""
CLOSE = 0.02
"""A bracket this narrow, as a share of the rate, needs no more runs."""
PRECISE = 0.015
"""Nor does a goodput that is known within this share of it, by its confidence interval."""
NARROW = 0.025
"""But only in a bracket this narrow: where nearly all are late at its upper end, a line says too little."""
NORMAL_95 = 1.96


@dataclass(frozen=True)
class Found:
    """A goodput with its 95 % confidence interval, in requests/s, and the runs that it rests on."""

    req_s: float
    low_req_s: float
    high_req_s: float
    trials: tuple[Trial, ...]


def find_goodput(
    trials: Trials,
    attainment: float,
    start_req_s: float,
    count: Callable[[float], int],
    runs: int,
    most_req_s: float = math.inf,
    stop: Callable[[], bool] = lambda: False,
    one_in_time: bool = False,
) -> Found:
    """Find the goodput of a placement.

    Parameters
    ----------
    start_req_s : where to begin
    count : rate -> requests of a run
    runs : how many at most
    most_req_s : no higher rate is of interest; if it serves enough in time, it is the answer
    stop : asked before each run but the first
    one_in_time : whether to end with the first run that serves enough in time

    Raises
    ------
    OutOfTimeError : not even the first run ended
    """
    done: list[Trial] = []
    rate = min(start_req_s, most_req_s)
    while len(done) < runs and not (done and stop()):
        try:
            done.append(trials.run(rate, count(rate), len(done)))
        except OutOfTimeError:
            if not done:
                raise
            break
        low, high = _bracket(done, attainment)
        if low is not None and (one_in_time or low.rate >= most_req_s):
            break
        if low and high and min(high.rate, high.most_req_s) - low.rate <= CLOSE * low.rate:
            break
        if low and high and len(done) > 2 and high.rate - low.rate <= NARROW * low.rate:
            found = _read_off(done, attainment, most_req_s)
            if found.high_req_s - found.low_req_s <= 2 * PRECISE * found.req_s:
                break
        rate = min(_next_rate(done, low, high, attainment), most_req_s)
    return _read_off(done, attainment, most_req_s)


def _bracket(done: list[Trial], attainment: float) -> tuple[Trial | None, Trial | None]:
    """The run of the highest rate below every rate that failed, and that of the lowest that failed."""
    high = min((t for t in done if t.share < attainment), key=lambda t: t.rate, default=None)
    limit = high.rate if high else math.inf
    low = max(
        (t for t in done if t.share >= attainment and t.rate < limit), key=lambda t: t.rate, default=None
    )
    return low, high


def _late(trial: Trial) -> float:
    """The logarithm of the late share, half a request where none is late."""
    return log(max(1 - trial.share, 0.5 / len(trial.in_time)))


def _part(low: Trial, high: Trial, asked: float) -> float:
    """The part of the way from `low` to `high` at which a line between them crosses the late share asked
    for. Where hardly any was late in the one and the other ended early, there is a cliff in between."""
    part = (asked - _late(low)) / max(_late(high) - _late(low), 1e-9)
    return part if high.whole else min(part, CLIFF)


def _next_rate(done: list[Trial], low: Trial | None, high: Trial | None, attainment: float) -> float:
    """A rate inside the bracket, where a line between its ends crosses the attainment, or further on."""
    asked = log(1 - attainment)
    if low and high and high.kept_up:
        return low.rate + (high.rate - low.rate) * min(1 - INSIDE, max(INSIDE, _part(low, high, asked)))
    if high and not high.kept_up:
        below = high.most_req_s * (1 - FALL * sum(not trial.kept_up for trial in done))
        least = low.rate if low else 0.0
        return below if below > least else (least + high.rate) / 2
    last = low or high
    assert last is not None
    slope = _slope(done[-2:])
    growth = min(GROWTH, slope * last.rate) if slope else GROWTH
    most = LARGEST_STEP if slope is None else 2 * LARGEST_STEP
    size = min(most, max(SMALLEST_STEP, abs(asked - _late(last)) / growth))
    if low:
        return low.rate * (1 + size)
    if last.share < LATE * attainment:
        size = LATE_STEPS[min(len(done), len(LATE_STEPS)) - 1]
    return last.rate * (1 - size)


def _read_off(done: list[Trial], attainment: float, most_req_s: float) -> Found:
    low, high = _bracket(done, attainment)
    if low is not None and low.rate >= most_req_s:
        return Found(low.rate, low.rate, low.rate, tuple(done))
    if low is None or high is None:
        # Never in time, or always, as far as was tried.
        at = low.rate if low else 0.0
        return Found(at, at, at, tuple(done))
    asked = log(1 - attainment)
    if high.kept_up:
        estimate = low.rate + (high.rate - low.rate) * min(1.0, max(0.0, _part(low, high, asked)))
    else:
        estimate = max(low.rate, high.most_req_s)
    near = [t for t in done if t.whole and t.kept_up and abs(t.rate - estimate) <= NEAR * estimate]
    slope = _slope(near)
    if slope is None:
        near = [low, high]
        slope = max(_late(high) - _late(low), 1e-9) / (high.rate - low.rate)
    else:
        mean_rate, mean_late = _means(near)
        fitted = mean_rate + (asked - mean_late) / slope
        if low.rate * (1 - NEAR) <= fitted <= high.rate * (1 + NEAR):
            estimate = fitted if high.whole else min(fitted, low.rate + FENCE * (high.rate - low.rate))
    estimate = min(estimate, *(t.most_req_s for t in done))
    # The error of the late share, as one of its logarithm; and that of a straight line between the ends.
    error = NORMAL_95 * deviation(near) / (1 - attainment) / slope + (high.rate - low.rate) / 4
    return Found(estimate, max(0.0, estimate - error), estimate + error, tuple(done))


def _means(near: list[Trial]) -> tuple[float, float]:
    """Mean rate and logarithm of the late share."""
    return math.fsum(t.rate for t in near) / len(near), math.fsum(map(_late, near)) / len(near)


def _slope(near: list[Trial]) -> float | None:
    """By how much the logarithm of the late share grows per request/s, by least squares; None if it does
    not."""
    if len(near) < 2:
        return None
    rate, late = _means(near)
    spread = math.fsum((t.rate - rate) * (t.rate - rate) for t in near)
    together = math.fsum((t.rate - rate) * (_late(t) - late) for t in near)
    return together / spread if spread > 0 and together > 0 else None
