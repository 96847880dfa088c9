"""How long blocks are kept for KV caches that do not come."""

from __future__ import annotations

import time
from collections.abc import Iterator


class Leases:
    """Requests that something is expected for, each for the same time.

    Parameters
    ----------
    lease_s : how long
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._since_s: dict[str, float] = {}

    def begin(self, request_id: str) -> None:
        """A request's time begins, or begins anew."""
        self._since_s.pop(request_id, None)
        self._since_s[request_id] = time.monotonic()

    def over(self) -> Iterator[str]:
        """Requests whose time is over, each once."""
        limit_s = time.monotonic() - self.lease_s
        while self._since_s and next(iter(self._since_s.values())) <= limit_s:
            request_id = next(iter(self._since_s))
            del self._since_s[request_id]
            yield request_id

    def next_s(self) -> float | None:
        """Seconds until the first time is over; None if there is none."""
        if not self._since_s:
            return None
        return max(0.0, next(iter(self._since_s.values())) + self.lease_s - time.monotonic())
