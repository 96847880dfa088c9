"""Rounding of the configuration LP to whole groups, laid out on nodes: a start for the search.

All whole groups of the linear program are fixed at once. Then one group at a time: of the column of which the
program, solved again, takes most. If no node has room for it, all columns without room are left out. (In
integer programming this is a diving heuristic; Berthold, Primal Heuristics for Mixed Integer Programs, 2006.)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence

import numpy as np

from hexgen2.search.bounds.columns import Column
from hexgen2.search.bounds.configuration_lp import ConfigurationLP, RelaxedGroups
from hexgen2.search.planning.classes import NodeClasses
from hexgen2.search.problem import Group, NodeCounts, Solution, counts_of
from hexgen2.search.ties import first_largest, greatest, least

ROUNDING = 1e-6
_SIGN = {"prefill": 1, "decode": -1, "colocated": 0}
"""Of a group's capacity in the surplus of prefill over decode."""


def rounded(
    lp: ConfigurationLP,
    classes: NodeClasses,
    columns: Sequence[Column],
    budget: float = math.inf,
    pair_roles: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Solution:
    """The solution that rounding the linear program gives; empty if there are no columns.

    Parameters
    ----------
    budget : US dollars per hour for the GPUs in use
    pair_roles : see Layout
    stop : whether it is time to do with what is laid out so far
    """
    program = lp.relaxed_groups(columns, budget)
    program.break_ties(columns)
    prices = [lp.price_of(column) for column in columns] if budget < math.inf else []
    return fill_up(
        program, columns, Layout(classes, pair_roles), np.zeros(len(columns)), prices, budget, stop
    )


def fill_up(
    program: RelaxedGroups,
    columns: Sequence[Column],
    layout: Layout,
    placed: np.ndarray,
    prices: Sequence[float] = (),
    budget: float = math.inf,
    stop: Callable[[], bool] = lambda: False,
) -> Solution:
    """The groups of a layout, and those that rounding the program adds; none if it has no solution.

    Parameters
    ----------
    placed : [columns] groups of each that are laid out; then those of the solution
    prices : of a group of each column, US dollars per hour; not needed without a budget
    """
    spent, reached, left = 0.0, False, set(range(len(columns)))
    while len(columns):
        relaxed = program.solve()
        ahead, reached = relaxed.amounts - placed, reached or relaxed.value > 0
        if ahead.max() <= ROUNDING:
            break
        # All whole groups at once the first time, then the one that is most nearly whole.
        whole = np.floor(ahead + ROUNDING).astype(int)
        if not whole.any():
            whole[first_largest(ahead)] = 1
        for k in _largest_first(columns, whole):
            price = prices[k] if budget < math.inf else 0.0
            for _ in range(whole[k]):
                if spent + price > budget * (1 + ROUNDING):
                    program.at_most(k, int(placed[k]))
                    break
                if not layout.place(columns[k]):
                    for full in [each for each in left if not layout.has_room(columns[each])]:
                        program.at_most(full, int(placed[full]))
                        left.remove(full)
                    break
                placed[k] += 1
                spent += price
            program.at_least(k, int(placed[k]))
        if stop():
            break
    return layout.solution if reached else Solution()


def lay_out(classes: NodeClasses, columns: Sequence[Column], amounts: np.ndarray) -> Solution:
    """So many groups of each column (amounts [columns], rounded) on nodes: the largest first, as far as there
    is room."""
    layout = Layout(classes)
    whole = np.round(amounts).astype(int)
    for k in _largest_first(columns, whole):
        for _ in range(whole[k]):
            layout.place(columns[k])
    return layout.solution


def _largest_first(columns: Sequence[Column], amounts: np.ndarray) -> list[int]:
    """The columns whose amount is not 0, those of most GPUs first."""
    return sorted(np.flatnonzero(amounts).tolist(), key=lambda k: -sum(n for _, n in columns[k].pattern))


class Layout:
    """Nodes that are being filled with groups. With pair_roles, a group goes where the other role has most
    capacity to spare, behind the same uplink and in the same node, so that KV caches need not leave them.
    Nodes are alike otherwise, and taken in an order [nodes]."""

    def __init__(
        self, classes: NodeClasses, pair_roles: bool = False, order: Sequence[int] | None = None
    ) -> None:
        self._classes, self._pair_roles = classes, pair_roles
        self._order = range(len(classes.class_of)) if order is None else order
        self._free = [len(gpus) for gpus in classes.problem.node_gpus]
        # Of prefill capacity over decode capacity, requests/s: of nodes, and of what is behind uplinks.
        self._surplus = [0.0] * len(self._free)
        self._behind = [0.0] * len(classes.problem.cluster.uplinks)
        self._uplinks: list[list[int]] = [[] for _ in self._free]
        for k, uplink in enumerate(classes.problem.cluster.uplinks):
            for node in uplink.nodes:
                self._uplinks[node].append(k)
        self._groups: list[Group] = []
        self._room_by_class: dict[int, list[int]] = {}

    @property
    def solution(self) -> Solution:
        """The groups placed so far."""
        return Solution(tuple(self._groups))

    def place(self, column: Column) -> bool:
        """Put a group of the column on the nodes that it fills most nearly (if it needs several: on nodes
        joined by the fastest links); False if there is no room."""
        counts = self._room(column)
        if counts is None:
            return False
        self.put(column, counts)
        return True

    def put(self, column: Column, counts: NodeCounts) -> None:
        """Put a group of the column on these nodes, where there is room."""
        sign = _SIGN[column.role]
        for node, count in counts:
            self._free[node] -= count
            self._room_by_class.pop(self._classes.class_of[node], None)
            surplus = sign * column.capacity_req_s / len(counts)
            self._surplus[node] += surplus
            for uplink in self._uplinks[node]:
                self._behind[uplink] += surplus
        self._groups.append(Group(column.role, counts))

    def has_room(self, column: Column) -> bool:
        """Whether there are nodes with room for a group of the column."""
        wanted: dict[int, list[int]] = {}
        for which, count in column.pattern:
            wanted.setdefault(which, []).append(count)
        for which, counts in wanted.items():
            if which not in self._room_by_class:
                free = (self._free[node] for node in self._classes.nodes[which])
                self._room_by_class[which] = sorted(free, reverse=True)
            free_counts = self._room_by_class[which]
            if any(map(operator.gt, sorted(counts, reverse=True), free_counts)):
                return False
        return True

    def _room(self, column: Column) -> NodeCounts | None:
        """GPUs for a group of the column on nodes with room for it; None if there are none."""
        links = self._classes.problem.node_links
        sign = _SIGN[column.role] if self._pair_roles else 0
        taken: list[int] = []
        for which, count in sorted(column.pattern, key=lambda part: -part[1]):
            free = [n for n in self._classes.nodes[which] if self._free[n] >= count and n not in taken]
            if not free:
                return None
            slowest = {n: min((links[n][m].bandwidth_bytes_s for m in taken), default=0.0) for n in free}
            near = greatest(free, slowest.__getitem__)
            if sign:
                near = least(near, lambda n: sign * math.fsum(self._behind[k] for k in self._uplinks[n]))
                near = least(near, lambda n: sign * self._surplus[n])
            taken.append(min(near, key=lambda n: (self._free[n], self._order[n])))
        ordered = sorted(column.pattern, key=lambda part: -part[1])
        return counts_of({node: count for node, (_, count) in zip(taken, ordered, strict=True)})
