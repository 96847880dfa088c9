"""Limits the work that each peer may cause, with a token bucket per peer: a flood delays only its sender."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class _Bucket:
    tokens: float
    at_s: float


class Allowance:
    """Allows each peer `burst` units of work at once, and `rate_s` more per second.

    Parameters
    ----------
    now : clock, in seconds
    """

    def __init__(self, rate_s: float, burst: float, now: Callable[[], float] = time.monotonic) -> None:
        self._rate_s, self._burst, self._now = rate_s, burst, now
        self._buckets: dict[str, _Bucket] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, peer_id: str, amount: float) -> float:
        """Charge a peer for work; returns for how many seconds it must now wait."""
        bucket = self._buckets.setdefault(peer_id, _Bucket(self._burst, self._now()))
        bucket.tokens, bucket.at_s = self._tokens(bucket) - amount, self._now()
        return max(-bucket.tokens / self._rate_s, 0.0)

    def forget(self) -> None:
        """Drop the buckets that are full again; peers that have disconnected keep their debts."""
        self._buckets = {
            peer_id: bucket for peer_id, bucket in self._buckets.items() if self._tokens(bucket) < self._burst
        }

    def _tokens(self, bucket: _Bucket) -> float:
        return min(bucket.tokens + (self._now() - bucket.at_s) * self._rate_s, self._burst)
