"""When silence of a process elsewhere means that it is gone: the one rule, for workers and for peers."""

from __future__ import annotations

PING_EVERY_S = 0.6
PERIODS = 4  # without a sign of life: what freezes is found 2.4 to 2.5 s later, on a machine that keeps up
LOOKS_A_PERIOD = 5


class Patience:
    """Counts how long nothing was heard, in time in which this process itself was there to hear it.

    Whoever waits looks LOOKS_A_PERIOD times while it pings once, and each look counts as much, however late
    it comes: an event loop that is held up for x extends the deadline by x, be it once for long or each time
    for a little, as on a machine with more to do than it can. Thus its own delays are never taken for those
    of the other side. That the other one is held up shows nowhere but in its silence.
    """

    def __init__(self) -> None:
        self._heard: int | None = None
        self._looks = 0

    def is_over(self, heard: int) -> bool:
        """One more look; `heard` counts all that ever came."""
        self._looks = self._looks + 1 if heard == self._heard else 0
        self._heard = heard
        return self._looks >= PERIODS * LOOKS_A_PERIOD
