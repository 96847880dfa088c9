"""A start from above: which groups, and how many of each, by linear programming.

A column is a pattern of GPUs (so many of one kind of node, or of two) in one role, worth the capacity
of its best plan. The LP picks multiples of columns that carry the largest flow with the GPUs there
are, KV transfers left aside; a dive rounds it, fixing the column that the LP is surest of and solving
again; then patterns are laid out on nodes. The refinement does the rest, with KV transfers counted.

Column generation and diving are textbook (Barnhart et al., Branch-and-Price, Operations Research 46,
1998); here the patterns are few enough to be listed at once.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from ortools.linear_solver import pywraplp  # type: ignore[attr-defined]

from hexgen2.search.evaluate import Evaluator
from hexgen2.search.market import ROUNDING, Market
from hexgen2.search.problem import Blocks, Group, Problem, Solution, blocks_of

MAX_PATTERN_GPUS = 12
"""Largest group that a pattern describes; refinement may grow it."""

Pattern = tuple[tuple[int, int], ...]
"""(kind of node, GPUs of one such node), one or two of them."""


@dataclass(frozen=True)
class Column:
    """A pattern in a role, and the requests/s of its best plan."""

    pattern: Pattern
    role: str
    capacity_req_s: float


def linear_start(
    evaluator: Evaluator, market: Market | None = None, nodes: Collection[int] | None = None
) -> Solution:
    """The solution that rounding the LP gives, within the market's budget and on these nodes (all, if
    None are given); empty if no pattern holds the model."""
    problem = evaluator.problem
    layout = _Layout(problem, nodes)
    chosen: list[Column] = []
    columns = list_columns(evaluator)
    while columns:
        left = market.budget_per_hour - market.price(Solution(tuple(layout.groups))) if market else math.inf
        column = _surest(columns, chosen, layout.free_by_kind(), layout.price_by_kind(), left)
        if column is None:
            break
        if layout.place(column):
            chosen.append(column)
        else:
            # GPUs enough in all, but not side by side any more.
            columns.remove(column)
    return Solution(tuple(layout.groups))


def list_columns(evaluator: Evaluator) -> list[Column]:
    """Every pattern of one or two nodes that holds the model, in both roles."""
    problem = evaluator.problem
    by_kind = _nodes_by_kind(problem)
    size = {kind: max(len(problem.node_gpus[n]) for n in nodes) for kind, nodes in by_kind.items()}
    patterns: list[tuple[Pattern, Blocks]] = []
    for kind, nodes in by_kind.items():
        patterns += [(((kind, c),), ((nodes[0], c),)) for c in range(1, size[kind] + 1)]
    for a, b in itertools.combinations_with_replacement(sorted(by_kind), 2):
        pair = _fastest_pair(problem, by_kind[a], by_kind[b])
        if pair is None:
            continue
        for c, d in itertools.product(range(1, size[a] + 1), range(1, size[b] + 1)):
            if c + d <= MAX_PATTERN_GPUS and not (a == b and c < d):
                patterns.append((((a, c), (b, d)), blocks_of({pair[0]: c, pair[1]: d})))
    columns = []
    for pattern, blocks in patterns:
        for role in ("prefill", "decode"):
            plan = evaluator.planner.plan(role, blocks)
            if plan:
                columns.append(Column(pattern, role, plan.capacity_req_s))
    return columns


def _surest(
    columns: list[Column], chosen: list[Column], free: Counter[int], price: dict[int, float], money: float
) -> Column | None:
    """The column to fix next: of the LP's solution with what is left, the one it takes most of."""
    cost = {column: sum(price[kind] * n for kind, n in column.pattern) for column in columns}
    fitting = [
        c
        for c in columns
        if all(free[kind] >= n for kind, n in _use(c.pattern).items()) and cost[c] <= money * (1 + ROUNDING)
    ]
    if not fitting:
        return None
    solver = pywraplp.Solver.CreateSolver("GLOP")
    flow = solver.NumVar(0, solver.infinity(), "flow")
    taken = [solver.NumVar(0, solver.infinity(), "") for _ in fitting]
    for role in ("prefill", "decode"):
        fixed = sum(c.capacity_req_s for c in chosen if c.role == role)
        limit = solver.Constraint(-solver.infinity(), fixed)
        limit.SetCoefficient(flow, 1)
        for variable, column in zip(taken, fitting, strict=True):
            if column.role == role:
                limit.SetCoefficient(variable, -column.capacity_req_s)
    for kind, count in free.items():
        room = solver.Constraint(0, count)
        for variable, column in zip(taken, fitting, strict=True):
            used = _use(column.pattern)[kind]
            if used:
                room.SetCoefficient(variable, used)
    if money < math.inf:
        spent = solver.Constraint(0, max(0.0, money))
        for variable, column in zip(taken, fitting, strict=True):
            spent.SetCoefficient(variable, cost[column])
    solver.Objective().SetCoefficient(flow, 1)
    solver.Objective().SetMaximization()
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return None
    fixed_flow = min(sum(c.capacity_req_s for c in chosen if c.role == r) for r in ("prefill", "decode"))
    if flow.solution_value() <= fixed_flow * (1 + 1e-9):
        return None
    amounts = [variable.solution_value() for variable in taken]
    best = max(range(len(fitting)), key=lambda k: (round(amounts[k], 9), fitting[k].capacity_req_s))
    return fitting[best] if amounts[best] > 1e-9 else None


def _use(pattern: Pattern) -> Counter[int]:
    used: Counter[int] = Counter()
    for kind, count in pattern:
        used[kind] += count
    return used


def _nodes_by_kind(problem: Problem) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for node, kind in enumerate(problem.node_kind):
        found.setdefault(kind, []).append(node)
    return found


def _fastest_pair(problem: Problem, left: list[int], right: list[int]) -> tuple[int, int] | None:
    pairs = [(a, b) for a in left for b in right if a != b]
    return max(pairs, key=lambda p: problem.node_links[p[0]][p[1]].bandwidth_bytes_s, default=None)


class _Layout:
    """Nodes being filled with groups."""

    def __init__(self, problem: Problem, nodes: Collection[int] | None) -> None:
        self._problem = problem
        self._by_kind = _nodes_by_kind(problem)
        self._free = [len(g) if nodes is None or n in nodes else 0 for n, g in enumerate(problem.node_gpus)]
        self.groups: list[Group] = []

    def free_by_kind(self) -> Counter[int]:
        """GPUs left of each kind of node."""
        return Counter(
            {kind: sum(self._free[node] for node in nodes) for kind, nodes in self._by_kind.items()}
        )

    def price_by_kind(self) -> dict[int, float]:
        """US dollars per GPU and hour, of the dearest node of each kind."""
        prices = self._problem.node_price
        return {kind: max(prices[node] for node in nodes) for kind, nodes in self._by_kind.items()}

    def place(self, column: Column) -> bool:
        """Give the column the nodes that it fills most nearly (pairs: joined by the fastest link);
        False if no node has so many GPUs left."""
        blocks = self._room(column.pattern)
        if blocks is None:
            return False
        for node, count in blocks:
            self._free[node] -= count
        self.groups.append(Group(column.role, blocks))
        return True

    def _room(self, pattern: Pattern) -> Blocks | None:
        options = [
            [node for node in self._by_kind[kind] if self._free[node] >= count] for kind, count in pattern
        ]
        links = self._problem.node_links
        best: tuple[int, ...] | None = None
        best_cost = (float("inf"), 0)
        for nodes in itertools.product(*options):
            if len(set(nodes)) < len(nodes):
                continue
            slowest = min((links[a][b].bandwidth_bytes_s for a, b in itertools.pairwise(nodes)), default=0.0)
            waste = sum(self._free[node] - count for node, (_, count) in zip(nodes, pattern, strict=True))
            if (-slowest, waste) < best_cost:
                best, best_cost = nodes, (-slowest, waste)
        if best is None:
            return None
        return blocks_of({node: count for node, (_, count) in zip(best, pattern, strict=True)})
