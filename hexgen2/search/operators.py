"""Solutions one step away: swap, move, phase flip, and beyond the paper merge, split and recruit.

HexGen-2, section 3.4 and Appendix E.3. GPUs of one node are alike, so steps that differ only in which of
them they touch are one step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cost_model.hardware import Link
from hexgen2.search.problem import ROLES, Group, NodeCounts, Solution, counts_of
from hexgen2.search.steps import (
    ExchangePlaces,
    FlipPhase,
    MergeGroups,
    MoveGpus,
    Neighbour,
    RecruitGpus,
    RecruitIdle,
    SplitGroup,
    SwapGpus,
)

PURE = ROLES["disaggregated"]


def _roles_for(role: str, roles: Sequence[str]) -> Sequence[str]:
    """The roles that a group of this role, or its parts, may have: its own kind where it is none of these."""
    return roles if role in roles else (role,)


def replaced(solution: Solution, changed: dict[int, Group | None], added: tuple[Group, ...] = ()) -> Solution:
    """The solution with some groups changed (None: gone) and others added; empty ones are left out."""
    groups = (changed.get(i, group) for i, group in enumerate(solution.groups))
    return Solution(tuple(g for g in (*groups, *added) if g and g.counts))


def _shift(counts: NodeCounts, node: int, by: int) -> NodeCounts:
    shifted = dict(counts)
    shifted[node] = shifted.get(node, 0) + by
    return counts_of(shifted)


def idle_gpus(solution: Solution, node_sizes: tuple[int, ...]) -> NodeCounts:
    """GPUs in no group."""
    free = dict(enumerate(node_sizes))
    for group in solution.groups:
        for node, count in group.counts:
            free[node] -= count
    return counts_of(free)


@dataclass(frozen=True)
class Alike:
    """Which groups and nodes are interchangeable, so that equivalent steps are listed once: a large cluster
    has hundreds of groups but few kinds of them.

    node_class : class of each node (search/planning/classes.py)
    links : the link between each pair of nodes
    """

    node_class: Sequence[int]
    links: Sequence[Sequence[Link]]

    def kind(self, group: Group) -> tuple:
        """Equal for interchangeable groups."""
        return group.role, *((self.node_class[node], count) for node, count in group.counts)

    def pairs(self, solution: Solution, left: list[int], right: list[int]) -> Iterator[tuple[int, int]]:
        """Indices of two groups, one from each list: the first pair of every kind. Kinds of pairs differ in
        the kinds of the groups, the nodes that they share and the link between them."""
        groups = solution.groups
        kinds: dict[tuple, int] = {}
        kind = [kinds.setdefault(self.kind(group), len(kinds)) for group in groups]
        nodes = [tuple(node for node, _ in group.counts) for group in groups]
        seen = set()
        for a, b in itertools.product(left, right):
            if a == b:
                continue
            joint = None if len(nodes[a]) == 1 == len(nodes[b]) else self._joint(nodes[a], nodes[b])
            one, other = nodes[a][0], nodes[b][0]
            key = (kind[a], kind[b], one == other, self.links[one][other], joint)
            if key not in seen:
                seen.add(key)
                yield a, b

    def single(self, solution: Solution, which: Iterable[int]) -> Iterator[int]:
        """The first group of each kind."""
        seen = set()
        for a in which:
            kind = self.kind(solution.groups[a])
            if kind not in seen:
                seen.add(kind)
                yield a

    def nodes(self, counts: NodeCounts) -> Iterator[tuple[int, int]]:
        """The first (node, count) of each kind."""
        seen = set()
        for node, count in counts:
            if (self.node_class[node], count) not in seen:
                seen.add((self.node_class[node], count))
                yield node, count

    @staticmethod
    def _joint(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        return tuple((i, right.index(node)) for i, node in enumerate(left) if node in right)


def _pairs(
    solution: Solution, left: list[int], right: list[int], alike: Alike | None
) -> Iterable[tuple[int, int]]:
    if alike:
        return alike.pairs(solution, left, right)
    return ((a, b) for a, b in itertools.product(left, right) if a != b)


def moves(
    solution: Solution, donors: list[int], receivers: list[int], alike: Alike | None = None
) -> Iterator[Neighbour]:
    """One GPU, half a node's share or all of it goes from one group to another."""
    for a, b in _pairs(solution, donors, receivers, alike):
        source, target = solution.groups[a], solution.groups[b]
        for node, count in source.counts:
            for taken in sorted({1, (count + 1) // 2, count}):
                yield (
                    MoveGpus(taken, node, source.role, target.role),
                    replaced(
                        solution,
                        {
                            a: Group(source.role, _shift(source.counts, node, -taken)),
                            b: Group(target.role, _shift(target.counts, node, taken)),
                        },
                    ),
                )


def swaps(
    solution: Solution, left: list[int], right: list[int], alike: Alike | None = None
) -> Iterator[Neighbour]:
    """One GPU of each of two groups change places."""
    for a, b in sorted({(min(p), max(p)) for p in _pairs(solution, left, right, alike)}):
        one, two = solution.groups[a], solution.groups[b]
        for (m, _), (n, _) in itertools.product(one.counts, two.counts):
            if m == n:
                continue
            yield (
                SwapGpus(m, one.role, n, two.role),
                replaced(
                    solution,
                    {
                        a: Group(one.role, _shift(_shift(one.counts, m, -1), n, 1)),
                        b: Group(two.role, _shift(_shift(two.counts, n, -1), m, 1)),
                    },
                ),
            )


def exchanges(
    solution: Solution, left: list[int], right: list[int], alike: Alike | None = None
) -> Iterator[Neighbour]:
    """Two groups of different roles take each other's place."""
    for a, b in sorted({(min(p), max(p)) for p in _pairs(solution, left, right, alike)}):
        one, two = solution.groups[a], solution.groups[b]
        if one.role != two.role and one.counts != two.counts:
            yield (
                ExchangePlaces(one.role, two.role),
                replaced(solution, {a: Group(one.role, two.counts), b: Group(two.role, one.counts)}),
            )


def flips(
    solution: Solution, which: list[int], alike: Alike | None = None, roles: Sequence[str] = PURE
) -> Iterator[Neighbour]:
    """A replica changes its role."""
    for a in alike.single(solution, which) if alike else which:
        group = solution.groups[a]
        for role in _roles_for(group.role, roles):
            if role != group.role:
                step = FlipPhase(group.role, role)
                yield step, replaced(solution, {a: Group(role, group.counts)})


def merges(
    solution: Solution, alike: Alike | None = None, roles: Sequence[str] = PURE
) -> Iterator[Neighbour]:
    """Two groups become one, of either role, or colocated if that is one of the roles."""
    everyone = list(range(len(solution.groups)))
    for a, b in sorted({(min(p), max(p)) for p in _pairs(solution, everyone, everyone, alike)}):
        one, two = solution.groups[a], solution.groups[b]
        counts = dict(one.counts)
        for node, count in two.counts:
            counts[node] = counts.get(node, 0) + count
        for role in sorted({one.role, two.role, *(r for r in roles if r == "colocated")}):
            yield (
                MergeGroups(one.role, two.role, role),
                replaced(solution, {a: Group(role, counts_of(counts)), b: None}),
            )


def splits(
    solution: Solution, alike: Alike | None = None, roles: Sequence[str] = PURE
) -> Iterator[Neighbour]:
    """A group becomes two, cut by node or inside each node in half, with every pair of roles."""
    everyone = range(len(solution.groups))
    for a in alike.single(solution, everyone) if alike else everyone:
        group = solution.groups[a]
        if group.size < 2:
            continue
        for part in sorted(set(_parts(group.counts))):
            rest = counts_of({n: c - dict(part).get(n, 0) for n, c in group.counts})
            if not part or not rest:
                continue
            for one, two in itertools.product(_roles_for(group.role, roles), repeat=2):
                yield (
                    SplitGroup(group.role, one, two),
                    replaced(solution, {a: Group(one, part)}, (Group(two, rest),)),
                )


def _parts(counts: NodeCounts) -> Iterator[NodeCounts]:
    for node, count in counts:
        yield ((node, count),)
        for taken in {1, count // 2}:
            yield counts_of({node: taken})
    yield counts_of({node: count // 2 for node, count in counts})
    yield counts_of({node: (count + 1) // 2 for node, count in counts})


def recruits(
    solution: Solution, idle: NodeCounts, alike: Alike | None = None, roles: Sequence[str] = PURE
) -> Iterator[Neighbour]:
    """Idle GPUs join a group or form one."""
    for node, count in alike.nodes(idle) if alike else idle:
        for taken in sorted({1, count}):
            for a, group in enumerate(solution.groups):
                yield (
                    RecruitGpus(taken, node, group.role),
                    replaced(solution, {a: Group(group.role, _shift(group.counts, node, taken))}),
                )
    for role in roles if idle else ():
        yield RecruitIdle(role), replaced(solution, {}, (Group(role, idle),))
