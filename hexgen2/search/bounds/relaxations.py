"""Relaxations of a placement problem: the upper bounds that they prove, and the search's starting points."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Collection, Iterable
from functools import cached_property

import numpy as np

from hexgen2.search.bounds.column_generation import Relaxation
from hexgen2.search.bounds.columns import Column, list_columns, undominated, with_its_plan
from hexgen2.search.bounds.configuration_lp import ConfigurationLP
from hexgen2.search.bounds.repairs import Repairs
from hexgen2.search.bounds.rounding import lay_out, rounded
from hexgen2.search.bounds.upper_bounds import UpperBound, rates_bound
from hexgen2.search.planning.classes import LARGE, few_classes, widest_span
from hexgen2.search.planning.plan import Planner
from hexgen2.search.problem import ROLES, Problem, Solution
from hexgen2.search.ties import greatest_first

CHOSEN = 1e-9
"""Groups of a column in a solution that are more than rounding."""
LITTLE = 5e-4
"""A bound that is refined until it is close enough, or for now, is left as it is once a round tightens it by
no more."""
AT_ONCE, MOST_AT_ONCE, FEW_AT_ONCE = 40, 160, 16
"""Groups planned before a program is solved again; up to the second where a bound is refined, the third on
large clusters, where time may end it at any time."""
NEARLY = 0.8
"""Groups that bring so much of what their GPUs cost, at the duals, are among those that solutions are filled
up with."""
MOST_PLANNED = 2000
"""And before an integer program is solved."""


class Relaxations:
    """The configuration LP of one problem (the planner's, or one that differs in its phases), and its integer
    program. Budgets are in US dollars per hour for the GPUs in use.

    Attributes
    ----------
    classes : of nodes, as its columns see them
    stop : whether it is time to do with the columns listed so far, some at least
    over : whether it is time to do with none
    hopeless : whether there will not be time for all columns, now that this share of them is listed
    enough : bounds of so many requests/s are tight enough; to refine them further takes time
    patient : whether to refine a bound even by little; otherwise there will be time for that later
    """

    def __init__(self, planner: Planner, problem: Problem | None = None) -> None:
        self._planner, self._problem = planner, problem or planner.problem
        self.classes = few_classes(self._problem, planner.classes)
        self.stop: Callable[[], bool] = lambda: False
        self.over: Callable[[], bool] = lambda: False
        self.hopeless: Callable[[float], bool] = lambda listed: False
        self.enough, self.patient = 0.0, True
        self._cheapest: dict[float, tuple[float, Solution]] = {}

    @property
    def _complete(self) -> bool:
        """Whether the columns are all that there are, and span as many nodes as any replica may."""
        return self._listed[1] and self._planner.span <= widest_span(self._problem)

    @cached_property
    def _listed(self) -> tuple[list[Column], bool]:
        """Columns, and whether they are all that there are."""

        def stop(listed: float) -> bool:
            return self.stop() or self.hopeless(listed)

        return list_columns(self._planner, self._problem, self.classes, stop, self.over)

    def take_columns(self, other: Relaxations) -> None:
        """Take the columns that another one of the same planner has listed, as far as groups have these roles
        here: to list them takes long."""
        listed, complete = other._listed
        roles, mixes = self._problem.roles, self._problem.mixes
        self.classes = other.classes
        self._listed = [c if mixes else c.alone for c in listed if c.role in roles], complete

    def apart(self) -> Relaxations:
        """The same relaxations, whose further plans and solutions neither count nor show in these."""
        other = copy.copy(self)
        other.columns = list(self.columns)
        other._lp, other._kv_free_lp = self._lp.apart(), self._kv_free_lp.apart()
        other._planner = self._planner.counting_anew()
        return other

    @property
    def listed(self) -> bool:
        """Whether the columns are there."""
        return "_listed" in vars(self)

    def list_columns(self) -> bool:
        """List the columns, unless they are there; whether there was time for all."""
        return self._listed[1]

    @cached_property
    def columns(self) -> list[Column]:
        """The groups to choose from. Those that a program has chosen are worth what their plans are."""
        return undominated(self._listed[0], self.stop)

    def _solved(self, lp: ConfigurationLP, budget: float, simple: bool = False) -> Relaxation:
        """The solution of a program over the columns, once the groups that it chooses have plans: what is
        planned is worth no more than before, so others may be chosen then (column generation the other way
        round). Those are planned next that are worth most at the duals. What the solution is worth is a bound
        at any time.

        Parameters
        ----------
        simple : leave out what colocated groups could do for others
        """

        def columns() -> list[Column]:
            return _simple(self.columns) if simple else self.columns

        few = not self.enough and len(self._problem.usable) > LARGE
        found, at_once, before = lp.solve(columns(), budget), FEW_AT_ONCE if few else AT_ONCE, math.inf
        while found.upper_bound > self.enough and not self.stop():
            chosen = np.flatnonzero(found.amounts > CHOSEN).tolist()
            if not len(found.duals) or all(self.columns[k].planned for k in chosen):
                break
            little = before - found.upper_bound < LITTLE * found.upper_bound
            if little and (self.enough or not self.patient):
                break
            loose = [k for k, column in enumerate(self.columns) if not column.planned]
            worth = lp.worth(columns(), found.duals)
            self._plan(greatest_first(loose, worth.tolist().__getitem__)[:at_once])
            before = found.upper_bound
            if self.enough:  # Of few GPUs, groups are planned sooner than the program is solved.
                at_once = min(2 * at_once, MOST_AT_ONCE)
            found = lp.solve(columns(), budget)
        return found

    def tighten(self, budget: float = math.inf) -> UpperBound:
        """The bound once more, with the plans that a search has made since, and further ones until it is time
        to stop."""
        counts = (self.classes.counts(column.pattern) for column in self.columns)
        pairs = zip(self.columns, counts, strict=True)
        self._plan([k for k, (column, n) in enumerate(pairs) if self._planner.knows(column.role, n)])
        return self.upper_bound(budget)

    def _plan(self, which: Iterable[int]) -> None:
        """Plan the groups of these columns, as far as there is time."""
        for k in which:
            if self.stop():
                break
            if self.columns[k].planned:
                continue
            counts = self.classes.counts(self.columns[k].pattern)
            self.columns[k] = with_its_plan(self.columns[k], self._planner, self._problem, counts)

    @cached_property
    def _lp(self) -> ConfigurationLP:
        """The program, with KV transfers where routes share links."""
        return ConfigurationLP(self.classes, with_kv=self._problem.links == "shared")

    @cached_property
    def _kv_free_lp(self) -> ConfigurationLP:
        """The program without KV transfers."""
        return ConfigurationLP(self.classes, with_kv=False)

    def start(
        self,
        budget: float = math.inf,
        nodes: Collection[int] | None = None,
        pair_roles: bool = False,
        roles: Collection[str] = ROLES["flexible"],
    ) -> Solution:
        """The linear program rounded to whole groups with these roles, within the budget and on these nodes
        (by default all). What colocated groups could do for others is left out: the program is solved many
        times, and the search finds that sooner."""

        if nodes is None and "colocated" in roles and self.patient:
            self._solved(self._lp, budget, simple=True)
        columns = [column for column in _expected(self.columns) if column.role in roles]
        if nodes is not None:
            classes = self.classes.nodes
            inside = {which for which, members in enumerate(classes) if set(members) <= set(nodes)}
            columns = [c for c in columns if inside.issuperset(which for which, _ in c.pattern)]
        return rounded(self._lp, self.classes, columns, budget, pair_roles, self.stop)

    def repairs(self) -> Repairs:
        """What fills up solutions with groups that are worth about as much as the best mixture's."""
        columns = _expected(self.columns)
        found = self._lp.solve(columns)
        worth = self._lp.worth(columns, found.duals) if len(found.duals) else np.ones(len(columns))
        near = [columns[k] for k in np.flatnonzero(worth >= NEARLY).tolist()]
        return Repairs(self._lp, self.classes, near, self._planner)

    def upper_bound(self, budget: float = math.inf) -> UpperBound:
        """The bound on any placement within the budget by the linear program; by the rates of single GPUs
        where replicas may span more nodes than columns do."""
        if not self._complete:
            return rates_bound(self._problem)
        found = self._solved(self._lp, budget).upper_bound
        free = self._kv_free_lp.solve(self.columns, budget).upper_bound
        divided = "groups of GPUs can be divided, and their KV caches routed at will"
        return UpperBound(found, "linear program", (divided, *self._assumptions()), free)

    def whole(
        self,
        budget: float = math.inf,
        branches: int = 1000,
        time_s: float | None = None,
        known: float = 0.0,
    ) -> tuple[Solution, UpperBound]:
        """The solution of the integer program, laid out on nodes (none if it is no better than one of `known`
        requests/s), and the bound that the program proves within so many branches or seconds. First the
        groups are planned that a better solution may have."""
        end_s = None if time_s is None else time.monotonic() + time_s
        relaxed = self._solved(self._lp, budget)
        hopeful = np.flatnonzero(self._lp.most_groups(self.columns, relaxed, known)).tolist()
        self._plan([k for k in hopeful if not self.columns[k].planned][:MOST_PLANNED])
        left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
        found = self._lp.solve_whole(self.columns, budget, branches, left_s, known)
        free = self._kv_free_lp.solve(self.columns, budget).upper_bound
        assumptions = ("KV caches can be routed at will", *self._assumptions())
        bound = UpperBound(found.upper_bound, "integer program", assumptions, free)
        if not self._complete:
            bound = rates_bound(self._problem)
        return lay_out(self.classes, self.columns, found.amounts), bound

    def cheapest(self, req_s: float, branches: int, time_s: float | None = None) -> tuple[float, Solution]:
        """US dollars per hour below which no placement carries req_s, and groups on nodes that cost that if
        all goes well: by the integer program, after so many branches or seconds at most, once the groups that
        it chooses have plans. Infinity if nothing carries req_s at any price, 0 where replicas may span more
        nodes than columns do."""
        if req_s not in self._cheapest:
            self._cheapest[req_s] = self._find_cheapest(req_s, branches, time_s)
        return self._cheapest[req_s]

    def _find_cheapest(self, req_s: float, branches: int, time_s: float | None) -> tuple[float, Solution]:
        if not self._complete:
            return 0.0, Solution()
        least, amounts = self._lp.cheapest(self.columns, req_s)
        while self._plan_chosen(amounts):
            least, amounts = self._lp.cheapest(self.columns, req_s)
        solution, end_s = Solution(), None if time_s is None else time.monotonic() + time_s
        while least < math.inf and not self.stop():
            left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
            bound, amounts = self._lp.cheapest_whole(self.columns, req_s, branches, left_s)
            least, solution = max(least, bound), lay_out(self.classes, self.columns, amounts)
            if not self._plan_chosen(amounts):
                break
        return least, solution

    def _plan_chosen(self, amounts: np.ndarray) -> bool:
        """Plan the groups of a solution; whether there were any left to plan, and time."""
        chosen = np.flatnonzero(amounts > CHOSEN).tolist()
        loose = [k for k in chosen if not self.columns[k].planned]
        self._plan(loose)
        return bool(loose) and not self.stop()

    @property
    def _coarse(self) -> bool:
        """Whether classes hold nodes with other links."""
        return self.classes is not self._planner.classes

    def _assumptions(self) -> tuple[str, ...]:
        """What the bounds by programs rest on."""
        problem, span = self._problem, self._planner.span
        limited = span < len(problem.node_gpus)
        return (
            "no plan of a group is faster than the planner's best",
            "tensor-parallel groups stay inside a node",
            *(("replicas are such as vLLM runs",) if problem.engine == "vllm" else ()),
            *((f"a replica spans at most {span} nodes",) if limited else ()),
            *(("nodes of one kind are as near as the nearest",) if self._coarse else ()),
        )


def _expected(columns: list[Column]) -> list[Column]:
    """The columns without what colocated groups could do for others; those without plans are worth as much of
    their limits as most plans are that were made."""
    usual = dict.fromkeys(ROLES["flexible"], 1.0)
    for role in usual:
        shares = [
            column.capacity_req_s / column.limit_req_s
            for column in columns
            if column.planned and column.role == role and column.capacity_req_s
        ]
        usual[role] = float(np.median(shares)) if shares else 1.0
    return [column.alone if column.planned else column.worth(usual[column.role]) for column in columns]


def _simple(columns: list[Column]) -> list[Column]:
    """The columns without what colocated groups could do for others."""
    return [column.alone for column in columns]
