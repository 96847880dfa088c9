"""Columns of the configuration LP: groups of GPUs in a role, each worth the capacity of its best plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hexgen2.region import Point, Region
from hexgen2.search.bounds.upper_bounds import node_rates
from hexgen2.search.planning.classes import LARGE, NodeClasses, Pattern, widest_span
from hexgen2.search.planning.plan import Planner
from hexgen2.search.problem import NodeCounts, Problem
from hexgen2.search.ties import exceeds


@dataclass(frozen=True)
class Column:
    """A pattern of GPUs in a role, with the capacity of its best plan in requests/s; and what it can do for
    others, if it may work for them (colocated groups).

    most_sent, most_received : requests/s whose KV caches can leave and reach a group
    planned : whether it is worth that by its best plan; otherwise no plan is worth more
    limit_req_s : requests/s that no plan is worth more than
    """

    role: str
    pattern: Pattern
    capacity_req_s: float
    region: Region | None = None
    most_sent: float = math.inf
    most_received: float = math.inf
    planned: bool = True
    limit_req_s: float = math.inf

    def with_capacity(self, req_s: float, region: Region | None) -> Column:
        """The column with this capacity, as far as KV caches can leave or reach it, and this region."""
        carried = {"prefill": self.most_sent, "decode": self.most_received}.get(self.role, math.inf)
        return replace(self, capacity_req_s=min(req_s, carried), region=region)

    @cached_property
    def alone(self) -> Column:
        """The column without what its groups could do for others."""
        return self if self.region is None else self.worth(1.0)

    def worth(self, share: float) -> Column:
        """The column with this share of its capacity, and without what its groups could do for others."""
        # Not by `replace`, which takes five times as long: there are thousands.
        rest = self.most_sent, self.most_received, self.planned, self.limit_req_s
        return Column(self.role, self.pattern, share * self.capacity_req_s, None, *rest)

    @cached_property
    def corners(self) -> tuple[Point, ...]:
        """The corners of what its groups can do, in prompts/s and answers/s, with what they send and
        receive."""
        corners = self.region.corners if self.region else ()
        for most, sign in ((self.most_sent, 1.0), (self.most_received, -1.0)):
            if corners and most < math.inf:
                corners = cut(corners, most, sign)
        return corners

    @cached_property
    def gpus(self) -> tuple[tuple[int, int], ...]:
        """(node class, GPUs of that class in total) for each class in the pattern."""
        used: dict[int, int] = {}
        for which, count in self.pattern:
            used[which] = used.get(which, 0) + count
        return tuple(used.items())


def cut(corners: Sequence[Point], most: float, sign: float) -> tuple[Point, ...]:
    """The corners of the part of a polygon, of these corners and (0, 0), where sign (p - d) is at most
    `most`."""
    ring = [(0.0, 0.0), *corners]
    kept: list[Point] = []
    for (p, d), (q, e) in zip(ring, [*ring[1:], ring[0]], strict=True):
        here, there = sign * (p - d) - most, sign * (q - e) - most
        if here <= 0:
            kept.append((p, d))
        if here * there < 0:
            at = here / (here - there)
            kept.append((p + at * (q - p), d + at * (e - d)))
    return tuple(corner for corner in kept if corner != (0.0, 0.0))


class _KvLimits:
    """How many requests/s a group can send and receive at most: what the network cards of its nodes carry,
    and what the GPUs beside it on these nodes could do if each worked alone at its best; of the nodes of a
    class, those with the fastest card and the most GPUs count."""

    def __init__(self, problem: Problem, classes: NodeClasses) -> None:
        kv_bytes = problem.costs.kv_bytes_per_layer * problem.model.layers
        shared = problem.links == "shared" and kv_bytes > 0
        cards = (problem.cluster.card_bytes_s / kv_bytes).tolist() if shared else []
        self._cards = [max(cards[node] for node in nodes) for nodes in classes.nodes] if shared else []
        rates = node_rates(problem)
        self._rates, self._sizes = [rates[nodes[0]] for nodes in classes.nodes], classes.node_size

    def most(self, pattern: Pattern) -> tuple[float, float]:
        """Requests/s sent and received."""
        if not self._cards:
            return math.inf, math.inf
        sent = received = 0.0
        for which, count in pattern:
            beside = self._sizes[which] - count
            prefill, decode = self._rates[which]
            sent += self._cards[which] + beside * decode
            received += self._cards[which] + beside * prefill
        return sent, received


def list_columns(
    planner: Planner,
    problem: Problem,
    classes: NodeClasses,
    stop: Callable[[float], bool],
    over: Callable[[], bool] = lambda: False,
) -> tuple[list[Column], bool]:
    """All patterns of up to `widest_span` nodes in which the model fits, in every role that groups may have;
    and whether these are all, or it was time to stop. Those on several nodes are worth what no plan exceeds.

    Parameters
    ----------
    stop : whether to stop after this share of all patterns, with some at least
    over : whether to stop with none
    """
    columns, roles, limits = list[Column](), problem.roles, _KvLimits(problem, classes)
    patterns: list[Pattern] = []
    for nodes in range(1, widest_span(problem) + 1):
        here = list(classes.patterns(nodes))
        if len(problem.usable) > LARGE:  # If there is no time for all, some of every kind are best.
            here = [here[k] for k in np.random.default_rng(0).permutation(len(here)).tolist()]
        patterns += here
    groups = [classes.counts(pattern) for pattern in patterns]
    planner.look_ahead(roles, groups, lambda listed: over() or (listed > 0 and stop(listed)), shared=True)
    complete = True
    for pattern, counts in zip(patterns, groups, strict=True):
        if not all(planner.looked_at(role, counts) for role in roles):
            complete = False
            continue
        for role in roles:
            limit = planner.limit(role, counts)
            if limit is None:
                continue
            sent, received = limits.most(pattern)
            region = limit.region if problem.mixes else None
            column = Column(
                role, pattern, 0.0, None, sent, received, planned=False, limit_req_s=limit.req_s
            ).with_capacity(limit.req_s, region)
            columns.append(column)
    # On several nodes there are many, and few are worth it to be planned.
    for k, column in enumerate(columns):
        if len(column.pattern) == 1 and not over():
            columns[k] = with_its_plan(column, planner, problem, classes.counts(column.pattern))
    return columns, complete


def with_its_plan(column: Column, planner: Planner, problem: Problem, counts: NodeCounts) -> Column:
    """A column with what its best plan is worth on these GPUs: nothing if no plan meets the targets."""
    plan = planner.plan(column.role, counts)
    if plan is None:
        return replace(column, capacity_req_s=0.0, region=None, planned=True)
    mixes = column.role == "colocated" and problem.mixes
    region = planner.mixtures(plan).widest if mixes else None
    return replace(column.with_capacity(plan.capacity_req_s, region), planned=True)


def undominated(columns: Sequence[Column], stop: Callable[[], bool]) -> list[Column]:
    """The columns that are worth more than any division of their GPUs into two smaller columns (or more,
    taken off one by one), and once it is time to stop, all others. The division must use all the GPUs: an
    idle one would bring no KV cache in or out."""
    best: dict[tuple[str, Pattern], float] = {}
    able: dict[Pattern, Region] = {}
    kept = []
    for column in sorted(columns, key=lambda c: sum(n for _, n in c.pattern)):
        if stop():
            kept.append(column)
            continue
        if column.region is not None:
            together = [
                corner
                for part, rest in _divisions(column.pattern)
                if part in able and rest in able
                for corner in able[part].plus(able[rest]).corners
            ]
            # What no plan exceeds may be more than its parts only because nobody planned it yet.
            if column.planned or together:
                own = column.region.corners if column.planned else ()
                able[column.pattern] = Region.around([*own, *together])
            of_parts = Region.around(together) if together else None
            if of_parts is None or not all(map(of_parts.contains, column.region.corners)):
                kept.append(column)
            continue
        parts = max(
            (
                best[column.role, part] + best[column.role, rest]
                for part, rest in _divisions(column.pattern)
                if (column.role, part) in best and (column.role, rest) in best
            ),
            default=0.0,
        )
        best[column.role, column.pattern] = max(parts, column.capacity_req_s if column.planned else 0.0)
        if exceeds(column.capacity_req_s, parts):
            kept.append(column)
    return kept


def _divisions(pattern: Pattern) -> Iterator[tuple[Pattern, Pattern]]:
    """All divisions into some or all GPUs of one node, and the rest."""
    for k, (which, count) in enumerate(pattern):
        others = pattern[:k] + pattern[k + 1 :]
        for taken in range(1, count):
            yield ((which, taken),), tuple(sorted(((which, count - taken), *others)))
        if others:
            yield ((which, count),), others
