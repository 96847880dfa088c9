"""What becomes of each request and of each replica, as the simulation goes on."""

from __future__ import annotations

import csv
import math
from array import array
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TextIO

import numpy as np

from hexgen2.workload.requests import Requests

COLUMNS = ("request", "arrival_s", "isl", "osl", "prefill", "decode", "first_token_s", "end_s", "outcome")


@dataclass
class ReplicaRecord:
    """Of a replica: seconds that its busiest stage worked, requests it ended, and for how long requests
    waited in front of it altogether; running_s is the sum of the times that requests decoded, peak_running
    the most that did at once."""

    busy_s: float = 0.0
    requests: int = 0
    waited_s: float = 0.0
    running_s: float = 0.0
    peak_running: int = 0
    preemptions: int = 0


@dataclass
class RouteRecord:
    """Of a route: what it could carry, KV bytes, requests, and the seconds from the end of a prefill until
    all has landed."""

    capacity_req_s: float = 0.0
    bytes: float = 0.0
    requests: int = 0
    after_s: float = 0.0


@dataclass
class Records:
    """Everything that results are made of.

    Attributes
    ----------
    first_s, end_s : [n] when a request's first and last token came; nan if never
    last_s : [n] when its last token so far came, as far as that is known
    failed : why requests failed, by their index
    gap_s, gaps : times between tokens (ITL), and how many of each
    """

    requests: Requests
    first_s: np.ndarray = field(init=False)
    end_s: np.ndarray = field(init=False)
    last_s: array = field(init=False)
    prefill: list[str] = field(init=False)
    decode: list[str] = field(init=False)
    failed: dict[int, str] = field(default_factory=dict)
    gap_s: array = field(default_factory=lambda: array("d"))
    gaps: array = field(default_factory=lambda: array("q"))
    replicas: dict[str, ReplicaRecord] = field(default_factory=lambda: defaultdict(ReplicaRecord))
    routes: dict[tuple[str, str], RouteRecord] = field(default_factory=lambda: defaultdict(RouteRecord))
    stream: TextIO | None = None

    def __post_init__(self) -> None:
        n = len(self.requests)
        self.first_s, self.end_s = np.full(n, np.nan), np.full(n, np.nan)
        # Single elements are read and written faster in these than in arrays of numpy.
        self.last_s = array("d", [math.nan]) * n
        self._first_s: Any = self.first_s.data
        self._end_s: Any = self.end_s.data
        self.prefill, self.decode = [""] * n, [""] * n
        self._rows = csv.writer(self.stream) if self.stream else None
        if self._rows:
            self._rows.writerow(COLUMNS)

    def gap(self, seconds: float, count: int = 1) -> None:
        """So many tokens came so long after the one before."""
        self.gap_s.append(seconds)
        self.gaps.append(count)

    def first(self, request: int, now: float) -> None:
        """A request's prefill has made a token: its first, unless it was prefilled before."""
        if math.isnan(self._first_s[request]):
            self._first_s[request] = now
        else:
            self.gap(now - self.last_s[request])
        self.last_s[request] = now

    def ended(self, request: int, now: float) -> None:
        """A request has its last token."""
        self._end_s[request] = now
        self._write(request, "done")

    def fail(self, request: int, why: str) -> None:
        """A request ends without all of its tokens."""
        self.failed[request] = why
        self._write(request, why)

    def _write(self, request: int, outcome: str) -> None:
        if self._rows is None:
            return
        asked = self.requests
        self._rows.writerow(
            (
                request,
                f"{asked.arrival_s[request]:.6f}",
                asked.isl[request],
                asked.osl[request],
                self.prefill[request],
                self.decode[request],
                f"{self.first_s[request]:.6f}",
                f"{self.end_s[request]:.6f}",
                outcome,
            )
        )


class BatchGaps:
    """Times between tokens of requests that get them together; those whose last token came before everybody's
    last step, since they joined or were held up, are late."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._late: dict[int, float] = {}

    def hold_up(self, requests: Iterable[int], last_s: float) -> None:
        """Requests wait; those that did not before had their last token then."""
        for request in requests:
            self._late.setdefault(request, last_s)

    def leave(self, request: int, last_s: float) -> float:
        """A request leaves; when its last token came: unless it is late, then."""
        return self._late.pop(request, last_s)

    def note(self, first_s: float, gap_s: float, tokens: int) -> None:
        """So many tokens are made, each so long after the one before; those that are late get their first at
        first_s."""
        late = self._late
        if late:
            since: dict[float, int] = {}
            for since_s in late.values():
                since[since_s] = since.get(since_s, 0) + 1
            for since_s, requests in since.items():
                self._records.gap(first_s - since_s, requests)
            tokens -= len(late)
            late.clear()
        if tokens:
            self._records.gap(gap_s, tokens)
