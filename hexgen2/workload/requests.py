"""A sequence of requests: when each one arrives and how many tokens it has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Requests:
    """n requests in order of arrival.

    Attributes
    ----------
    arrival_s : [n] seconds since the start; all zero if they arrive at once or the times are unknown
    isl, osl : [n] prompt and output tokens, each at least 1
    source : where lengths and times come from, with the assumptions made
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
