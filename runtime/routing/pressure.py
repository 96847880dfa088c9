"""Says whether a fleet is pressed: whether requests have to wait until there is room for them."""

from __future__ import annotations

WINDOW = 300
"""Requests over which the share of those that waited is averaged."""
HIGH, LOW = 0.5, 0.1
"""Pressure begins once more than the first share waited, and ends once less than the second did."""


class Pressure:
    """The share of the latest requests that found others waiting when they arrived.

    Attributes
    ----------
    share : exponentially weighted, over about WINDOW requests
    high : whether there is pressure
    """

    def __init__(self) -> None:
        self.share, self.high = 0.0, False

    def arrived(self, waits: bool) -> None:
        """A request arrives; `waits` says whether others do."""
        self.share += (waits - self.share) * 2 / (WINDOW + 1)
        self.high = self.share > (LOW if self.high else HIGH)
