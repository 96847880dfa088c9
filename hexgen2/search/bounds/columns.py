"""Columns of the configuration LP: groups of GPUs in a role, each worth the capacity of its best plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hexgen2.search.planning.classes import Pattern, widest_span
from hexgen2.search.planning.plan import Planner
from hexgen2.search.ties import exceeds

ROLES = ("prefill", "decode")


@dataclass(frozen=True)
class Column:
    """A pattern of GPUs in a role, with the capacity of its best plan in requests/s."""

    role: str
    pattern: Pattern
    capacity_req_s: float

    @cached_property
    def gpus(self) -> tuple[tuple[int, int], ...]:
        """(node class, GPUs of that class in total) for each class in the pattern."""
        used: dict[int, int] = {}
        for which, count in self.pattern:
            used[which] = used.get(which, 0) + count
        return tuple(used.items())


def list_columns(planner: Planner) -> list[Column]:
    """All patterns of up to `widest_span` nodes in which the model fits, in both roles."""
    classes, columns = planner.classes, []
    for nodes in range(1, widest_span(planner.problem) + 1):
        for pattern in classes.patterns(nodes):
            counts = classes.counts(pattern)
            plans = ((role, planner.plan(role, counts)) for role in ROLES)
            columns += [Column(role, pattern, plan.capacity_req_s) for role, plan in plans if plan]
    return columns


def undominated(columns: Sequence[Column]) -> list[Column]:
    """The columns that are worth more than any division of their GPUs into two smaller columns (or more,
    taken off one by one). The division must use all the GPUs: an idle one would bring no KV cache in or
    out."""
    best: dict[tuple[str, Pattern], float] = {}
    kept = []
    for column in sorted(columns, key=lambda c: sum(n for _, n in c.pattern)):
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
