"""Solutions one step away: swap, move, phase flip, and beyond the paper merge and split.

HexGen-2, section 3.4 and Appendix E.3. A step is named so that the trace can be read; GPUs of one
node are alike, so steps that differ only in which of them they touch are one step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hexgen2.search.problem import Blocks, Group, Solution, blocks_of

Step = tuple[str, Solution]
OTHER_ROLE = {"prefill": "decode", "decode": "prefill"}


def replaced(solution: Solution, changed: dict[int, Group | None], added: tuple[Group, ...] = ()) -> Solution:
    """The solution with some groups changed (None: gone) and others added; empty ones are left out."""
    groups = (changed.get(i, group) for i, group in enumerate(solution.groups))
    return Solution(tuple(g for g in (*groups, *added) if g and g.blocks))


def _shift(blocks: Blocks, node: int, by: int) -> Blocks:
    counts = dict(blocks)
    counts[node] = counts.get(node, 0) + by
    return blocks_of(counts)


def idle_blocks(solution: Solution, node_sizes: tuple[int, ...]) -> Blocks:
    """GPUs in no group."""
    free = dict(enumerate(node_sizes))
    for group in solution.groups:
        for node, count in group.blocks:
            free[node] -= count
    return blocks_of(free)


def moves(solution: Solution, donors: list[int], receivers: list[int]) -> Iterator[Step]:
    """One GPU, half a node's share or all of it goes from one group to another."""
    for a, b in itertools.product(donors, receivers):
        if a == b:
            continue
        source, target = solution.groups[a], solution.groups[b]
        for node, count in source.blocks:
            for taken in sorted({1, (count + 1) // 2, count}):
                yield (
                    f"move {taken} of node {node}: {source.role} -> {target.role}",
                    replaced(
                        solution,
                        {
                            a: Group(source.role, _shift(source.blocks, node, -taken)),
                            b: Group(target.role, _shift(target.blocks, node, taken)),
                        },
                    ),
                )


def swaps(solution: Solution, left: list[int], right: list[int]) -> Iterator[Step]:
    """One GPU of each of two groups change places."""
    for a, b in sorted({(min(p), max(p)) for p in itertools.product(left, right) if p[0] != p[1]}):
        one, two = solution.groups[a], solution.groups[b]
        for (m, _), (n, _) in itertools.product(one.blocks, two.blocks):
            if m == n:
                continue
            yield (
                f"swap node {m} of {one.role} with node {n} of {two.role}",
                replaced(
                    solution,
                    {
                        a: Group(one.role, _shift(_shift(one.blocks, m, -1), n, 1)),
                        b: Group(two.role, _shift(_shift(two.blocks, n, -1), m, 1)),
                    },
                ),
            )


def flips(solution: Solution, which: list[int]) -> Iterator[Step]:
    """A replica of one phase changes it."""
    for a in which:
        group = solution.groups[a]
        if group.role not in OTHER_ROLE:
            continue
        yield (
            f"flip {group.role} to {OTHER_ROLE[group.role]}",
            replaced(solution, {a: Group(OTHER_ROLE[group.role], group.blocks)}),
        )


def merges(solution: Solution) -> Iterator[Step]:
    """Two groups become one, of either role."""
    for a, b in itertools.combinations(range(len(solution.groups)), 2):
        one, two = solution.groups[a], solution.groups[b]
        counts = dict(one.blocks)
        for node, count in two.blocks:
            counts[node] = counts.get(node, 0) + count
        for role in sorted({one.role, two.role}):
            yield (
                f"merge {one.role} and {two.role} into {role}",
                replaced(solution, {a: Group(role, blocks_of(counts)), b: None}),
            )


def splits(solution: Solution) -> Iterator[Step]:
    """A group becomes two, cut by node or inside each node in half, with every pair of roles; a colocated
    group becomes two of its kind."""
    for a, group in enumerate(solution.groups):
        if group.size < 2:
            continue
        for part in sorted(set(_parts(group.blocks))):
            rest = blocks_of({n: c - dict(part).get(n, 0) for n, c in group.blocks})
            if not part or not rest:
                continue
            roles = ("colocated",) if group.role == "colocated" else ("prefill", "decode")
            for one, two in itertools.product(roles, repeat=2):
                yield (
                    f"split {group.role} into {one} and {two}",
                    replaced(solution, {a: Group(one, part)}, (Group(two, rest),)),
                )


def _parts(blocks: Blocks) -> Iterator[Blocks]:
    for node, count in blocks:
        yield ((node, count),)
        for taken in {1, count // 2}:
            yield blocks_of({node: taken})
    yield blocks_of({node: count // 2 for node, count in blocks})
    yield blocks_of({node: (count + 1) // 2 for node, count in blocks})


def recruits(solution: Solution, idle: Blocks) -> Iterator[Step]:
    """Idle GPUs join a group or form one."""
    for node, count in idle:
        for taken in sorted({1, count}):
            for a, group in enumerate(solution.groups):
                yield (
                    f"recruit {taken} of node {node} for {group.role}",
                    replaced(solution, {a: Group(group.role, _shift(group.blocks, node, taken))}),
                )
    for role in ("prefill", "decode") if idle else ():
        yield f"recruit idle GPUs as {role}", replaced(solution, {}, (Group(role, idle),))
