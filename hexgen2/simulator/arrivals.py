"""Which requests arrive when: from the options of a simulation or of a benchmark."""

from __future__ import annotations

from cost_model.errors import InputError
from hexgen2.simulator.requests import Lengths, Requests, offline, online, replay


def arrivals(
    lengths: Lengths,
    request_rate: float | None,
    at_once: bool,
    count: int | None,
    duration_s: float | None,
    burstiness: float,
    seed: int,
    usual_count: int = 2000,
) -> Requests:
    """A trace at its own times, or requests of drawn lengths that arrive at a rate or all at once.

    Parameters
    ----------
    request_rate : requests/s on average; a trace with times is replayed faster or slower to reach it
    count, duration_s : how many requests, and how long they arrive; usual_count if neither is given
    burstiness : 1 is Poisson, less is burstier

    Raises
    ------
    InputError : the options contradict one another, or the rate is missing
    """
    if at_once:
        if request_rate is not None:
            raise InputError("--offline", "", "leaves no room for --request-rate", "give one of them")
        if duration_s is not None:
            remedy = "say how many requests instead"
            raise InputError("--offline", "", "leaves no room for --duration-s", remedy)
        return offline(lengths, count or usual_count, seed)
    as_recorded = request_rate is None or (count is None and burstiness == 1)
    if lengths.trace is not None and lengths.timed and as_recorded:
        return replay(lengths.trace, request_rate, duration_s or float("inf"), count)
    if request_rate is None:
        raise InputError("--request-rate", "", "is missing", "give it, --offline, or a trace with times")
    if count is None:
        count = usual_count if duration_s is None else int(request_rate * duration_s * 1.5 + 100)
    return online(lengths, request_rate, count, seed, burstiness).until(duration_s)
