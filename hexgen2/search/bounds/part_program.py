"""The part program: which groups to form on a few nodes, by an integer program that knows where KV caches go.

It has a variable for each group that may stand on these nodes, with its plan: z, whether it is there, and f,
the requests/s that it prefills or decodes. Where the configuration LP (configuration_lp.py) lets KV caches be
routed at will between classes of nodes, here a share of each request's layers leaves every node on which a
prefill group holds them, and reaches every node on which a decode group does:

    max the answers/s of all groups   with   f <= capacity z,
                   sum of GPUs z <= GPUs of each node,
                   sum over b of y[a, b] = sum of (share of layers on a) f over prefill groups,
                   sum over a of y[a, b] = sum of (share of layers on b) f over decode groups,
                   y <= what links and network cards carry.

A colocated group that may work for others has a variable for each corner of its region, together at most z,
and one for the requests that it keeps: those are neither sent nor received.

Which layers they are is left out, and so are other parts of the cluster. So its solutions are starts for the
search, not bounds."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hexgen2.region import Point
from hexgen2.search.bounds.columns import Column
from hexgen2.search.bounds.dives import dive
from hexgen2.search.linear_program import LinearProgram, solve_whole
from hexgen2.search.partition.parts import bandwidth_between
from hexgen2.search.planning.classes import NodeClasses, Pattern
from hexgen2.search.planning.plan import Planner
from hexgen2.search.problem import Group, NodeCounts, Problem, Solution, counts_of
from hexgen2.search.sparse_rows import SparseRows
from hexgen2.search.ties import first_largest, greatest_first

MOST = 1200
"""Candidates in a linear program, about."""
ALL_WAYS = 100
"""Of more ways to put a group on nodes, those are candidates in which nodes are near each other."""
TIE = 0.005
"""So much less is a request worth whose prompt or answer a colocated group computes for others: where there
are very many groups, they are taken to work for themselves."""
CLOSE, BRANCHES, LONGEST_S = 0.005, 200, 20.0
"""The integer program ends at this gap, after so many branches, or (should they take too long) seconds."""
FEWEST_S = 0.25
"""With fewer seconds, it is not begun."""


@dataclass(frozen=True)
class Candidate:
    """A group that may be formed: about what it can do in requests/s, and on which nodes its layers are.

    corners : of what a colocated group can do, in prompts/s and answers/s; for itself alone if there is one
    shares : (node, share of the layers)
    """

    group: Group
    capacity_req_s: float
    corners: tuple[Point, ...]
    shares: tuple[tuple[int, float], ...]


def candidates(
    columns: Sequence[Column],
    classes: NodeClasses,
    planner: Planner,
    stop: Callable[[], bool] = lambda: False,
) -> list[Candidate]:
    """Groups of these columns on nodes of these classes: in all ways, or on nodes near each other where there
    are too many; once there are MOST, of the first columns alone. One group of each column is planned; others
    are taken to be as far from what their plans cannot exceed, and to divide their layers likewise."""
    problem, ways = planner.problem, list[tuple[Column, list[tuple[int, ...]]]]()
    placed = _Placed(classes)
    for column in columns:
        if sum(len(here) for _, here in ways) >= MOST or stop():
            break
        ways.append((column, placed.ways(column.pattern)))
    for role in problem.roles:
        groups = [_counts(column, nodes) for column, here in ways if column.role == role for nodes in here]
        planner.look_ahead([role], groups, lambda share: stop())
    found: list[Candidate] = []
    for column, here in ways:
        if stop():
            break
        limits = {nodes: planner.limit(column.role, _counts(column, nodes)) for nodes in here}
        able = [(nodes, limit) for nodes, limit in limits.items() if limit is not None and limit.req_s > 0]
        ranked = greatest_first(able, lambda each: each[1].req_s)
        plan = planner.plan(column.role, _counts(column, ranked[0][0])) if ranked else None
        if plan is None:
            continue
        held: Counter[int] = Counter()
        for stage in plan.stages:
            held[stage.node] += stage.layers
        shares = [held[node] / problem.model.layers for node in ranked[0][0]]
        reached = plan.capacity_req_s / ranked[0][1].req_s
        for nodes, limit in ranked:
            capacity, corners = limit.req_s * reached, tuple[Point, ...]()
            if column.role == "colocated":
                corners = limit.region.times(reached).corners if limit.region else ((capacity, capacity),)
            on = tuple(sorted((node, share) for node, share in zip(nodes, shares, strict=True) if share))
            found.append(Candidate(Group(column.role, _counts(column, nodes)), capacity, corners, on))
    return found


def _counts(column: Column, nodes: Sequence[int]) -> NodeCounts:
    """The group of a column whose parts are on these nodes."""
    return counts_of({node: count for node, (_, count) in zip(nodes, column.pattern, strict=True)})


class _Placed:
    """The ways to put patterns on nodes of their classes."""

    def __init__(self, classes: NodeClasses) -> None:
        self._nodes, self._sizes = classes.nodes, [len(gpus) for gpus in classes.problem.node_gpus]
        self._problem = classes.problem

    @cached_property
    def _near(self) -> np.ndarray:
        return bandwidth_between(self._problem)

    def ways(self, pattern: Pattern) -> list[tuple[int, ...]]:
        """The nodes of each part of the pattern, in all ways; if these are more than ALL_WAYS, around each
        node those that are nearest."""
        room = [[n for n in self._nodes[which] if self._sizes[n] >= count] for which, count in pattern]
        if math.prod(map(len, room)) <= ALL_WAYS:
            all_ways = (nodes for nodes in itertools.product(*room) if len(set(nodes)) == len(nodes))
        else:
            around = ((part, node) for part in range(len(pattern)) for node in room[part])
            all_ways = (near for part, node in around if (near := self._nearest(room, part, node)))
        # Parts alike may be in any order.
        return list({tuple(sorted(zip(pattern, nodes, strict=True))): nodes for nodes in all_ways}.values())

    def _nearest(self, room: Sequence[Sequence[int]], part: int, node: int) -> tuple[int, ...]:
        """A node for each part, this one for this part, each the nearest to those before it; none if there is
        no room."""
        taken, left, slowest = {part: node}, set(range(len(room))) - {part}, self._near[node]
        while left:
            free = {k: [n for n in room[k] if n not in taken.values()] for k in sorted(left)}
            if not all(free.values()):
                return ()
            pairs = [(k, n) for k, here in free.items() for n in here]
            speeds = slowest[[n for _, n in pairs]]
            k, n = pairs[first_largest(speeds)]
            taken[k] = n
            left.remove(k)
            slowest = np.minimum(slowest, self._near[n])
        return tuple(taken[k] for k in range(len(room)))


class PartProgram:
    """The program over these candidates on these nodes of a problem."""

    def __init__(self, problem: Problem, nodes: Sequence[int], groups: Sequence[Candidate]) -> None:
        self._groups = groups
        self._limits: list[tuple[float, float]] = []
        self._entries: list[tuple[int, int, float]] = []
        self._gain: list[float] = [0.0] * len(groups)
        shared = problem.links == "shared"
        self._kv_bytes = problem.costs.kv_bytes_per_layer * problem.model.layers if shared else 0.0
        self._gpu_row = {node: self._row(0.0, len(problem.node_gpus[node])) for node in nodes}
        self._out, self._into = ({node: self._row(0.0, 0.0) for node in nodes} for _ in range(2))
        self._lay_moves(problem, nodes)
        for k, candidate in enumerate(groups):
            self._lay(k, candidate)

    def _row(self, low: float, high: float) -> int:
        self._limits.append((low, high))
        return len(self._limits) - 1

    def _variable(self, gain: float, entries: Sequence[tuple[int, float]]) -> int:
        self._gain.append(gain)
        number = len(self._gain) - 1
        self._entries += [(row, number, amount) for row, amount in entries]
        return number

    def _lay_moves(self, problem: Problem, nodes: Sequence[int]) -> None:
        """The variables y."""
        if not self._kv_bytes:
            total = self._row(0.0, 0.0)
            for node in nodes:
                self._variable(0.0, [(self._out[node], 1.0), (total, 1.0)])
                self._variable(0.0, [(self._into[node], 1.0), (total, -1.0)])
            return
        cards = problem.cluster.card_bytes_s
        size = len(problem.node_gpus)
        links = problem.shared_links.capacity_bytes_s
        sends, takes = (
            {node: self._row(0.0, float(cards[node]) / self._kv_bytes) for node in nodes} for _ in range(2)
        )
        for a, b in itertools.product(nodes, repeat=2):
            ends = [(self._out[a], 1.0), (self._into[b], 1.0)]
            if a != b:
                link = self._row(0.0, float(links[a * size + b]) / self._kv_bytes)
                ends += [(sends[a], 1.0), (takes[b], 1.0), (link, 1.0)]
            self._variable(0.0, ends)

    def _lay(self, k: int, candidate: Candidate) -> None:
        """The variables of a candidate."""
        here = self._row(-np.inf, 0.0)
        self._entries += [(self._gpu_row[node], k, float(n)) for node, n in candidate.group.counts]
        out = [(self._out[node], -share) for node, share in candidate.shares]
        into = [(self._into[node], -share) for node, share in candidate.shares]
        if candidate.corners:
            self._entries.append((here, k, -1.0))
            sent, received = self._row(0.0, np.inf), self._row(0.0, np.inf)
            for p, d in candidate.corners:
                moved = [(row, p * share) for row, share in out] + [(row, d * share) for row, share in into]
                gain = d - TIE * abs(p - d)
                self._variable(gain, [(here, 1.0), (sent, p), (received, d), *moved])
            kept = [(row, -share) for row, share in (*out, *into)]
            self._variable(0.0, [(sent, -1.0), (received, -1.0), *kept])
        else:
            self._entries.append((here, k, -candidate.capacity_req_s))
            prefills = candidate.group.role == "prefill"
            self._variable(0.0 if prefills else 1.0, [(here, 1.0), *(out if prefills else into)])

    def _arrays(self) -> tuple[np.ndarray, SparseRows, np.ndarray, np.ndarray]:
        """Gain [n], matrix [r, n], and the least and most of each row [r]."""
        row, column, value = np.array(self._entries).T
        size = (len(self._limits), len(self._gain))
        matrix = SparseRows.of(row.astype(int), column.astype(int), value, size)
        low, high = (np.array(limits) for limits in zip(*self._limits, strict=True))
        return np.array(self._gain), matrix, low, high

    def worth(self) -> list[float]:
        """What each candidate brings, at the duals of the linear program, beside what its GPUs cost: at most
        1, and 1 of those that the optimum has."""
        found = LinearProgram(*self._arrays()).solve()
        if found is None or not len(found.duals):
            return [0.0] * len(self._groups)
        price = {node: float(found.duals[row]) for node, row in self._gpu_row.items()}
        worth = []
        for candidate in self._groups:
            cost = sum(price[node] * n for node, n in candidate.group.counts)
            gain = self._gained(candidate, found.duals)
            worth.append(gain / cost if cost > 0 else 1.0)
        return worth

    def _gained(self, candidate: Candidate, duals: np.ndarray) -> float:
        """Answers/s that a group brings at these duals, its GPUs left aside."""
        out = sum(float(duals[self._out[node]]) * share for node, share in candidate.shares)
        into = sum(float(duals[self._into[node]]) * share for node, share in candidate.shares)
        if not candidate.corners:
            each = out if candidate.group.role == "prefill" else 1.0 + into
            return max(0.0, each) * candidate.capacity_req_s
        return max(
            p * out + d * (1.0 + into) - min(p, d) * min(0.0, out + into) for p, d in candidate.corners
        )

    def solve(self, time_s: float | None = None) -> Solution:
        """The groups of the best solution found (none, if there is none) within about so many seconds: in a
        short time, rounding the linear program (dives.py) finds better ones than the integer program."""
        most, arrays = {k: self._most(k) for k in range(len(self._groups))}, self._arrays()
        rounded, began = None, time.monotonic()
        if time_s is not None:
            gpus = {node: self._limits[row][1] for node, row in self._gpu_row.items()}
            rounded = dive(arrays, [each.group.counts for each in self._groups], gpus)
            time_s -= time.monotonic() - began
            if time_s < FEWEST_S:
                return self._formed(rounded[1])
        limit_s = LONGEST_S if time_s is None else time_s
        found = solve_whole(*arrays, most, CLOSE, BRANCHES, limit_s)
        if rounded is not None and rounded[0] >= found.value:
            return self._formed(rounded[1])
        return self._formed(found.x[: len(most)])

    def _formed(self, amounts: np.ndarray) -> Solution:
        """So many of each group [n], which are whole numbers but for rounding."""
        groups = zip(self._groups, np.round(amounts).astype(int).tolist(), strict=True)
        return Solution(tuple(each.group for each, amount in groups for _ in range(amount)))

    def _most(self, k: int) -> float:
        """How many groups of a candidate there is room for."""
        return min(self._limits[self._gpu_row[node]][1] // n for node, n in self._groups[k].group.counts)
