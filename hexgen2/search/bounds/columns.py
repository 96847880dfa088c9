"""Columns of the configuration LP: groups of GPUs in a role, each worth the capacity of its best plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hexgen2.region import Region
from hexgen2.search.planning.classes import NodeClasses, Pattern, widest_span
from hexgen2.search.planning.plan import Planner
from hexgen2.search.problem import Problem
from hexgen2.search.ties import exceeds


@dataclass(frozen=True)
class Column:
    """A pattern of GPUs in a role, with the capacity of its best plan in requests/s; and what it can do for
    others, if it may work for them (colocated groups)."""

    role: str
    pattern: Pattern
    capacity_req_s: float
    region: Region | None = None

    @cached_property
    def gpus(self) -> tuple[tuple[int, int], ...]:
        """(node class, GPUs of that class in total) for each class in the pattern."""
        used: dict[int, int] = {}
        for which, count in self.pattern:
            used[which] = used.get(which, 0) + count
        return tuple(used.items())


def list_columns(
    planner: Planner, problem: Problem, classes: NodeClasses, stop: Callable[[], bool]
) -> tuple[list[Column], bool]:
    """All patterns of up to `widest_span` nodes in which the model fits, in every role that groups may have;
    and whether these are all, or it was time to stop. Colocated ones on several nodes are worth what no plan
    exceeds."""
    columns, roles = list[Column](), problem.roles
    for nodes in range(1, widest_span(problem) + 1):
        for pattern in classes.patterns(nodes):
            if columns and stop():
                return columns, False
            counts = classes.counts(pattern)
            for role in roles:
                if role == "colocated" and nodes > 1:
                    # There are many, each takes long to plan, and few are worth it.
                    limit = planner.region_limit(counts)
                    if limit:
                        region = limit if problem.mixes else None
                        columns.append(Column(role, pattern, limit.balanced, region))
                    continue
                plan = planner.plan(role, counts)
                if plan:
                    mixed = role == "colocated" and problem.mixes
                    region = planner.region(plan) if mixed else None
                    columns.append(Column(role, pattern, plan.capacity_req_s, region))
    return columns, True


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
            able[column.pattern] = Region.around([*column.region.corners, *together])
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
        best[column.role, column.pattern] = max(parts, column.capacity_req_s)
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
