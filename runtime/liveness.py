"""The one rule by which silence means that a process elsewhere is gone: for workers and for peers."""

from __future__ import annotations

PING_EVERY_S = 0.6
PERIODS = 4
"""Ping periods of silence: a frozen process is found after 2.4 to 2.5 s, on a machine that keeps up."""
LOOKS_A_PERIOD = 5


class SilenceTimer:
    """Measures how long nothing was heard, counting only time in which this process could have heard it.

    The caller looks LOOKS_A_PERIOD times per ping period, and each look counts the same however late it is.
    If this event loop is held up for x seconds, once or a little at each look, the deadline moves by x, so
    its own delays are never blamed on the other side. A delay of the other side shows only as silence.
    """

    def __init__(self) -> None:
        self._heard: int | None = None
        self._looks = 0

    def has_expired(self, heard: int) -> bool:
        """Look once more; `heard` counts everything that has ever arrived."""
        self._looks = self._looks + 1 if heard == self._heard else 0
        self._heard = heard
        return self._looks >= PERIODS * LOOKS_A_PERIOD
