"""Generates the requests of a simulation or a benchmark: when each one arrives and how long it is.

Requests arrive at random (`online`), all at once (`offline`), or as recorded in a trace (`replay`). Random
gaps are gamma distributed with shape `burstiness`, and then scaled so that the run has exactly the rate asked
for, as in vLLM's benchmark: 1 is Poisson, less is burstier. The classes of a workload have exactly their
shares, too. Near saturation, the luck of a draw would otherwise decide the result: of 4,000 Poisson arrivals,
the rate alone varies by 1.6 %.

A limit of requests in flight makes each of these a closed loop: a request that arrives while as many are in
flight is sent when one of them ends. All at once, it is N clients, each of which sends its next request as
soon as its last one has ended (`vllm bench serve --max-concurrency N --request-rate inf`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cost_model.errors import InputError
from hexgen2.workload.classes import SHIPPED, load_workload, workload_of_trace
from hexgen2.workload.lengths import Workload
from hexgen2.workload.requests import Requests
from hexgen2.workload.traces import read_trace

SHORTEST_S = 1e-9
"""A trace shorter than this has no arrival times."""


@dataclass(frozen=True)
class LengthSource:
    """Where the lengths of requests come from: the classes of a workload, or the requests of a trace.

    Attributes
    ----------
    length_range : r < 1: both lengths are drawn on their own and uniformly from floor(r * x) to x, where x is
        the class's isl or osl; this is `--random-range-ratio` of SGLang's bench_serving and of InferenceMAX
        (that of today's vLLM instead means (1 - r) * x to (1 + r) * x). 1: every request of a class has its
        lengths. A trace has lengths of its own

    Raises
    ------
    InputError : length_range is not above 0 and at most 1, or is given for a trace
    """

    workload: Workload
    trace: Requests | None = None
    length_range: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.length_range <= 1:
            remedy = "give the shortest as a share of the longest, as in 0.8"
            raise InputError("--length-range", "", f"is {self.length_range:g}", remedy)
        if self.trace is not None and self.length_range != 1:
            raise InputError(
                "--length-range", "", "does not go with a trace, which has its lengths", "drop one of them"
            )

    @classmethod
    def load(
        cls,
        workload: str | Path | Workload | None,
        isl: float | None = None,
        osl: float | None = None,
        length_range: float = 1.0,
    ) -> LengthSource:
        """Like `load_workload`, but keeps the requests of a trace file.

        Raises
        ------
        InputError : see load_workload, and above
        """
        if isinstance(workload, str | Path) and isl is None and osl is None:
            name, shipped = str(workload), {name.lower() for name in SHIPPED}
            if name.strip().lower() not in shipped and _is_file(name):
                trace = read_trace(Path(name))
                return cls(workload_of_trace(trace, Path(name).stem), trace, length_range)
        return cls(load_workload(workload, isl, osl), None, length_range)

    def sample(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """[count] prompt tokens and [count] output tokens: of the classes, in a random order but with exactly
        their shares, or drawn uniformly from the trace.

        Requests of a class have its mean lengths, rounded up or down at random to preserve the mean, or
        lengths from its range.
        """
        if self.trace is not None:
            chosen = rng.integers(len(self.trace), size=count)
            return self.trace.isl[chosen], self.trace.osl[chosen]
        classes = self.workload.classes
        ends = np.cumsum([c.weight for c in classes])
        chosen = np.searchsorted(ends, (np.arange(count) + 0.5) / count * ends[-1])
        in_random_order = np.argsort(rng.random(count), kind="stable")
        means = np.array([(c.isl, c.osl) for c in classes])[chosen[in_random_order]]
        if self.length_range < 1:
            longest = np.maximum(1, np.floor(means))
            shortest = np.maximum(1, np.floor(means * self.length_range))
            isl, osl = rng.integers(shortest, longest, dtype=np.int64, endpoint=True).T
            return isl, osl
        whole = np.floor(means + rng.random(means.shape))
        isl, osl = np.maximum(1, whole).astype(np.int64).T
        return isl, osl

    @property
    def timed(self) -> bool:
        """Whether there is a trace with arrival times."""
        return self.trace is not None and bool(self.trace.arrival_s[-1] >= SHORTEST_S)

    @property
    def source(self) -> str:
        """The source in words, for reports."""
        if self.trace is not None:
            return self.trace.source
        if self.length_range < 1:
            share = f"{100 * self.length_range:g} to 100 %"
            return f"{self.workload.name}: lengths from {share} of those of the class"
        return f"{self.workload.name}: every request has the mean lengths of its class"


def replay(
    trace: Requests, rate: float | None = None, duration_s: float = np.inf, count: int | None = None
) -> Requests:
    """The requests of a trace at their recorded times, optionally rescaled to `rate` requests/s.

    Requests after duration_s (after rescaling) and all but the first `count` are dropped.

    Raises
    ------
    InputError : the trace has no arrival times
    """
    if len(trace) > 1 and trace.arrival_s[-1] < SHORTEST_S:
        raise InputError(trace.source, "", "has no arrival times", "give --request-rate or --offline with it")
    scale = 1.0 if rate is None or len(trace) < 2 else (len(trace) - 1) / trace.arrival_s[-1] / rate
    arrival_s = trace.arrival_s * scale
    kept = (arrival_s <= duration_s) & (np.arange(len(trace)) < (count or np.inf))
    note = "" if rate is None else f", at {rate:g} requests/s"
    return Requests(arrival_s[kept], trace.isl[kept], trace.osl[kept], f"{trace.source}{note}")


def offline(lengths: LengthSource, count: int, seed: int) -> Requests:
    """`count` requests that all arrive at time 0."""
    isl, osl = lengths.sample(np.random.default_rng(seed), count)
    return Requests(np.zeros(count), isl, osl, f"{lengths.source}; all {count} at once")


def online(
    lengths: LengthSource, rate: float, count: int, seed: int | Sequence[int], burstiness: float = 1.0
) -> Requests:
    """`count` requests that arrive at random, exactly `rate` requests/s from the first to the last."""
    rng = np.random.default_rng(seed)
    isl, osl = lengths.sample(rng, count)
    # Rounded, since the last bits of a gamma variate depend on the C library.
    arrival_s = np.cumsum(np.round(rng.gamma(burstiness, 1 / burstiness, size=count), 9))
    arrival_s -= arrival_s[0]
    if arrival_s[-1] <= 0:  # Gaps that all round to nothing, as very bursty ones may.
        arrival_s = np.arange(count, dtype=float)
    arrival_s *= (count - 1) / rate / max(float(arrival_s[-1]), 1.0 if count == 1 else 0.0)
    kind = "Poisson" if burstiness == 1 else f"burstiness {burstiness:g}"
    return Requests(arrival_s, isl, osl, f"{lengths.source}; {rate:g} requests/s, {kind}, seed {seed}")


def arrivals(
    lengths: LengthSource,
    request_rate: float | None,
    at_once: bool,
    count: int | None,
    duration_s: float | None,
    burstiness: float,
    seed: int,
    usual_count: int = 2000,
    max_concurrency: int | None = None,
) -> Requests:
    """A trace at its own times, or requests of drawn lengths that arrive at a rate or all at once.

    Parameters
    ----------
    request_rate : requests/s of the whole run; a trace with times is replayed faster or slower to reach it
    at_once : all requests arrive at once; not needed with max_concurrency, if there are no times of arrival
    count, duration_s : how many requests, and how long they arrive; usual_count if neither is given
    burstiness : 1 is Poisson, less is burstier

    Raises
    ------
    InputError : the options contradict one another, or the rate is missing
    """
    if max_concurrency is not None:
        clients = f"at most {max_concurrency} in flight"
        at_once = at_once or (request_rate is None and not lengths.timed)
        asked = arrivals(lengths, request_rate, at_once, count, duration_s, burstiness, seed, usual_count)
        return replace(asked, source=f"{asked.source}, {clients}")
    if at_once:
        if request_rate is not None:
            raise InputError("--offline", "", "leaves no room for --request-rate", "give one of them")
        if duration_s is not None:
            raise InputError("--duration-s", "", "needs times of arrival", "give --request-rate, too")
        return offline(lengths, count or usual_count, seed)
    as_recorded = request_rate is None or (count is None and burstiness == 1)
    if lengths.trace is not None and lengths.timed and as_recorded:
        return replay(lengths.trace, request_rate, duration_s or float("inf"), count)
    if request_rate is None:
        remedy = "give it, --offline, --max-concurrency, or a trace with times"
        raise InputError("--request-rate", "", "is missing", remedy)
    if count is None:
        count = usual_count if duration_s is None else max(1, round(request_rate * duration_s))
    return online(lengths, request_rate, count, seed, burstiness).until(duration_s)


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False
