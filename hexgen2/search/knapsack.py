"""The best division of both phases between replicas that can do both, where KV caches move freely.

A fractional knapsack: everyone decodes, and those prefill first that give up the fewest answers for each
prompt (comparative advantage), so that at most one replica is anywhere but in a corner of its region.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hexgen2.region import Point, Region
from hexgen2.search.ties import greatest_first


def best_points(prefill: float, decode: float, regions: Sequence[Region]) -> list[Point]:
    """The points in these regions with which, beside so many prompts/s and answers/s of others, the most
    requests are served if KV caches move freely: min of all prompts/s and all answers/s."""
    at = [region.corners[0] for region in regions]
    prompts = math.fsum((prefill, *(p for p, _ in at)))
    answers = math.fsum((decode, *(d for _, d in at)))
    sides = [(k, side) for k, region in enumerate(regions) for side in region.sides]
    for k, (_, dp, dd) in greatest_first(sides, lambda numbered: numbered[1][0]):
        if prompts >= answers:
            break
        share = min(1.0, (answers - prompts) / (dp + dd))
        at[k] = at[k][0] + share * dp, at[k][1] - share * dd
        prompts += share * dp
        answers -= share * dd
        if share < 1:
            break
    return at


def most_served(prefill: float, decode: float, regions: Sequence[Region]) -> tuple[float, float]:
    """The requests/s of `best_points`, and what a prompt is worth at that optimum: whatever the points,
    served is at most worth * prompts + (1 - worth) * answers."""
    prompts, answers = prefill, decode + math.fsum(region.corners[0][1] for region in regions)
    worth = 0.0
    for gained, dp, dd in sorted((side for region in regions for side in region.sides), reverse=True):
        if prompts >= answers:
            break
        share = min(1.0, (answers - prompts) / (dp + dd))
        prompts += share * dp
        answers -= share * dd
        worth = 1 - gained
        if share < 1:
            return min(prompts, answers), worth
    return (answers, worth) if prompts >= answers else (prompts, 1.0)


def served(prefill: float, decode: float, points: Sequence[Point]) -> float:
    """Requests/s with these points, beside so many prompts/s and answers/s, if KV caches move freely."""
    return min(math.fsum((prefill, *(p for p, _ in points))), math.fsum((decode, *(d for _, d in points))))
