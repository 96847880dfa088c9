"""Upper limits on the score of a solution: quicker to find than its value, they rule out most steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

from hexgen2.region import Region
from hexgen2.search.bounds.upper_bounds import (
    best_mixture,
    best_split,
    mixed_rates,
    node_rates,
    node_regions,
)
from hexgen2.search.knapsack import most_served
from hexgen2.search.params import Params
from hexgen2.search.planning.contenders import PlanLimit
from hexgen2.search.planning.plan import GroupPlan
from hexgen2.search.problem import Group, NodeCounts, Problem, Solution


class ScoreLimits:
    """Limits by the rates of single GPUs, by what no plan of a group exceeds, and by the groups' plans. They
    are the same where fewer GPUs can be used.

    Parameters
    ----------
    plan_of : the plan that a group runs; None if the model does not fit
    limit_of : what no such plan exceeds, which takes less time to find
    region_of : what a colocated group can do with its plan that may work for others
    """

    def __init__(
        self,
        problem: Problem,
        params: Params,
        plan_of: Callable[[Group], GroupPlan | None],
        limit_of: Callable[[Group], PlanLimit | None],
        region_of: Callable[[GroupPlan], Region],
    ) -> None:
        self._problem, self._params = problem, params
        self._plan_of, self._limit_of, self._region_of = plan_of, limit_of, region_of
        self._worth = 0.5  # of a prompt, an answer's being the rest of 1
        self._node_rates = node_rates(problem)
        self._rates = {
            "prefill": [p for p, _ in self._node_rates],
            "decode": [q for _, q in self._node_rates],
            "colocated": mixed_rates(problem),
        }
        self._node_regions = node_regions(problem) if problem.mixes else []
        self._rate_regions: dict[NodeCounts, Region] = {}
        self._plan_regions: dict[NodeCounts, Region | None] = {}
        self._rate_limits: dict[tuple[str, NodeCounts], float] = {}

    def roughly(self, solution: Solution, threshold: float) -> float:
        """An upper limit on the score by the GPUs' own rates, without plans, routes or flow."""
        return self._limit(solution, threshold, self._rate_limit, self._rate_region)

    def of(self, solution: Solution, threshold: float) -> float:
        """An upper limit on the score without routes or flow: what the replicas alone could do.

        Plans are made only if the GPUs' own rates leave hope of passing the threshold.
        """
        limit = self.roughly(solution, threshold)
        return limit if limit <= threshold else self.of_hopeful(solution, threshold)

    def of_hopeful(self, solution: Solution, threshold: float) -> float:
        """The same for a solution that may pass the threshold by the GPUs' own rates."""
        limit = self._limit(solution, threshold, self._capacity_limit, self._region_limit)
        if limit <= threshold:
            return limit
        return self._limit(solution, threshold, self._plan_capacity, self.plan_region)

    def with_rest(
        self, done: Mapping[str, float], free: Sequence[int], done_regions: Sequence[Region] = ()
    ) -> float:
        """An upper limit on the flow of groups with these capacities (requests/s by role; those of colocated
        groups that may work for others as regions) once the free GPUs (counted per node) have joined any role
        at their best rates."""
        if self._problem.mixes:
            regions = list(done_regions)
            regions += [region.times(n) for region, n in zip(self._node_regions, free, strict=True) if n]
            return most_served(done["prefill"], done["decode"], regions)[0]
        if "colocated" in self._problem.roles:
            mixed = zip(self._node_rates, self._rates["colocated"], free, strict=True)
            rest = [(p * n, q * n, r * n) for (p, q), r, n in mixed if n]
            return best_mixture(rest, done["prefill"], done["decode"]) + done["colocated"]
        rates = [(p * n, q * n) for (p, q), n in zip(self._node_rates, free, strict=True) if n]
        return best_split(rates, done["prefill"], done["decode"])

    def _limit(
        self,
        solution: Solution,
        threshold: float,
        capacity_of: Callable[[Group], float],
        region_of: Callable[[Group], Region | None],
    ) -> float:
        """An upper limit on the score with these limits of the groups; how far below the threshold it is does
        not matter."""
        capacity = {"prefill": 0.0, "decode": 0.0, "colocated": 0.0}
        for group in solution.groups:
            capacity[group.role] += capacity_of(group)
        prefill, decode = capacity["prefill"], capacity["decode"]
        plateau = self._params.plateau_share * math.fsum(capacity.values())
        if capacity["colocated"] and self._problem.mixes:
            regions = [r for g in solution.groups if g.role == "colocated" and (r := region_of(g))]
            # The worth of a prompt where another solution was best is a limit, too, and quicker to see.
            able = math.fsum(region.worth(self._worth) for region in regions)
            carried = self._worth * prefill + (1 - self._worth) * decode + able
            if carried + plateau > threshold:
                carried, self._worth = most_served(prefill, decode, regions)
        else:
            carried = min(prefill, decode) + capacity["colocated"]
        return carried + plateau

    def _rate_region(self, group: Group) -> Region:
        """What a colocated group could do if each of its GPUs worked alone at its best."""
        found = self._rate_regions.get(group.counts)
        if found is None:
            parts = [self._node_regions[node].times(count) for node, count in group.counts]
            found = self._rate_regions[group.counts] = functools.reduce(Region.plus, parts)
        return found

    def plan_region(self, group: Group) -> Region | None:
        """What a colocated group can do that may work for others; None if the model does not fit."""
        if group.counts not in self._plan_regions:
            plan = self._plan_of(group)
            self._plan_regions[group.counts] = self._region_of(plan) if plan else None
        return self._plan_regions[group.counts]

    def _rate_limit(self, group: Group) -> float:
        key = (group.role, group.counts)
        known = self._rate_limits.get(key)
        if known is None:
            rates = self._rates[group.role]
            known = self._rate_limits[key] = math.fsum(count * rates[node] for node, count in group.counts)
        return known

    def _region_limit(self, group: Group) -> Region | None:
        limit = self._limit_of(group)
        return limit.region if limit else None

    def _capacity_limit(self, group: Group) -> float:
        limit = self._limit_of(group)
        return limit.req_s if limit else 0.0

    def _plan_capacity(self, group: Group) -> float:
        plan = self._plan_of(group)
        return plan.capacity_req_s if plan else 0.0
