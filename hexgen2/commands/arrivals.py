"""From a command's options to the requests that arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cost_model.errors import InputError

if TYPE_CHECKING:
    from hexgen2.workload.arrivals import LengthSource
    from hexgen2.workload.requests import Requests


def arrivals(
    lengths: LengthSource,
    rate: float | None,
    offline: bool,
    count: int | None,
    duration_s: float | None,
    burstiness: float,
    seed: int,
    usual_count: int = 2000,
) -> Requests:
    """What arrives: a trace at its own times, or drawn lengths at a rate or all at once.

    Raises
    ------
    InputError : the options do not go together
    """
    from hexgen2.workload import arrivals

    if offline and rate is not None:
        raise InputError("--offline", "", "leaves no room for --request-rate", "give one of them")
    if offline and duration_s is not None:
        raise InputError("--offline", "", "leaves no room for --duration-s", "say how many requests instead")
    if offline:
        return arrivals.offline(lengths, count or usual_count, seed)
    if lengths.trace is not None and lengths.timed and (rate is None or (count is None and burstiness == 1)):
        return arrivals.replay(lengths.trace, rate, duration_s or float("inf"), count)
    if rate is None:
        raise InputError("--request-rate", "", "is missing", "give it, --offline, or a trace with times")
    if count is None:
        count = usual_count if duration_s is None else int(rate * duration_s * 1.5 + 100)
    return arrivals.online(lengths, rate, count, seed, burstiness).until(duration_s)
