"""What a replica that runs both phases can do, for itself and for others.

What a mixed replica can do per second is a region of pairs: p prompts computed and d answers decoded. A chunk
of c prompts that rides on a decode step of b requests makes it longer by D seconds, so that each prompt takes
D / c and each answer what it takes alone, up to the pace at which every step has a chunk; from there on, time
goes to steps with prompts only. So the region is a polygon between (0, D) and (P, 0), and what two of its
points allow, a division of the time between them allows, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

Point = tuple[float, float]
"""Prompts/s and answers/s."""
ROUNDING = 1e-9
"""A corner that stands out by less than this share of its neighbours' differences is none."""


@dataclass(frozen=True)
class Region:
    """The corners of a convex polygon, from (0, D) to (P, 0), each with no fewer prompts and no more answers
    than the one before."""

    corners: tuple[Point, ...]

    @classmethod
    def around(cls, points: Sequence[Point]) -> Region:
        """The convex hull of points and of all that does less."""
        most = max(p for p, _ in points), max(d for _, d in points)
        hull: list[Point] = []
        for point in sorted({(0.0, most[1]), *points, (most[0], 0.0)}, key=lambda at: (at[0], -at[1])):
            while len(hull) > 1 and _below(hull[-2], hull[-1], point):
                hull.pop()
            hull.append(point)
        return cls(tuple(hull))

    @property
    def sound(self) -> bool:
        """Whether the corners are what they should be, but for rounding."""
        (first, most), (last, least) = self.corners[0], self.corners[-1]
        if first != 0 or least != 0 or most <= 0 or last <= 0:
            return False
        rises = all(q >= p and e <= d and (p, d) != (q, e) for (p, d), (q, e) in self._pairs)
        return rises and all(self.contains(corner, 1e-6) for corner in self.corners)

    @property
    def _pairs(self) -> Iterable[tuple[Point, Point]]:
        return itertools.pairwise(self.corners)

    @cached_property
    def sides(self) -> tuple[tuple[float, float, float], ...]:
        """Of each side, the prompts/s gained of all that changes along it (1 where no answer is given up),
        the prompts/s gained and the answers/s given up."""
        steps = [(q - p, d - e) for (p, d), (q, e) in self._pairs]
        return tuple((dp / (dp + dd), dp, dd) for dp, dd in steps)

    def worth(self, prompt: float) -> float:
        """The most that it can do if a prompt counts so much, and an answer the rest of 1."""
        answer = 1 - prompt
        return max(prompt * p + answer * d for p, d in self.corners)

    def times(self, factor: float) -> Region:
        """The region with all corners that many times as far out."""
        return Region(tuple((p * factor, d * factor) for p, d in self.corners))

    def plus(self, other: Region) -> Region:
        """What two replicas with these regions can do together."""
        sides = [
            (q - p, e - d)
            for region in (self, other)
            for (p, d), (q, e) in itertools.pairwise(region.corners)
        ]
        # The sides that give up the fewest answers for each prompt come first.
        sides.sort(key=lambda side: side[1] / side[0] if side[0] > 0 else -math.inf, reverse=True)
        corners = [(0.0, self.corners[0][1] + other.corners[0][1])]
        for prompts, answers in sides:
            corners.append((corners[-1][0] + prompts, max(0.0, corners[-1][1] + answers)))
        return Region.around(corners)

    def contains(self, point: Point, tolerance: float = 1e-9) -> bool:
        """Whether it can do so much."""
        return self.busy(*point) <= 1 + tolerance

    @property
    def balanced(self) -> float:
        """The most requests/s of which it does both phases."""
        return 1 / max(a + b for a, b in self.edges)

    @cached_property
    def edges(self) -> list[tuple[float, float]]:
        """(a, b) of each side: a p + b d <= 1 for all that is inside."""
        found = []
        for (p, d), (q, e) in zip(self.corners, self.corners[1:], strict=False):
            scale = d * (q - p) + p * (d - e)
            found.append(((d - e) / scale, (q - p) / scale))
        return found

    def busy(self, prompts: float, answers: float) -> float:
        """The share of what it can do that so many prompts/s and answers/s take; more than 1 is too much."""
        return max(a * prompts + b * answers for a, b in self.edges)


def _below(a: Point, b: Point, c: Point) -> bool:
    """Whether b is on or below the line from a to c, but for rounding."""
    rounding = ROUNDING * (c[0] - a[0]) * (a[1] - c[1])
    return (b[1] - a[1]) * (c[0] - a[0]) <= (c[1] - a[1]) * (b[0] - a[0]) + rounding
