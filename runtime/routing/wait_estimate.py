"""Estimates how long a request would wait, from the rate at which waiting requests start."""

from __future__ import annotations

from collections import deque

STARTS_KEPT = 64
STARTS_NEEDED = 8
RETRY_AT_LEAST_S, RETRY_AT_MOST_S = 1, 120


class WaitEstimate:
    """The rate at which requests start while others wait; idle times do not count.

    Times are seconds on any one clock.
    """

    def __init__(self) -> None:
        self._took_s: deque[float] = deque(maxlen=STARTS_KEPT)
        self._since_s: float | None = None

    def started(self, now_s: float) -> None:
        """A request has started."""
        if self._since_s is not None:
            self._took_s.append(now_s - self._since_s)
            self._since_s = now_s

    def waiting(self, some: bool, now_s: float) -> None:
        """Whether requests wait from now on."""
        if not some:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s

    def wait_s(self, ahead: int, now_s: float) -> float | None:
        """Seconds until a request with `ahead` others before it starts; None: too few starts to tell."""
        if len(self._took_s) < STARTS_NEEDED:
            return None
        idle_s = 0.0 if self._since_s is None else now_s - self._since_s
        return ahead * (sum(self._took_s) + idle_s) / len(self._took_s)

    def retry_after_s(self, ahead: int, now_s: float) -> int:
        """Retry-After for a rejected client: when those ahead of it will have started."""
        wait_s = self.wait_s(ahead, now_s)
        return round(min(max(wait_s or 0.0, RETRY_AT_LEAST_S), RETRY_AT_MOST_S))
