"""What a client measures of each request, on its own clock."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from hexgen2.workload.requests import Requests


@dataclass
class Measurements:
    """The measurements of n requests; times are in seconds since the start of the run.

    Attributes
    ----------
    sent_s, first_s, end_s : [n] when each request was sent and got its first and last token; nan if never
    isl, osl : [n] prompt and output tokens, as counted by the server if it reports them
    gap_s : times between consecutive tokens of a request (ITL)
    failed : request index -> reason
    routes : request index -> prefill and decode replica, or the replicas of its path, and KV bytes moved
    late_s : longest delay of a request by the client itself
    """

    requests: Requests
    sent_s: np.ndarray = field(init=False)
    first_s: np.ndarray = field(init=False)
    end_s: np.ndarray = field(init=False)
    isl: np.ndarray = field(init=False)
    osl: np.ndarray = field(init=False)
    gap_s: array = field(default_factory=lambda: array("d"))
    failed: dict[int, str] = field(default_factory=dict)
    routes: dict[int, tuple[tuple[str, ...], int]] = field(default_factory=dict)
    late_s: float = 0.0
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.sent_s, self.first_s, self.end_s = (np.full(len(self.requests), np.nan) for _ in range(3))
        self.isl, self.osl = self.requests.isl.copy(), self.requests.osl.copy()

    @property
    def ended(self) -> int:
        """Requests that have ended, successfully or not."""
        return int((~np.isnan(self.end_s)).sum()) + len(self.failed)
