"""The goodput of a placement in a few short runs, from a start that may be far off.

Unlike precise_goodput, which wants the last per cent of a placement that is promised, this is for comparing
placements under many perturbations of their costs: each run has the same requests, at other times.
"""

from __future__ import annotations

import math

from cost_model.portable import exp, log
from hexgen2.promise.trial import Trial, Trials

FLOOR = 0.05
"""Rates below this share of the start are not looked at."""
DOWN, UP = 0.8, 1.25
"""The first steps down and up; each further one in the same direction is as large as all before it."""
CLOSE = 0.03
"""A bracket this narrow, as a share of the rate, needs no more runs."""
INSIDE = 0.15
"""No run is closer to an end of the bracket than this share of its logarithm."""


def quick_goodput(
    trials: Trials,
    attainment: float,
    start_req_s: float,
    requests: int,
    runs: int,
    most_req_s: float = math.inf,
) -> float:
    """The largest rate, up to most_req_s, at which the share of requests asked for is in time; 0 if it is
    less than FLOOR of the start."""
    low: tuple[float, float] | None = None
    high: tuple[float, float] | None = None
    rate, floor, step = min(start_req_s, most_req_s), start_req_s * FLOOR, 1.0
    for _ in range(runs):
        trial = trials.run(rate, requests, 0)
        if trial.share >= attainment:
            if rate >= most_req_s:
                return rate
            low = rate, _late(trial)
        else:
            if rate <= floor:
                return 0.0
            high = rate, _late(trial)
        if low and high:
            if high[0] <= low[0] * (1 + CLOSE):
                break
            rate = _between(low, high, attainment, INSIDE)
        elif low:
            step = UP if step == 1.0 else step * step
            rate = min(most_req_s, rate * step)
        else:
            # Where hardly any request is in time, none may be at any rate: see that first.
            hopeless = trial.share < attainment / 2 and step == 1.0
            step = DOWN if step == 1.0 else step * step
            rate = floor if hopeless else max(floor, rate * step)
    if low is None:
        return 0.0
    return low[0] if high is None else _between(low, high, attainment, 0.0)


def _late(trial: Trial) -> float:
    """The logarithm of the late share, half a request where none is late."""
    return log(max(1 - trial.share, 0.5 / len(trial.in_time)))


def _between(low: tuple[float, float], high: tuple[float, float], attainment: float, inside: float) -> float:
    """Where a line through the logarithms of the late shares crosses what is asked for: over those of the
    rates, since the ends may be far apart."""
    part = (log(1 - attainment) - low[1]) / max(high[1] - low[1], 1e-9)
    part = min(1 - inside, max(inside, part))
    return low[0] * exp(part * log(high[0] / low[0]))
