"""A start for large clusters: the groups of each part of the cluster by themselves.

Each part (parts.py) has its own linear program over the configuration LP's columns. Those groups that are
worth most there may stand on any of its nodes, and an integer program (part_program.py) chooses among
them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hexgen2.search.bounds.columns import Column
from hexgen2.search.bounds.configuration_lp import ConfigurationLP
from hexgen2.search.bounds.part_program import PartProgram, candidates
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.problem import Group, Problem, Solution
from hexgen2.search.ties import greatest_first

WORTH = 0.95
"""Groups that are worth so much at a program's duals, beside what their GPUs cost, are considered."""
MOST_WHOLE = 250
"""And so many at most by the integer program."""
MOST_S = 2.0
"""Seconds for a part, where there is a time limit."""


def groups_by_parts(
    evaluator: Evaluator,
    stop: Callable[[], bool],
    time_left_s: Callable[[], float | None],
    otherwise: Solution,
) -> Solution:
    """The groups of all parts; of those that there was no time for, the groups that another solution has
    there.

    Parameters
    ----------
    stop : whether it is time to do with the parts so far
    time_left_s : seconds that there are for all parts left; none without a time limit
    otherwise : the other solution
    """
    parts, known = evaluator.parts, dict[tuple, Solution]()
    groups, done = list[Group](), 0
    for nodes in parts:
        if stop():
            break
        left_s = time_left_s()
        share_s = None
        if left_s is not None:  # A program takes longer, the more nodes there are.
            share_s = min(MOST_S, left_s * len(nodes) / sum(map(len, parts[done:])))
        key, order = _likeness(evaluator.problem, nodes)
        if key not in known:
            found = groups_within(evaluator, nodes, share_s, stop)
            place = {node: k for k, node in enumerate(order)}
            known[key] = _moved(found, place)
        own = _moved(known[key], dict(enumerate(order))).groups
        if not own and stop():  # It was cut short.
            break
        groups, done = [*groups, *own], done + 1
    left = {node for part in parts[done:] for node in part}
    groups += [each for each in otherwise.groups if all(node in left for node, _ in each.counts)]
    return Solution(tuple(groups))


def groups_within(
    evaluator: Evaluator,
    nodes: Sequence[int],
    time_s: float | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Solution:
    """The groups on these nodes, as if there were no others; within time_s if that is given, and stop as for
    groups_by_parts."""
    relaxed, problem, began = evaluator.relaxed, evaluator.problem, time.monotonic()
    classes, place = relaxed.classes.within(nodes)
    here = (column for column in relaxed.columns if column.planned and _within(column, place))
    moved = (
        replace(column, pattern=tuple((place[which], count) for which, count in column.pattern))
        for column in here
    )
    columns = [column for column in moved if classes.has_room(column.pattern)]
    if not columns:
        return Solution()
    lp = ConfigurationLP(classes, with_kv=problem.links == "shared")
    found = lp.solve(columns)
    if found.value <= 0:
        return Solution()
    values = zip(lp.worth(columns, found.duals).tolist(), columns, strict=True)
    near = [(value, column) for value, column in values if value >= WORTH]
    best_first = [column for _, column in greatest_first(near, lambda each: each[0])]
    everyone = candidates(best_first, classes, evaluator.planner, stop)
    worth = PartProgram(classes.problem, nodes, everyone).worth()
    hopeful = [k for k, value in enumerate(worth) if value >= WORTH]
    able = [everyone[k] for k in sorted(greatest_first(hopeful, worth.__getitem__)[:MOST_WHOLE])]
    if not able:
        return Solution()
    left_s = None if time_s is None else time_s - (time.monotonic() - began)
    return PartProgram(classes.problem, nodes, able).solve(left_s)


def _within(column: Column, place: Mapping[int, int]) -> bool:
    """Whether a column has only classes that have a place."""
    return all(which in place for which, _ in column.pattern)


def _likeness(problem: Problem, nodes: Sequence[int]) -> tuple[tuple, list[int]]:
    """A key that parts have in common whose nodes correspond, and the nodes in that order."""
    order = sorted(nodes, key=lambda n: (problem.node_kind[n], len(problem.node_gpus[n]), n))
    kinds = tuple(
        (problem.node_kind[n], len(problem.node_gpus[n]), float(problem.cluster.card_bytes_s[n]))
        for n in order
    )
    return (kinds, tuple(problem.node_links[a][b] for a in order for b in order if a != b)), order


def _moved(solution: Solution, to: Mapping[int, int]) -> Solution:
    """The solution on the nodes that correspond to its own."""
    return Solution(
        tuple(
            Group(group.role, tuple(sorted((to[node], n) for node, n in group.counts)))
            for group in solution.groups
        )
    )
