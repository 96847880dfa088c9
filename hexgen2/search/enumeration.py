"""Exhaustive search: every partition of the GPUs into groups with roles, up to symmetry.

GPUs of one node are alike, so groups are counted per node. Each node in turn gives its GPUs to groups that
contain it, in non-increasing order, or leaves them idle. A branch that cannot beat the best any more,
even if every GPU left worked at its own best, is cut off; so is one that costs more than the budget.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from hexgen2.region import Region
from hexgen2.search.bounds.upper_bounds import UpperBound
from hexgen2.search.problem import ROLES, Group, Solution, counts_of
from hexgen2.search.state import SearchState
from hexgen2.search.ties import exceeds

ASSUMPTIONS = (
    "every partition of the GPUs into replicas was tried or excluded",
    "tensor-parallel groups stay inside a node",
    "each replica has the plan that the planner finds best for it alone; stage orders are improved locally",
)

MAX_GPUS = 12
"""Clusters with more GPUs are not enumerated."""
SOLUTION_BRANCHES = 8
"""To evaluate a solution takes as long as so many branches."""

Counts = tuple[int, ...]


def enumerate_all(state: SearchState, most: int | None = None) -> bool:
    """Offer every solution that may beat the state's best.

    Parameters
    ----------
    most : give up after so many branches, each solution counted as SOLUTION_BRANCHES

    Returns
    -------
    True if nothing was left out; the state's best is then optimal and its own bound, or the state's target
    out of reach
    """
    complete = _Enumeration(state, most).run()
    if complete:
        state.incumbent.proved = True
        if state.incumbent.best and state.stopping.target_req_s == math.inf:
            rentals = ("every rental within the budget counts",) if state.budget else ()
            state.bounded_by(UpperBound(state.incumbent.best.req_s, "enumeration", (*rentals, *ASSUMPTIONS)))
    return complete


class _Enumeration:
    def __init__(self, state: SearchState, most: int | None) -> None:
        self._state, self._left = state, most
        problem = state.evaluator.problem
        self._sizes = tuple(len(gpus) for gpus in problem.node_gpus)
        self._capacity: dict[tuple[str, Counts], float] = {}
        self._groups: list[Group] = []
        # Of the colocated ones among them, if they may work for others.
        self._regions: list[Region] = []
        self._mixes = problem.mixes
        self._wanted = 0.0 if state.stopping.target_req_s == math.inf else state.stopping.target_req_s

    def run(self) -> bool:
        return self._descend(self._sizes, 0, None, dict.fromkeys(ROLES["flexible"], 0.0))

    def _descend(self, free: Counts, node: int, below: Counts | None, done: dict[str, float]) -> bool:
        """Try all ways to go on; False if cut short or done."""
        state = self._state
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                return False
        if state.stopping.out_of_time() or state.reached():
            return False
        if state.budget and not state.budget.affordable(Solution(tuple(self._groups))):
            return True
        best = max(state.incumbent.best.net_req_s if state.incumbent.best else 0.0, self._wanted * (1 - 1e-8))
        if not exceeds(state.evaluator.limits.with_rest(done, free, self._regions), best):
            return True
        if node == len(free):
            if self._left is not None:
                self._left -= SOLUTION_BRANCHES
            found = state.evaluator.evaluate(Solution(tuple(self._groups)))
            state.offer(state.evaluator.reordered(found), "enumerate")
            return True
        idle = tuple(0 if n == node else f for n, f in enumerate(free))
        if not self._descend(idle, node + 1, None, done):
            return False
        for counts in self._patterns_with(free, node):
            if below is not None and counts > below:
                continue
            rest = tuple(f - c for f, c in zip(free, counts, strict=True))
            for role in self._state.evaluator.problem.roles:
                gained = self._capacity_of(role, counts)
                if gained <= 0:
                    continue
                group = Group(role, counts_of(dict(enumerate(counts))))
                self._groups.append(group)
                mixed = (
                    [state.evaluator.limits.plan_region(group)] if role == "colocated" and self._mixes else []
                )
                self._regions += [region for region in mixed if region]
                complete = self._descend(rest, node, counts, {**done, role: done[role] + gained})
                self._groups.pop()
                del self._regions[len(self._regions) - len(mixed) :]
                if not complete:
                    return False
        return True

    def _capacity_of(self, role: str, counts: Counts) -> float:
        key = (role, counts)
        if key not in self._capacity:
            plan = self._state.evaluator.planner.plan(role, counts_of(dict(enumerate(counts))))
            self._capacity[key] = plan.capacity_req_s if plan else 0.0
        return self._capacity[key]

    def _patterns_with(self, free: Counts, node: int) -> Iterator[Counts]:
        """Every group that takes at least one GPU of `node` and none of the nodes before it."""
        ranges = [range(1)] * node + [range(1, free[node] + 1)] + [range(f + 1) for f in free[node + 1 :]]
        return itertools.product(*ranges)
