"""Leases: how long a decode replica keeps blocks reserved for a KV cache that does not arrive."""

from __future__ import annotations

import time
from collections.abc import Iterator


class Leases:
    """The leases of requests that wait for their KV cache; all have the same length.

    Parameters
    ----------
    lease_s : length of a lease, in seconds
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._since_s: dict[str, float] = {}

    def begin(self, request_id: str) -> None:
        """Start or restart a request's lease."""
        self._since_s.pop(request_id, None)
        self._since_s[request_id] = time.monotonic()

    def over(self) -> Iterator[str]:
        """Remove and yield the requests whose lease has expired."""
        limit_s = time.monotonic() - self.lease_s
        while self._since_s and next(iter(self._since_s.values())) <= limit_s:
            request_id = next(iter(self._since_s))
            del self._since_s[request_id]
            yield request_id

    def next_s(self) -> float | None:
        """Seconds until the next lease expires; None if there is none."""
        if not self._since_s:
            return None
        return max(0.0, next(iter(self._since_s.values())) + self.lease_s - time.monotonic())
