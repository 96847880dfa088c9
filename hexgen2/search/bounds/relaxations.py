"""The placement problem relaxed to programs over groups: what it proves, and where it starts the search."""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import cached_property

from hexgen2.search.bounds.columns import Column, list_columns, undominated
from hexgen2.search.bounds.configuration_lp import Master
from hexgen2.search.bounds.rounding import dive, lay_out
from hexgen2.search.bounds.upper_bounds import Limit, rates_limit
from hexgen2.search.planning.classes import widest_span
from hexgen2.search.planning.plan import Planner
from hexgen2.search.problem import Solution


class Relaxed:
    """The programs of one problem. A budget is in US dollars per hour for the GPUs in use."""

    def __init__(self, planner: Planner) -> None:
        self._planner, self._problem, self._classes = planner, planner.problem, planner.classes

    @cached_property
    def _complete(self) -> bool:
        return self._planner.span <= widest_span(self._problem)

    @cached_property
    def columns(self) -> list[Column]:
        return undominated(list_columns(self._planner))

    @cached_property
    def _master(self) -> Master:
        return Master(self._classes, with_kv=self._problem.links == "shared")

    @cached_property
    def _kv_free(self) -> Master:
        return Master(self._classes, with_kv=False)

    def start(
        self, budget: float = math.inf, nodes: Collection[int] | None = None, pair_roles: bool = False
    ) -> Solution:
        """The linear program, rounded, within the budget and on these nodes (all, if None are given)."""
        columns = self.columns
        if nodes is not None:
            classes = self._classes.nodes
            inside = {which for which, members in enumerate(classes) if set(members) <= set(nodes)}
            columns = [c for c in columns if inside.issuperset(which for which, _ in c.pattern)]
        return dive(self._master, self._classes, columns, budget, pair_roles)

    def limit(self, budget: float = math.inf) -> Limit:
        """Of any placement within the budget, by the linear program; where replicas may span more nodes than
        it knows of, by the GPUs' rates."""
        if not self._complete:
            return rates_limit(self._problem)
        found = self._master.solve(self.columns, budget).limit
        free = self._kv_free.solve(self.columns, budget).limit
        divided = "groups of GPUs can be divided, and their KV caches routed at will"
        return Limit(found, "linear program", (divided, *self._assumptions()), free)

    def whole(
        self, budget: float = math.inf, branches: int | None = None, time_s: float | None = None
    ) -> tuple[Solution, Limit]:
        """By the integer program: its solution laid out on nodes, and the limit that it proves."""
        found = self._master.solve_whole(self.columns, budget, branches, time_s)
        free = self._kv_free.solve(self.columns, budget).limit
        assumptions = ("KV caches can be routed at will", *self._assumptions())
        limit = Limit(found.limit, "integer program", assumptions, free)
        if not self._complete:
            limit = rates_limit(self._problem)
        return lay_out(self._classes, self.columns, found.amounts), limit

    def least_price(self, req_s: float) -> float:
        """US dollars per hour below which no placement carries req_s, by the linear program; infinity if
        none does. Nothing is known where replicas may span more nodes than it knows of."""
        if not self._complete:
            return 0.0
        return self._master.least_price(self.columns, req_s)

    def _assumptions(self) -> tuple[str, ...]:
        problem, span = self._problem, self._planner.span
        limited = span < len(problem.node_gpus)
        return (
            "no plan of a group is faster than the planner's best",
            "tensor-parallel groups stay inside a node",
            *(("replicas are such as vLLM runs",) if problem.engine == "vllm" else ()),
            *((f"a replica spans at most {span} nodes",) if limited else ()),
        )
