"""The budget of a search that rents its GPUs, and the steps that trade some GPUs for others.

The cluster of such a search is everything that could be rented; GPUs in no group cost nothing. Solutions over
the budget are never accepted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hexgen2.search.operators import idle_gpus, replaced
from hexgen2.search.problem import Group, NodeCounts, Problem, Solution, counts_of
from hexgen2.search.steps import HireGpus, Neighbour, ReleaseGpus, TradeGpus

ROUNDING = 1e-9
"""Relative slack for prices that were added up in floating point."""


@dataclass(frozen=True)
class Budget:
    """The prices of a problem's GPUs, and what all in use may cost together in US dollars per hour."""

    problem: Problem
    per_hour: float

    def price(self, solution: Solution) -> float:
        """US dollars per hour for the GPUs in groups."""
        prices = self.problem.node_price
        return math.fsum(prices[node] * count for group in solution.groups for node, count in group.counts)

    def affordable(self, solution: Solution) -> bool:
        """Whether the solution's price is within the budget."""
        return self.price(solution) <= self.per_hour * (1 + ROUNDING)

    def most(self, node: int, money: float) -> int:
        """GPUs of a node that so much money buys."""
        price, size = self.problem.node_price[node], len(self.problem.node_gpus[node])
        return size if price <= 0 else min(size, int(money / price * (1 + ROUNDING)))

    def on_offer(self, solution: Solution) -> NodeCounts:
        """GPUs in no group; of identical unused nodes only the first."""
        sizes = tuple(len(gpus) for gpus in self.problem.node_gpus)
        seen: set[int] = set()
        offered = []
        for node, count in idle_gpus(solution, sizes):
            if count == sizes[node]:
                if self._twin[node] in seen:
                    continue
                seen.add(self._twin[node])
            offered.append((node, count))
        return tuple(offered)

    @cached_property
    def _twin(self) -> tuple[int, ...]:
        """For each node the first one that is identical to it: same GPUs, price and links."""
        problem = self.problem
        nodes = range(len(problem.node_gpus))

        def alike(a: int, b: int) -> bool:
            return (
                problem.node_kind[a] == problem.node_kind[b]
                and problem.node_price[a] == problem.node_price[b]
                and len(problem.node_gpus[a]) == len(problem.node_gpus[b])
                and all(
                    problem.node_links[a][c] == problem.node_links[b][c] for c in nodes if c not in (a, b)
                )
            )

        return tuple(next(a for a in nodes if alike(a, b)) for b in nodes)


def spendable(problem: Problem) -> float:
    """US dollars per hour: the goal's budget, or the price of everything."""
    everything = float(problem.cluster.price_per_hour.sum())
    given = problem.goal.budget_per_hour
    return everything if given is None else min(given, everything)


def releases(solution: Solution, groups: Iterable[int]) -> Iterator[Neighbour]:
    """GPUs of a group are given back: one, half a node's share, all of it, or the whole group."""
    for a in groups:
        group = solution.groups[a]
        for given in _given(group):
            rest = Group(group.role, _minus(group.counts, given))
            yield ReleaseGpus(given, group.role), replaced(solution, {a: rest})


def trades(budget: Budget, solution: Solution, givers: list[int], takers: list[int]) -> Iterator[Neighbour]:
    """Idle GPUs of one node, as many as the budget allows or fewer, join a group or form one; a group may
    give back GPUs of other nodes for them."""
    offered = budget.on_offer(solution)
    left = budget.per_hour - budget.price(solution)
    prices = budget.problem.node_price
    nothing: tuple[int | None, NodeCounts] = (None, ())
    gifts = [nothing, *((a, given) for a in givers for given in _given(solution.groups[a]))]
    for giver, given in gifts:
        money = left + math.fsum(prices[node] * count for node, count in given)
        for node, idle in offered:
            if any(node == n for n, _ in given):
                continue
            for count in _amounts(min(idle, budget.most(node, money))):
                yield from _hires(solution, giver, given, (node, count), takers, budget.problem.roles)


def _hires(
    solution: Solution,
    giver: int | None,
    given: NodeCounts,
    hired: tuple[int, int],
    takers: list[int],
    roles: Sequence[str],
) -> Iterator[Neighbour]:
    changed: dict[int, Group | None] = {}
    if giver is not None:
        group = solution.groups[giver]
        changed[giver] = Group(group.role, _minus(group.counts, given))
    node, count = hired

    def step(role: str, new_group: bool) -> HireGpus | TradeGpus:
        if given:
            return TradeGpus(given, count, node, role, new_group)
        return HireGpus(count, node, role, new_group)

    for a in takers if giver is None else sorted({giver, *takers}):
        group = changed.get(a) or solution.groups[a]
        counts = dict(group.counts)
        counts[node] = counts.get(node, 0) + count
        larger = Group(group.role, counts_of(counts))
        yield step(group.role, new_group=False), replaced(solution, {**changed, a: larger})
    for role in roles:
        yield step(role, new_group=True), replaced(solution, changed, (Group(role, (hired,)),))


def _given(group: Group) -> list[NodeCounts]:
    """The parts of a group that a step may give back."""
    parts: list[NodeCounts] = [
        ((node, n),) for node, count in group.counts for n in sorted({1, (count + 1) // 2, count})
    ]
    return parts if len(group.counts) == 1 else [*parts, group.counts]


def _amounts(most: int) -> list[int]:
    """Powers of two up to `most`, and `most`."""
    return sorted({1 << k for k in range(most.bit_length())} | {most}) if most else []


def _minus(counts: NodeCounts, given: NodeCounts) -> NodeCounts:
    gone = dict(given)
    return counts_of({node: count - gone.get(node, 0) for node, count in counts})
