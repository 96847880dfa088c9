"""The goodput of a placement: the largest rate at which the share of requests asked for is in time.

The share falls with the rate, slowly at first and then steeply, and every run gives it with an error. So the
rate is bracketed and closed in on, each run with other requests, and then read off a straight line through
the runs around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hexgen2.promise.trial import Trial, Trials, deviation

FIRST_STEP, LARGEST_STEP = 0.03, 0.25
"""Shares of the rate by which it changes, at least and at most, until it is bracketed."""
NEAR = 0.08
"""Runs count for the line whose rates are within this share of the estimate."""
CLOSE = 0.015
"""A bracket this narrow, as a share of the rate, needs no more runs."""
NORMAL_95 = 1.96


@dataclass(frozen=True)
class Found:
    """A goodput with the 95 % confidence interval, in requests/s, and the runs that it rests on."""

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
) -> Found:
    """Find the goodput of a placement.

    Parameters
    ----------
    start_req_s : where to begin
    count : rate -> requests of a run
    runs : how many at most
    most_req_s : no higher rate is of interest; if it serves enough in time, it is the answer
    stop : asked before each run but the first
    """
    done: list[Trial] = []
    rate = min(start_req_s, most_req_s)
    while len(done) < runs and not (done and stop()):
        done.append(trials.run(rate, count(rate), len(done)))
        low, high = _bracket(done, attainment)
        if low is not None and low.rate >= most_req_s:
            break
        if low and high and high.rate - low.rate <= CLOSE * low.rate:
            break
        rate = min(_next_rate(done[-1], low, high, attainment), most_req_s)
    return _read_off(done, attainment, most_req_s)


def _bracket(done: list[Trial], attainment: float) -> tuple[Trial | None, Trial | None]:
    """The run of the highest rate below every rate that failed, and that of the lowest that failed."""
    high = min((t for t in done if t.share < attainment), key=lambda t: t.rate, default=None)
    limit = high.rate if high else math.inf
    low = max(
        (t for t in done if t.share >= attainment and t.rate < limit), key=lambda t: t.rate, default=None
    )
    return low, high


def _next_rate(last: Trial, low: Trial | None, high: Trial | None, attainment: float) -> float:
    """A rate inside the bracket, where a line between its ends crosses the attainment, or further on."""
    if low and high:
        # A run far beyond says only that it is too much.
        floor = max(high.share, attainment - 0.3)
        part = (low.share - attainment) / max(low.share - floor, 1e-9)
        return low.rate + (high.rate - low.rate) * min(0.8, max(0.2, part))
    excess = last.share - attainment
    step = min(LARGEST_STEP, max(FIRST_STEP, abs(excess) / 2))
    return last.rate * (1 + step) if excess >= 0 else last.rate * (1 - step)


def _read_off(done: list[Trial], attainment: float, most_req_s: float) -> Found:
    low, high = _bracket(done, attainment)
    if low is not None and low.rate >= most_req_s:
        return Found(low.rate, low.rate, low.rate, tuple(done))
    if low is None or high is None:
        only = low or high
        assert only is not None
        # Never in time, or never late, as far as was tried.
        at = only.rate if low else 0.0
        return Found(at, at, at, tuple(done))
    part = (low.share - attainment) / (low.share - high.share)
    estimate = low.rate + (high.rate - low.rate) * part
    near = [t for t in done if t.whole and abs(t.rate - estimate) <= NEAR * estimate]
    slope = _slope(near)
    if slope is not None:
        mean_rate = math.fsum(t.rate for t in near) / len(near)
        mean_share = math.fsum(t.share for t in near) / len(near)
        fitted = mean_rate + (attainment - mean_share) / slope
        if min(t.rate for t in near) <= fitted <= max(t.rate for t in near):
            estimate = fitted
    else:
        near, slope = [low, high], (high.share - low.share) / (high.rate - low.rate)
    error = NORMAL_95 * deviation(near) / -slope
    return Found(estimate, max(0.0, estimate - error), estimate + error, tuple(done))


def _slope(near: list[Trial]) -> float | None:
    """By how much the share changes per request/s, by least squares; None if it does not fall."""
    if len(near) < 2:
        return None
    rate, share = (math.fsum(v) / len(near) for v in ([t.rate for t in near], [t.share for t in near]))
    spread = math.fsum((t.rate - rate) * (t.rate - rate) for t in near)
    together = math.fsum((t.rate - rate) * (t.share - share) for t in near)
    return together / spread if spread > 0 and together < 0 else None
