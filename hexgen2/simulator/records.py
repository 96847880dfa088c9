"""What a simulation records of each request, replica and route."""

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
    """Totals of one replica.

    Attributes
    ----------
    busy_s : seconds that its busiest stage worked
    requests : requests that it finished
    waited_s : sum of the times that requests queued for it
    running_s : sum of the times that requests decoded on it
    peak_running : most requests that decoded at the same time
    redispatches, hauled_bytes : requests whose heads moved between attention workers, and their KV caches
    """

    busy_s: float = 0.0
    requests: int = 0
    waited_s: float = 0.0
    running_s: float = 0.0
    peak_running: int = 0
    preemptions: int = 0
    redispatches: int = 0
    hauled_bytes: float = 0.0


@dataclass
class RouteRecord:
    """Totals of one KV route: its capacity, bytes and requests, and the sum of the seconds from the end of a
    prefill until its whole KV cache has arrived."""

    capacity_req_s: float = 0.0
    bytes: float = 0.0
    requests: int = 0
    after_s: float = 0.0


@dataclass
class Records:
    """All that the results are computed from.

    Attributes
    ----------
    sent_s : [n] when each request was sent: at its time of arrival, or later in a closed loop
    first_s, end_s : [n] times of its first and last token; nan if it had none
    last_s : [n] time of its latest token, as far as known
    failed : request index -> reason
    moved : when shares of routes moved with the lengths of requests, and why
    gap_s, gaps : times between tokens (ITL), and how often each occurred
    stream : where a CSV row is written for each request that ends
    """

    requests: Requests
    sent_s: np.ndarray = field(init=False)
    first_s: np.ndarray = field(init=False)
    end_s: np.ndarray = field(init=False)
    last_s: array = field(init=False)
    prefill: list[str] = field(init=False)
    decode: list[str] = field(init=False)
    failed: dict[int, str] = field(default_factory=dict)
    moved: list[tuple[float, str]] = field(default_factory=list)
    gap_s: array = field(default_factory=lambda: array("d"))
    gaps: array = field(default_factory=lambda: array("q"))
    replicas: dict[str, ReplicaRecord] = field(default_factory=lambda: defaultdict(ReplicaRecord))
    routes: dict[tuple[str, str], RouteRecord] = field(default_factory=lambda: defaultdict(RouteRecord))
    stream: TextIO | None = None

    def __post_init__(self) -> None:
        n = len(self.requests)
        self.sent_s = self.requests.arrival_s.astype(float)
        self.first_s, self.end_s = np.full(n, np.nan), np.full(n, np.nan)
        # Access to single elements is faster here than in numpy arrays.
        self.last_s = array("d", [math.nan]) * n
        self._sent_s: Any = self.sent_s.data
        self._first_s: Any = self.first_s.data
        self._end_s: Any = self.end_s.data
        self.prefill, self.decode = [""] * n, [""] * n
        self._rows = csv.writer(self.stream) if self.stream else None
        if self._rows:
            self._rows.writerow(COLUMNS)

    def sent(self, request: int, now: float) -> None:
        """A client sends a request."""
        self._sent_s[request] = now

    def gap(self, seconds: float, count: int = 1) -> None:
        """`count` tokens came `seconds` after the token before them."""
        self.gap_s.append(seconds)
        self.gaps.append(count)

    def first(self, request: int, now: float) -> None:
        """A prefill has generated a token: the request's first, unless it was restarted."""
        if math.isnan(self._first_s[request]):
            self._first_s[request] = now
        else:
            self.gap(now - self.last_s[request])
        self.last_s[request] = now

    def ended(self, request: int, now: float) -> None:
        """A request has received its last token."""
        self._end_s[request] = now
        self._write(request, "done")

    def fail(self, request: int, why: str) -> None:
        """A request ends before its last token."""
        self.failed[request] = why
        self._write(request, why)

    def _write(self, request: int, outcome: str) -> None:
        if self._rows is None:
            return
        asked = self.requests
        self._rows.writerow(
            (
                request,
                f"{self.sent_s[request]:.6f}",
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
    """Times between tokens of the requests of one batch. Usually all of them got their last token in the same
    step; requests whose last token is older, because they joined or were held up, are late."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._late: dict[int, float] = {}

    def hold_up(self, requests: Iterable[int], last_s: float) -> None:
        """Requests are held up; for those that were not late before, last_s is the time of their last
        token."""
        for request in requests:
            self._late.setdefault(request, last_s)

    def leave(self, request: int, last_s: float) -> float:
        """A request leaves; returns the time of its last token: last_s, unless the request is late."""
        return self._late.pop(request, last_s)

    def note(self, first_s: float, gap_s: float, tokens: int) -> None:
        """The batch generates `tokens` tokens, each gap_s after the one before; late requests get their next
        one at first_s."""
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
