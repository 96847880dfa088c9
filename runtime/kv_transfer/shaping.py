"""Emulated links: no faster than so many bytes a second, and each message a latency late."""

from __future__ import annotations

import time


class Shaper:
    """The link of one sender and one receiver.

    A message is on its way from when it was ready: latencies of messages in line pass together, their bytes
    one after the other. An idle link saves nothing up.

    Parameters
    ----------
    bandwidth_bytes_s : 0 for no limit
    """

    def __init__(self, bandwidth_bytes_s: float = 0.0, latency_s: float = 0.0) -> None:
        self.bandwidth_bytes_s, self.latency_s = bandwidth_bytes_s, latency_s
        self._free_s = 0.0

    def pass_through(self, size_bytes: int, ready_s: float) -> None:
        """Wait until the last byte of a message would have arrived, ready at `ready_s` (time.monotonic)."""
        start_s = max(self._free_s, ready_s)
        self._free_s = start_s + (size_bytes / self.bandwidth_bytes_s if self.bandwidth_bytes_s else 0.0)
        delay_s = self._free_s + self.latency_s - time.monotonic()
        if delay_s > 0:
            time.sleep(delay_s)
