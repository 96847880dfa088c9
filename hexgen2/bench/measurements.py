"""What a client saw of each request, on its own clock."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from hexgen2.workload.requests import Requests


@dataclass
class Measurements:
    """Of n requests; times in seconds since the first could be sent.

    Attributes
    ----------
    sent_s, first_s, end_s : [n] when a request was sent, its first and its last token came; nan if never
    isl, osl : [n] prompt and output tokens, by the server's count where it gives one
    gap_s : times between the tokens of a request (ITL)
    failed : why requests failed, by their index
    routes : prefill and decode replica of requests, by their index, and the KV bytes that were moved
    late_s : for how long the client itself held up a request at most
    """

    requests: Requests
    sent_s: np.ndarray = field(init=False)
    first_s: np.ndarray = field(init=False)
    end_s: np.ndarray = field(init=False)
    isl: np.ndarray = field(init=False)
    osl: np.ndarray = field(init=False)
    gap_s: array = field(default_factory=lambda: array("d"))
    failed: dict[int, str] = field(default_factory=dict)
    routes: dict[int, tuple[str, str, int]] = field(default_factory=dict)
    late_s: float = 0.0
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.sent_s, self.first_s, self.end_s = (np.full(len(self.requests), np.nan) for _ in range(3))
        self.isl, self.osl = self.requests.isl.copy(), self.requests.osl.copy()

    @property
    def ended(self) -> int:
        """Requests that have ended, well or not."""
        return int((~np.isnan(self.end_s)).sum()) + len(self.failed)
