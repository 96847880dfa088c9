"""Simulated annealing over the first layer and the number of layers of every node, by the exact max flow.

Ranges are useful where others end: most moves keep to the boundaries at which ranges begin and end, or move a
boundary with all ranges at it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from cost_model.portable import log, power
from hexgen2.search.layer_ranges.instance import NOTHING, Instance, Range, Ranges
from hexgen2.search.layer_ranges.max_flow import FlowValue

HOTTEST, COLDEST = 0.05, 0.0005
"""Temperatures, as shares of the best value: a step that much worse is accepted with probability 1/e."""
CHECK = 64
"""Steps between two looks at the clock."""
WIDEST = 3
"""Layers by which a boundary moves at most."""


@dataclass
class Annealed:
    """The best ranges of a search, their tokens/s, and how many flows were solved."""

    ranges: Ranges
    tok_s: float
    evaluations: int


def anneal(
    value: FlowValue,
    instance: Instance,
    start: Ranges,
    seed: int,
    steps: int,
    enough: float,
    spent: Callable[[], float] = lambda: 0.0,
    hottest_share: float = 1.0,
) -> Annealed:
    """Anneal from `start`, cooling over so many steps, until `enough` tokens/s are reached.

    The same seed gives the same ranges unless time is short.

    Parameters
    ----------
    spent : the share of the time for it that has passed; it cools at least as fast, and ends at 1
    hottest_share : the first temperature, as a share of the usual one
    """
    moves = _Moves(instance, random.Random(seed))
    rng = moves.rng
    here, here_tok_s = list(start), value(start)
    best, best_tok_s, evaluations = list(here), here_tok_s, 1
    scale = max(here_tok_s, enough * 0.1)
    hottest = max(HOTTEST * hottest_share, COLDEST)
    temperature = hottest
    for step in range(steps):
        if step % CHECK == 0:
            passed = max(step / steps, spent())
            if passed >= 1 or best_tok_s >= enough:
                break
            temperature = hottest * power(COLDEST / hottest, passed)
        changed = moves.next(here)
        if changed is None:
            continue
        # The value that would be accepted is drawn first, so that a cheap bound can rule the step out.
        least = here_tok_s + temperature * scale * log(1.0 - rng.random())
        if value.covered(changed) < least:
            continue
        tok_s = value(changed)
        evaluations += 1
        if tok_s < least:
            continue
        here, here_tok_s = changed, tok_s
        if tok_s > best_tok_s * (1 + 1e-12):
            best, best_tok_s = list(changed), tok_s
            scale = max(scale, tok_s)
    return Annealed(tuple(best), best_tok_s, evaluations)


class _Moves:
    """Random neighbours of ranges. None where a draw leads to none."""

    def __init__(self, instance: Instance, rng: random.Random) -> None:
        self.rng = rng
        self._instance, self._layers = instance, instance.layers
        self._passes = instance.passes
        self._movable = [v for v in range(instance.nodes) if instance.most_layers[v]]
        kinds = (
            (self._to_boundaries, 26),
            (self._join, 16),
            (self._swap, 26),
            (self._shift_boundary, 16),
            (self._nudge, 8),
            (self._exchange_segments, 6),
            (self._anywhere, 2),
        )
        self._kinds = [kind for kind, weight in kinds for _ in range(weight)]

    def next(self, ranges: list[Range]) -> list[Range] | None:
        """Changed ranges that all fit, or None."""
        return self._kinds[int(self.rng.random() * len(self._kinds))](ranges)

    def _pick(self, items):
        return items[int(self.rng.random() * len(items))]

    def _with(self, ranges: list[Range], node: int, held: Range) -> list[Range] | None:
        if held == ranges[node] or held not in self._passes[node]:
            return None
        changed = list(ranges)
        changed[node] = held
        return changed

    def _boundaries(self, ranges: list[Range]) -> list[int]:
        return sorted({0, self._layers, *(s for s, _ in ranges), *(e for _, e in ranges)})

    def _to_boundaries(self, ranges: list[Range]) -> list[Range] | None:
        """A node takes the layers between two boundaries that it can hold."""
        node = self._pick(self._movable)
        first = self._pick(self._boundaries(ranges))
        most = self._instance.most_layers[node]
        ends = [b for b in self._boundaries(ranges) if first < b <= first + most]
        return self._with(ranges, node, (first, self._pick(ends))) if ends else None

    def _join(self, ranges: list[Range]) -> list[Range] | None:
        """A node takes the range of another."""
        return self._with(ranges, self._pick(self._movable), self._pick(ranges))

    def _swap(self, ranges: list[Range]) -> list[Range] | None:
        """Two nodes take each other's range."""
        a, b = self._pick(self._movable), self._pick(self._movable)
        if ranges[a] == ranges[b] or ranges[b] not in self._passes[a] or ranges[a] not in self._passes[b]:
            return None
        changed = list(ranges)
        changed[a], changed[b] = ranges[b], ranges[a]
        return changed

    def _shift_boundary(self, ranges: list[Range]) -> list[Range] | None:
        """All ranges that begin or end at a boundary do so some layers earlier or later."""
        node = self._pick(self._movable)
        at = self._pick(ranges[node])
        by = (1 + int(self.rng.random() * WIDEST)) * (1 if self.rng.random() < 0.5 else -1)
        if not 0 < at < self._layers or not 0 < at + by < self._layers:
            return None
        changed = list(ranges)
        for v, (first, end) in enumerate(ranges):
            if first == at or end == at:
                held = (first + by * (first == at), end + by * (end == at))
                if held not in self._passes[v]:
                    return None
                changed[v] = held
        return changed

    def _nudge(self, ranges: list[Range]) -> list[Range] | None:
        """One end of one range moves by a layer."""
        node = self._pick(self._movable)
        first, end = ranges[node]
        by = 1 if self.rng.random() < 0.5 else -1
        return self._with(ranges, node, (first + by, end) if self.rng.random() < 0.5 else (first, end + by))

    def _exchange_segments(self, ranges: list[Range]) -> list[Range] | None:
        """The layers between two pairs of neighbouring boundaries exchange places, with all their nodes."""
        boundaries = self._boundaries(ranges)
        if len(boundaries) < 3:
            return None
        i = int(self.rng.random() * (len(boundaries) - 2))
        k = i + 2 + int(self.rng.random() * min(4, len(boundaries) - 2 - i))
        k = min(k, len(boundaries) - 1)
        j = i + 1 + int(self.rng.random() * (k - i - 1))
        low, middle, high = boundaries[i], boundaries[j], boundaries[k]
        changed = list(ranges)
        for v, (first, end) in enumerate(ranges):
            if low <= first and end <= middle:
                changed[v] = (first + high - middle, end + high - middle)
            elif middle <= first and end <= high:
                changed[v] = (first - middle + low, end - middle + low)
            elif (
                first < high and end > low and (first, end) != NOTHING and not (first <= low and end >= high)
            ):
                return None
            if changed[v] not in self._passes[v]:
                return None
        return changed

    def _anywhere(self, ranges: list[Range]) -> list[Range] | None:
        """A node takes any layers that it can hold."""
        node = self._pick(self._movable)
        count = 1 + int(self.rng.random() * self._instance.most_layers[node])
        first = int(self.rng.random() * (self._layers - count + 1))
        return self._with(ranges, node, (first, first + count))
