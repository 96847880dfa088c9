"""What groups can form, before any of it is planned: the pipelines that may be best, and their limits.

To look at many groups together is much faster than at one after the other, and another process may look at
half of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from hexgen2.search.background import Background, free_cores
from hexgen2.search.planning.contenders import ContenderSearch, PlanLimit
from hexgen2.search.planning.pipelines import Pipeline, Pipelines
from hexgen2.search.planning.regions import limits_of
from hexgen2.search.planning.shapes import Shapes, StageShape
from hexgen2.search.planning.stage_kinds import Degrees, shape_of
from hexgen2.search.problem import NodeCounts
from hexgen2.search.ties import greatest_first

AT_FIRST, AT_ONCE = 24, 192
"""Groups that are looked at together: first few, so that there is some answer soon, then more each time."""
WORTH_A_PROCESS = 128
"""Of so many groups that are to be looked at, another process looks at half, if a core is free."""

Key = tuple
"""What groups of the same kinds of nodes and links have in common."""
Sorted = tuple[NodeCounts, list[int]]
"""A group and its nodes, sorted by kind."""


class Outlook(NamedTuple):
    """What several groups can form in a role, before any of it is planned: all that another process has to
    send of it.

    keys : of the groups, which those of the same kinds of nodes and links have in common
    nodes : of each group
    limits : of the groups by number, but for those in which the model does not fit
    ends : [groups + 1] where the contenders of each group begin
    node, degrees : [n, s] of each stage of the contenders; the latter are numbers in `known_degrees`
    stages : [n] how many; of_chunks : [n, c] see Limits
    """

    role: str
    keys: list[tuple]
    nodes: list[list[int]]
    limits: dict[int, PlanLimit]
    ends: list[int]
    node: np.ndarray
    degrees: np.ndarray
    stages: np.ndarray
    of_chunks: np.ndarray
    known_degrees: list[Degrees]

    def shape(self, row: int) -> list[StageShape]:
        """The shape of a contender."""
        return shape_of(self.node[row], self.degrees[row], int(self.stages[row]), self.known_degrees)

    def groups(self, make: Callable[[Outlook, int], Pipeline]) -> Iterator[tuple[tuple, Candidates]]:
        """The key and the candidates of each group; `make` makes a pipeline of a contender."""
        most = self.of_chunks.max(axis=1).tolist()
        for number, (key, nodes) in enumerate(zip(self.keys, self.nodes, strict=True)):
            here = {row: most[row] for row in range(self.ends[number], self.ends[number + 1])}
            yield key, Candidates(nodes, self.limits.get(number), here, partial(make, self))


class Candidates:
    """The pipelines that groups of the same kinds of nodes can form in a role, the most promising first.

    Attributes
    ----------
    nodes : that the pipelines are on
    limit : what no plan of them exceeds; None if the model does not fit

    Parameters
    ----------
    req_s_of : limits of the pipelines, by their numbers
    make : makes a pipeline
    """

    def __init__(
        self,
        nodes: list[int],
        limit: PlanLimit | None,
        req_s_of: Mapping[int, float],
        make: Callable[[int], Pipeline],
    ) -> None:
        self.nodes, self.limit = nodes, limit
        self._req_s_of, self._make, self._made = req_s_of, make, list[Pipeline]()

    @cached_property
    def _order(self) -> list[int]:
        return greatest_first(self._req_s_of, self._req_s_of.__getitem__)

    def __iter__(self) -> Iterator[Pipeline]:
        for k, row in enumerate(self._order):
            if k == len(self._made):
                self._made.append(self._make(row))
            yield self._made[k]


class Outlooks:
    """The candidates of groups in each role under one goal, remembered.

    Parameters
    ----------
    alike : of the same problem with another goal, to save time
    """

    def __init__(
        self, pipelines: Pipelines, shapes: Shapes, contenders: ContenderSearch, alike: Outlooks | None
    ) -> None:
        self._pipelines, self._shapes, self._contenders = pipelines, shapes, contenders
        targets = contenders.problem.targets
        self._limited_by = targets.given, targets.tpot_s, targets.attainment
        self._known: dict[tuple, Candidates] = alike._known if alike else {}

    def knows(self, role: str, key: Key) -> bool:
        """Whether `of` has the candidates of such groups without looking."""
        return (role, *key, self._limited_by) in self._known

    def of(self, role: str, key: Key, group: Sorted) -> Candidates:
        """What a group can form."""
        if not self.knows(role, key):
            self._take(self._look([role], {key: group}))
        return self._known[(role, *key, self._limited_by)]

    def look_ahead(
        self,
        roles: Sequence[str],
        groups: Mapping[Key, Sorted],
        stop: Callable[[float], bool],
        at_once: int,
        shared: bool,
    ) -> None:
        """Look at these groups in these roles, so many at once, until it is time to stop.

        Parameters
        ----------
        stop : whether to stop, now that this share of the groups has been looked at
        shared : whether another process looks at half of them, if they are many and a core is free
        """
        if not shared or len(groups) < WORTH_A_PROCESS or free_cores() < 1:
            self._take(self._look_at_all(roles, groups, stop, at_once))
            return
        # Every other one, since those that are listed later take longer.
        here, there = (dict(itertools.islice(groups.items(), k, None, 2)) for k in (0, 1))
        others = Background(lambda report: list(self._look_at_all(roles, there, stop, at_once)))
        try:
            self._take(self._look_at_all(roles, here, stop, at_once))
            self._take(others.result())
        finally:
            others.cancel()

    def _look_at_all(
        self,
        roles: Sequence[str],
        groups: Mapping[Key, Sorted],
        stop: Callable[[float], bool],
        at_once: int,
    ) -> Iterator[Outlook]:
        keys, done, size = iter(groups), 0, min(AT_FIRST, at_once)
        while not stop(done / max(1, len(groups))) and (some := list(itertools.islice(keys, size))):
            yield from self._look(roles, {key: groups[key] for key in some})
            done, size = done + len(some), min(2 * size, at_once)

    def _look(self, roles: Sequence[str], groups: Mapping[Key, Sorted]) -> Iterator[Outlook]:
        """The outlook of all these groups together, in each of these roles."""
        rows, nodes = None, [nodes for _, nodes in groups.values()]
        for role in roles:
            if rows is None or self._contenders.problem.engine == "vllm":  # Shapes depend on the role there.
                rows = self._contenders.rows(
                    [self._shapes.forms(role, counts) for counts, _ in groups.values()]
                )
            found = self._contenders.of(role, rows)
            limits = limits_of(self._pipelines, role, found)
            ends = np.searchsorted(found.rows.group, np.arange(len(groups) + 1)).tolist()
            arrays = found.rows.node, found.rows.degrees, found.rows.stages, found.of_chunks
            known_degrees = list(self._pipelines.stage_kinds.degrees)
            yield Outlook(role, list(groups), nodes, limits, ends, *arrays, known_degrees)

    def _take(self, outlooks: Iterable[Outlook]) -> None:
        for each in outlooks:
            for key, candidates in each.groups(self._made):
                self._known.setdefault((each.role, *key, self._limited_by), candidates)

    def _made(self, found: Outlook, row: int) -> Pipeline:
        pipeline = self._pipelines.of(found.role, found.shape(row), found.of_chunks[row].tolist())
        assert pipeline is not None, "contenders fit"
        return pipeline
