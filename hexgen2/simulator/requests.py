"""The requests of a simulation or of a benchmark: when each arrives, how long it is.

Arrivals are Poisson, or as bursty as asked for: gaps are gamma distributed with shape `burstiness` (1 is
Poisson, less is burstier), as in vLLM's benchmark. Or all arrive at once (offline), or as a trace has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cost_model.errors import InputError
from hexgen2.workload.classes import SHIPPED, load_workload, workload_of_trace
from hexgen2.workload.lengths import Workload
from hexgen2.workload.traces import Trace, read_trace

SHORTEST_S = 1e-9
"""A trace that ends sooner after its start has no arrival times."""


@dataclass(frozen=True, eq=False)
class Requests:
    """n requests in order of arrival.

    Attributes
    ----------
    arrival_s : [n] seconds since the start
    isl, osl : [n] prompt and output tokens, each at least 1
    source : where lengths and times come from, assumptions included
    """

    arrival_s: np.ndarray
    isl: np.ndarray
    osl: np.ndarray
    source: str

    def __len__(self) -> int:
        return len(self.isl)

    def until(self, duration_s: float | None) -> Requests:
        """Those that arrive within duration_s (None: all)."""
        if duration_s is None:
            return self
        kept = self.arrival_s <= duration_s
        return Requests(self.arrival_s[kept], self.isl[kept], self.osl[kept], self.source)


@dataclass(frozen=True)
class Lengths:
    """Where requests' lengths come from: a workload's classes, or the requests of a trace."""

    workload: Workload
    trace: Trace | None = None

    @classmethod
    def load(
        cls, workload: str | Path | Workload | None, isl: float | None = None, osl: float | None = None
    ) -> Lengths:
        """Like load_workload, but keeps the requests of a trace file.

        Raises
        ------
        InputError : see load_workload
        """
        if isinstance(workload, str | Path) and isl is None and osl is None:
            name, shipped = str(workload), {name.lower() for name in SHIPPED}
            if name.strip().lower() not in shipped and _is_file(name):
                trace = read_trace(Path(name))
                return cls(workload_of_trace(trace, Path(name).stem), trace)
        return cls(load_workload(workload, isl, osl))

    def sample(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """[count] prompt and output tokens, drawn with the weights of the classes or evenly from the trace.

        Requests of a class have its mean lengths, rounded up or down at random so that the mean is kept.
        """
        if self.trace is not None:
            chosen = rng.integers(len(self.trace), size=count)
            return self.trace.isl[chosen].astype(np.int64), self.trace.osl[chosen].astype(np.int64)
        classes = self.workload.classes
        weights = np.array([c.weight for c in classes])
        chosen = rng.choice(len(classes), size=count, p=weights / weights.sum())
        means = np.array([(c.isl, c.osl) for c in classes])[chosen]
        whole = np.floor(means + rng.random(means.shape))
        isl, osl = np.maximum(1, whole).astype(np.int64).T
        return isl, osl

    @property
    def timed(self) -> bool:
        """Whether there is a trace that says when requests come."""
        return self.trace is not None and bool(self.trace.arrival_s[-1] >= SHORTEST_S)

    @property
    def source(self) -> str:
        """In words."""
        if self.trace is not None:
            return self.trace.source
        return f"{self.workload.name}: every request has the mean lengths of its class"


def replay(
    trace: Trace, rate: float | None = None, duration_s: float = np.inf, count: int | None = None
) -> Requests:
    """The requests of a trace when they came, or faster or slower so that they come at `rate` requests/s;
    those after duration_s, or after the first `count`, are left out.

    Raises
    ------
    InputError : the trace has no times
    """
    if len(trace) > 1 and trace.arrival_s[-1] < SHORTEST_S:
        raise InputError(trace.source, "", "has no arrival times", "give --request-rate or --offline with it")
    scale = 1.0 if rate is None or len(trace) < 2 else (len(trace) - 1) / trace.arrival_s[-1] / rate
    arrival_s = trace.arrival_s * scale
    kept = (arrival_s <= duration_s) & (np.arange(len(trace)) < (count or np.inf))
    note = "" if rate is None else f", at {rate:g} requests/s"
    return Requests(
        arrival_s[kept],
        trace.isl[kept].astype(np.int64),
        trace.osl[kept].astype(np.int64),
        f"{trace.source}{note}",
    )


def offline(lengths: Lengths, count: int, seed: int) -> Requests:
    """All at once."""
    isl, osl = lengths.sample(np.random.default_rng(seed), count)
    return Requests(np.zeros(count), isl, osl, f"{lengths.source}; all {count} at once")


def online(lengths: Lengths, rate: float, count: int, seed: int, burstiness: float = 1.0) -> Requests:
    """At random, `rate` a second on average."""
    rng = np.random.default_rng(seed)
    isl, osl = lengths.sample(rng, count)
    # To the nanosecond: the last bits of a gamma variate depend on the C library.
    gaps = np.round(rng.gamma(burstiness, 1 / (rate * burstiness), size=count), 9)
    kind = "Poisson" if burstiness == 1 else f"burstiness {burstiness:g}"
    return Requests(
        np.cumsum(gaps) - gaps[0], isl, osl, f"{lengths.source}; {rate:g} requests/s, {kind}, seed {seed}"
    )


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False
