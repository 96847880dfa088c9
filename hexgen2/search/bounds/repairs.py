"""Solutions made whole again: where groups were taken out, the configuration LP says which others to form.

The groups that are left are fixed, and the program is rounded as for a start (rounding.py). Each time,
columns are worth a little less than they are, at random, and nodes that are alike come in another order: so
another one of the many mixtures comes out that are nearly as good."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hexgen2.search.bounds.columns import Column, with_its_plan
from hexgen2.search.bounds.configuration_lp import TIE, ConfigurationLP
from hexgen2.search.bounds.rounding import Layout, fill_up
from hexgen2.search.planning.classes import NodeClasses, Pattern
from hexgen2.search.planning.plan import Planner
from hexgen2.search.problem import Group, Solution

LESS = (0.003, 0.01, 0.03, 0.1)
"""Shares of its worth that a column may be worth less, one of them at a time: from nearly the same mixtures
to others."""
PAIRED = 0.7
"""How often groups of both roles are put next to each other."""


class Repairs:
    """The program over these columns, each worth what its groups can do alone; kept from one repair to the
    next."""

    def __init__(
        self, lp: ConfigurationLP, classes: NodeClasses, columns: Sequence[Column], planner: Planner
    ) -> None:
        self._lp, self._classes, self._planner = lp, classes, planner
        self._columns = [column.alone for column in columns]
        self._begin()

    def _begin(self) -> None:
        """Build the program."""
        self._program = self._lp.warm_groups(self._columns)
        self._number: dict[tuple[str, Pattern], int] = {
            (column.role, column.pattern): k for k, column in enumerate(self._columns)
        }

    def repaired(
        self, kept: Sequence[Group], rng: np.random.Generator, stop: Callable[[], bool] = lambda: False
    ) -> Solution:
        """These groups, and others where they leave room."""
        self._know(kept)
        columns, program = self._columns, self._program
        less = float(rng.choice(LESS))
        program.free()
        program.break_ties(columns, rng.random(len(columns)) * (less / TIE))
        pairs, order = bool(rng.random() < PAIRED), rng.permutation(len(self._classes.class_of))
        layout, placed = Layout(self._classes, pairs, order.tolist()), np.zeros(len(columns))
        for group in kept:
            k = self._number[group.role, self._pattern(group)]
            layout.put(columns[k], group.counts)
            placed[k] += 1
        for k, column in enumerate(columns):
            if not layout.has_room(column):
                program.at_most(k, int(placed[k]))
            program.at_least(k, int(placed[k]))
        found = fill_up(program, columns, layout, placed, stop=stop)
        self._plan(np.flatnonzero(placed).tolist(), stop)
        return found

    def _pattern(self, group: Group) -> Pattern:
        class_of = self._classes.class_of
        return tuple(sorted((class_of[node], count) for node, count in group.counts))

    def _know(self, groups: Sequence[Group]) -> None:
        """Take up the columns of groups that have none."""
        unknown: dict[tuple[str, Pattern], Group] = {}
        for group in groups:
            key = group.role, self._pattern(group)
            if key not in self._number:
                unknown.setdefault(key, group)
        for (role, pattern), group in unknown.items():
            plan = self._planner.plan(role, group.counts)
            self._columns.append(Column(role, pattern, plan.capacity_req_s if plan else 0.0))
        if unknown:
            self._begin()

    def _plan(self, which: Sequence[int], stop: Callable[[], bool]) -> None:
        """Plan the groups of these columns that were worth as much as most plans are, as far as there is
        time: from now on, they are worth what their own are."""
        for k in which:
            column = self._columns[k]
            if stop():
                break
            if not column.planned:
                counts = self._classes.counts(column.pattern)
                planned = with_its_plan(column, self._planner, self._planner.problem, counts)
                self._columns[k] = planned.alone
                self._program.set_capacity(k, self._lp.capacity_entries(planned))
