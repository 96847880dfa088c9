"""The value of a solution: plans of its groups, KV routes between them, and the max flow.

Results are memoised by what they depend on; the flow is solved only if the replicas' capacities alone do not
decide it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hexgen2.region import Region
from hexgen2.search.bounds.relaxations import Relaxations
from hexgen2.search.bounds.upper_bounds import (
    best_mixture,
    best_split,
    mixed_rates,
    node_rates,
    node_regions,
)
from hexgen2.search.flow.duals import Duals, Stages
from hexgen2.search.flow.max_flow import Flow, FlowNetwork, settled, solve
from hexgen2.search.flow.regions import Share, shares_by_program
from hexgen2.search.flow.routes import RouteUse, pipeline_use, route_use
from hexgen2.search.flow.shared_use import SharedUse, shared_use
from hexgen2.search.knapsack import best_points, most_served, served
from hexgen2.search.operators import Alike
from hexgen2.search.params import DEFAULT, Params
from hexgen2.search.planning.plan import LESS, GroupPlan, PlannedStage, Planner
from hexgen2.search.problem import Group, NodeCounts, Problem, Solution
from hexgen2.search.ties import exceeds, greatest, least, ranks_above


@dataclass(frozen=True)
class PlannedReplica:
    """A group with its plan; index is its place in the solution."""

    index: int
    group: Group
    plan: GroupPlan

    @property
    def stages(self) -> tuple[PlannedStage, ...]:
        return self.plan.stages


@dataclass(frozen=True)
class Evaluation:
    """What a solution is worth, and why: its replicas, the flow network between them, and the maximum flow.

    Attributes
    ----------
    prefill, decode, colocated : replicas by role
    senders, receivers : prefill and decode replicas, and after them colocated ones that work for others
    network, flow : between senders and receivers; the capacity of a colocated one is its share
    regions : of the colocated replicas that may work for others
    score : guides the local search: throughput less cost, plus a small share of the replicas' capacities
    alone : [C] requests/s that each colocated replica serves by itself; where colocated replicas share links
        with KV routes, they take precedence
    cost_req_s, idle_req_s : what it costs to get to this solution, over time (see Evaluator.way_cost)
    """

    solution: Solution
    prefill: tuple[PlannedReplica, ...]
    decode: tuple[PlannedReplica, ...]
    network: FlowNetwork
    flow: Flow
    score: float
    colocated: tuple[PlannedReplica, ...]
    alone: np.ndarray
    cost_req_s: float = 0.0
    idle_req_s: float = 0.0
    senders: tuple[PlannedReplica, ...] = ()
    receivers: tuple[PlannedReplica, ...] = ()
    regions: tuple[Region, ...] = ()

    def region_of(self, replica: PlannedReplica) -> Region | None:
        """What the replica can do if it is a mixed one, else None."""
        if replica.index not in self.mixed:
            return None
        return self.regions[[r.index for r in self.colocated].index(replica.index)]

    @cached_property
    def mixed(self) -> frozenset[int]:
        """Which groups are colocated ones that work for others, by their places in the solution."""
        ends = {replica.index for replica in (*self.senders, *self.receivers)}
        return frozenset(replica.index for replica in self.colocated if replica.index in ends)

    def role_of(self, replica: PlannedReplica) -> str:
        """The replica's role in a placement: "mixed" if it is colocated and works for others, too."""
        return "mixed" if replica.index in self.mixed else replica.group.role

    @cached_property
    def plans(self) -> dict[tuple[str, NodeCounts], GroupPlan]:
        """The plan of each group."""
        return {(r.group.role, r.group.counts): r.plan for r in self.replicas}

    @cached_property
    def routes(self) -> np.ndarray:
        """[P, D] what each route carries, in requests/s: of all maximum flows the one to read (see
        flow.settled)."""
        return settled(self.network, self.flow).routes

    @property
    def kv_limited(self) -> bool:
        """Whether KV routes, and not the replicas, limit the flow."""
        return self.flow.value < min(self.network.prefill.sum(), self.network.decode.sum()) * (1 - 1e-6)

    @property
    def req_s(self) -> float:
        return self.flow.value + float(self.alone.sum())

    @property
    def replicas(self) -> tuple[PlannedReplica, ...]:
        """All of them, prefill, decode, colocated."""
        return (*self.prefill, *self.decode, *self.colocated)

    @property
    def net_req_s(self) -> float:
        """The objective of the search: throughput less the cost of getting there."""
        return self.req_s - self.cost_req_s

    @property
    def rank(self) -> tuple[float, float, float]:
        """Greater is better. Ties in net throughput go to the solution that changes least, then to the higher
        score."""
        return self.net_req_s, -self.idle_req_s, self.score

    def better_than(self, other: Evaluation) -> bool:
        """Whether it ranks above the other."""
        return ranks_above(self.rank, other.rank)


SMALL = 1e-9
"""Requests/s that are rounding."""
_NEVER = math.inf
"""Stretches the transfers of routes that are not to be used."""


def _capacity(replicas: Sequence[PlannedReplica]) -> float:
    return math.fsum(replica.plan.capacity_req_s for replica in replicas)


class Evaluator:
    """Evaluates solutions of one problem, and counts the evaluations and the routes they looked at."""

    def __init__(self, problem: Problem, params: Params = DEFAULT, planner: Planner | None = None) -> None:
        self.problem, self.params = problem, params
        self.planner = planner or Planner(problem)
        self.evaluations = self.routes = 0
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
        self._evaluated: dict[tuple, Evaluation] = {}
        self._reordered_keys: set[tuple] = set()
        self._uses: dict[tuple, RouteUse] = {}
        self._ordered: dict[tuple, list[GroupPlan]] = {}

    @cached_property
    def alike(self) -> Alike:
        """Which groups and nodes take each other's place."""
        return Alike(self.planner.classes.class_of, self.problem.node_links)

    @cached_property
    def relaxed(self) -> Relaxations:
        """The relaxations of the problem, with the same plans."""
        return Relaxations(self.planner, self.problem)

    def plan_of(self, group: Group) -> GroupPlan | None:
        """The plan that a group runs."""
        return self.planner.plan(group.role, group.counts)

    def way_cost(self, replicas: Sequence[PlannedReplica], req_s: float) -> tuple[float, float]:
        """What it costs to get to these replicas, which carry req_s: requests/s of the flow, and of the
        replicas' own capacities, averaged over time. Nothing here: nothing runs yet."""
        return 0.0, 0.0

    def evaluate(self, solution: Solution, near: Evaluation | None = None) -> Evaluation:
        """The solution's value. Groups that the model does not fit in stay idle. Groups that `near` has too
        keep its stage orders, unless the solution was evaluated before."""
        key = solution.key
        known = self._evaluated.get(key)
        if known is None:
            self.evaluations += 1
            plans = near.plans if near else {}
            sides = (self._replicas(solution, role, plans) for role in ("prefill", "decode", "colocated"))
            known = self._evaluated[key] = self.with_plans(solution, *sides)
        return known

    def reordered(self, evaluation: Evaluation) -> Evaluation:
        """The same solution with the stage orders that suit its KV routes best, if the routes limit it."""
        limit = min(evaluation.network.prefill.sum(), evaluation.network.decode.sum())
        key = evaluation.solution.key
        if evaluation.flow.value >= limit * (1 - 1e-6) or key in self._reordered_keys:
            return self._evaluated.get(key, evaluation)
        self._reordered_keys.add(key)
        if evaluation.mixed:
            return evaluation
        self._evaluated[key] = self._reorder(evaluation)
        return self._evaluated[key]

    def at_full_load(self, evaluation: Evaluation) -> Evaluation:
        """The same replicas at the load that they carry without latency targets."""
        planner = self.planner

        def full(replicas: tuple[PlannedReplica, ...], queue_of: Callable) -> tuple[PlannedReplica, ...]:
            plans = (replace(r.plan, capacity_req_s=queue_of(r.plan).capacity_req_s) for r in replicas)
            return tuple(replace(r, plan=plan) for r, plan in zip(replicas, plans, strict=True))

        prefill = full(evaluation.prefill, planner.prefill_queue)
        decode = full(evaluation.decode, planner.decode_queue)
        colocated = full(evaluation.colocated, lambda plan: planner.colocated_queues(plan)[0])
        return self.with_plans(evaluation.solution, prefill, decode, colocated)

    def each_alone(self, evaluation: Evaluation) -> Evaluation:
        """The same replicas where colocated ones work for themselves only."""
        return self._with_shares(
            evaluation.solution, evaluation.prefill, evaluation.decode, evaluation.colocated
        )

    def score_limit(self, solution: Solution, threshold: float) -> float:
        """An upper limit on the score without routes or flow: what the replicas alone could do.

        Plans are made only if the GPUs' own rates leave hope of passing the threshold.
        """
        limit = self._limit(solution, threshold, self._rate_limit, self._rate_region)
        if limit > threshold and any(group.role == "colocated" for group in solution.groups):
            # To plan a group for both phases takes long.
            limit = self._limit(solution, threshold, self._capacity_limit, self._region_limit)
        if limit <= threshold:
            return limit
        return self._limit(solution, threshold, self._plan_capacity, self.plan_region)

    def limit_with_rest(
        self, done: Mapping[str, float], free: Sequence[int], done_regions: Sequence[Region] = ()
    ) -> float:
        """An upper limit on the flow of groups with these capacities (requests/s by role; those of colocated
        groups that may work for others as regions) once the free GPUs (counted per node) have joined any role
        at their best rates."""
        if self.problem.mixes:
            regions = list(done_regions)
            regions += [region.times(n) for region, n in zip(self._node_regions, free, strict=True) if n]
            return most_served(done["prefill"], done["decode"], regions)[0]
        if "colocated" in self.problem.roles:
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
        plateau = self.params.plateau_share * math.fsum(capacity.values())
        if capacity["colocated"] and self.problem.mixes:
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
            plan = self.plan_of(group)
            self._plan_regions[group.counts] = self.planner.region(plan) if plan else None
        return self._plan_regions[group.counts]

    def _rate_limit(self, group: Group) -> float:
        key = (group.role, group.counts)
        known = self._rate_limits.get(key)
        if known is None:
            rates = self._rates[group.role]
            known = self._rate_limits[key] = math.fsum(count * rates[node] for node, count in group.counts)
        return known

    def _region_limit(self, group: Group) -> Region | None:
        return self.planner.region_limit(group.counts)

    def _capacity_limit(self, group: Group) -> float:
        if group.role != "colocated":
            return self._plan_capacity(group)
        limit = self._region_limit(group)
        return limit.balanced if limit else 0.0

    def _plan_capacity(self, group: Group) -> float:
        plan = self.plan_of(group)
        return plan.capacity_req_s if plan else 0.0

    def _replicas(
        self, solution: Solution, role: str, plans: Mapping[tuple[str, NodeCounts], GroupPlan]
    ) -> tuple[PlannedReplica, ...]:
        planned = (
            (index, group, plans.get((role, group.counts)) or self.plan_of(group))
            for index, group in enumerate(solution.groups)
            if group.role == role
        )
        return tuple(PlannedReplica(index, group, plan) for index, group, plan in planned if plan)

    def with_plans(
        self,
        solution: Solution,
        prefill: tuple[PlannedReplica, ...],
        decode: tuple[PlannedReplica, ...],
        colocated: tuple[PlannedReplica, ...] = (),
    ) -> Evaluation:
        """The solution's value where each replica runs the plan it has here."""
        if not (colocated and self.problem.mixes):
            return self._with_shares(solution, prefill, decode, colocated)
        regions = tuple(self.planner.region(replica.plan) for replica in colocated)
        points = best_points(_capacity(prefill), _capacity(decode), regions)
        shares = [Share(min(p, d), max(0.0, p - d), max(0.0, d - p)) for p, d in points]
        found = self._with_shares(solution, prefill, decode, colocated, shares, regions)
        most = served(_capacity(prefill), _capacity(decode), points)
        if found.req_s >= most * (1 - 1e-6):
            return found
        shares = self._shares_by_program(prefill, decode, colocated, regions)
        return self._with_shares(solution, prefill, decode, colocated, shares, regions)

    def _shares_by_program(
        self,
        prefill: tuple[PlannedReplica, ...],
        decode: tuple[PlannedReplica, ...],
        mixed: tuple[PlannedReplica, ...],
        regions: Sequence[Region],
    ) -> list[Share]:
        """What each mixed replica does where the links limit the flow."""
        senders, receivers = (*prefill, *mixed), (*decode, *mixed)
        sends, takes = (np.array([r.plan.capacity_req_s for r in side]) for side in (senders, receivers))
        routes, shared = self._routes_between(senders, receivers)
        own = [pipeline_use(self.problem, r.stages) for r in mixed]
        at = np.repeat(np.arange(len(mixed)), [len(use.resources) for use in own])
        resource, busy_s = (
            np.concatenate(parts) for parts in ([use.resources for use in own], [use.busy_s for use in own])
        )
        return shares_by_program(FlowNetwork(sends, takes, routes, shared), regions, resource, at, busy_s)

    def _routes_between(
        self, senders: tuple[PlannedReplica, ...], receivers: tuple[PlannedReplica, ...]
    ) -> tuple[np.ndarray, SharedUse | None]:
        """[S, R] requests/s that each route can carry alone, and what all of them share."""
        self.routes += len(senders) * len(receivers)
        uses = [[self.route_use(p, d) for d in receivers] for p in senders]
        transfers = np.array(
            [
                use.transfer_s * self._slowed(use, d)
                for row in uses
                for use, d in zip(row, receivers, strict=True)
            ]
        )
        # Inside a replica nothing is moved.
        carried = np.divide(1.0, transfers, out=np.full(len(transfers), np.inf), where=transfers > 0)
        return carried.reshape(len(senders), len(receivers)), self._shared(uses)

    def _with_shares(
        self,
        solution: Solution,
        prefill: tuple[PlannedReplica, ...],
        decode: tuple[PlannedReplica, ...],
        colocated: tuple[PlannedReplica, ...],
        shares: Sequence[Share] = (),
        regions: tuple[Region, ...] = (),
    ) -> Evaluation:
        """The solution's value where colocated replicas have these shares in their regions; each serves its
        own requests at its capacity if none are given."""
        alone, busy = self._alone(colocated, shares)
        sending = [(r, share.sent) for r, share in zip(colocated, shares, strict=False) if share.sent > SMALL]
        taking = [
            (r, share.received) for r, share in zip(colocated, shares, strict=False) if share.received > SMALL
        ]
        senders, receivers = (*prefill, *(r for r, _ in sending)), (*decode, *(r for r, _ in taking))
        routes, shared = self._routes_between(senders, receivers)
        for i, j in itertools.product(range(len(prefill), len(senders)), range(len(decode), len(receivers))):
            if senders[i].index == receivers[j].index:
                routes[i, j] = SMALL
        network = FlowNetwork(
            np.array([*(r.plan.capacity_req_s for r in prefill), *(sent for _, sent in sending)]),
            np.array([*(r.plan.capacity_req_s for r in decode), *(received for _, received in taking)]),
            routes,
            shared.beside(busy) if shared and colocated else shared,
        )
        flow = solve(network)
        carried = flow.value + float(alone.sum())
        total = _capacity(prefill) + _capacity(decode) + _capacity(colocated)
        cost, idle = self.way_cost((*prefill, *decode, *colocated), carried)
        score = carried - cost + self.params.plateau_share * (total - idle)
        return Evaluation(
            *(solution, prefill, decode, network, flow, score, colocated, alone, cost, idle),
            *(senders, receivers, regions),
        )

    def _slowed(self, use: RouteUse, decode: PlannedReplica) -> float:
        """1, or very much where a transfer alone makes the output tokens of its request late on average, so
        that such a route carries nothing."""
        target_s, gaps = self.problem.targets.tpot_s, self.problem.costs.osl - 1
        if target_s is None:
            return 1.0
        spare_s = max(self.params.transfer_part * target_s, target_s - decode.plan.latency_s)
        return 1.0 if use.transfer_s <= gaps * spare_s else _NEVER

    def _alone(
        self, colocated: tuple[PlannedReplica, ...], shares: Sequence[Share]
    ) -> tuple[np.ndarray, np.ndarray]:
        """[C] requests/s that colocated replicas serve alone: their shares, or capacities, unless their
        pipelines share links that cannot carry all of it; and how busy that keeps each link, network card and
        uplink."""
        capacity = np.array([r.plan.capacity_req_s for r in colocated])
        if shares:
            capacity = np.array([share.alone for share in shares])
        shared = self._shared([[pipeline_use(self.problem, r.stages) for r in colocated]])
        if not colocated or shared is None:
            return capacity, np.zeros(0)
        # As routes from one source that can feed them all.
        flow = solve(FlowNetwork(capacity.sum(keepdims=True), capacity, capacity[None], shared)).routes
        return flow[0], shared.loads(flow)[: self.problem.shared_links.count]

    def _shared(self, uses: list[list[RouteUse]]) -> SharedUse | None:
        if self.problem.links == "pairwise":
            return None
        return shared_use(uses, self.problem.shared_links.count, self.problem.model.layers)

    def route_use(self, prefill: PlannedReplica, decode: PlannedReplica) -> RouteUse:
        """What a request occupies between two replicas, memoised."""
        return self._use_between(prefill.stages, decode.stages)

    def _use_between(self, prefill: Stages, decode: Stages) -> RouteUse:
        key = (prefill, decode)
        found = self._uses.get(key)
        if found is None:
            found = route_use(self.problem, prefill, decode)
            if self.problem.targets.given:
                # Near full load, KV caches wait for each other, and keep their memory on both sides.
                found = found.stretched(1 / self.params.link_share)
            self._uses[key] = found
        return found

    def duals(self, evaluation: Evaluation) -> Duals | None:
        """What the flow's bottlenecks are worth; None where the replicas' capacities alone decide."""
        network = evaluation.network
        limit = min(network.prefill.sum(), network.decode.sum())
        if evaluation.colocated or limit <= 0 or evaluation.flow.value >= limit * (1 - 1e-6):
            return None
        return Duals(
            network,
            [r.stages for r in evaluation.prefill],
            [r.stages for r in evaluation.decode],
            self._use_between,
            self.problem.shared_links.count,
            self.problem.model.layers,
        )

    def limit_by_duals(self, solution: Solution, near: Evaluation, duals: Duals) -> float:
        """An upper limit on the score by the duals of a solution nearby, whose stage orders it keeps."""
        sides = [
            [(replica.stages, replica.plan.capacity_req_s) for replica in side]
            for side in (self._replicas(solution, role, near.plans) for role in ("prefill", "decode"))
        ]
        alone = _capacity(self._replicas(solution, "colocated", near.plans))
        total = math.fsum(capacity for side in sides for _, capacity in side) + alone
        return duals.flow_bound(*sides) + alone + self.params.plateau_share * total

    def _reorder(self, start: Evaluation) -> Evaluation:
        """Stage orders that move KV caches faster, replica by replica, until none does (Appendix A).

        An order is judged by what it takes of the full links at their duals, and a little by the transfer
        time, to all partners, each weighted by its capacity; so the flow is solved once per round. Such a
        climb may end early, so it also starts where all pipelines of one side, or both, are turned round,
        whichever is best.
        """
        sides = [(side, tuple(map(self._turned, side))) for side in (start.prefill, start.decode)]
        ways = [
            self.with_plans(start.solution, prefill, decode, start.colocated)
            for prefill, decode in list(dict.fromkeys(itertools.product(*sides)))[1:]
        ]
        starts = [start, *greatest(ways, lambda way: way.score)[:1]]
        return greatest([self._reorder_from(way) for way in starts], lambda way: way.score)[0]

    def _turned(self, replica: PlannedReplica) -> PlannedReplica:
        """The replica with its stages in the opposite order, if that keeps its capacity."""
        wanted = tuple(s.shape for s in reversed(replica.stages))
        plans = (plan for plan in self.orders(replica) if tuple(s.shape for s in plan.stages) == wanted)
        return replace(replica, plan=next(plans, replica.plan))

    def _reorder_from(self, start: Evaluation) -> Evaluation:
        best = start
        for _ in range(self.params.reorder_rounds):
            duals = self.duals(best)
            prefill = tuple(self._reordered(p, best.decode, duals, sending=True) for p in best.prefill)
            decode = tuple(self._reordered(d, prefill, duals, sending=False) for d in best.decode)
            tried = self.with_plans(best.solution, prefill, decode, best.colocated)
            if not exceeds(tried.score, best.score):
                break
            best = tried
        return best

    def _reordered(
        self,
        replica: PlannedReplica,
        partners: tuple[PlannedReplica, ...],
        duals: Duals | None,
        sending: bool,
    ) -> PlannedReplica:
        def cost(candidate: PlannedReplica) -> float:
            total = 0.0
            for partner in partners:
                use = self.route_use(*((candidate, partner) if sending else (partner, candidate)))
                toll = duals.toll(use) if duals else 0.0
                total += (toll + self.params.transfer_share * use.transfer_s) * partner.plan.capacity_req_s
            return total

        candidates = [replace(replica, plan=plan) for plan in self.orders(replica)]
        return least([replica, *candidates], cost)[0]

    def orders(self, replica: PlannedReplica) -> list[GroupPlan]:
        """The replica's plan under other orders of its stages that keep its capacity; the layers are split
        anew for each. A gain in capacity is not counted (below 1 %: another stage has the LM head), for the
        bounds rest on the planner's best."""
        shape = tuple(s.shape for s in replica.stages)
        key = (replica.group.role, shape)
        if key not in self._ordered:
            orders = dict.fromkeys(itertools.islice(itertools.permutations(shape), self.params.stage_orders))
            best = self.planner.plan(replica.group.role, replica.group.counts) or replica.plan
            most, kept = best.capacity_req_s, replica.plan.capacity_req_s * self.params.capacity_kept
            plans = (self.planner.plan_shape(replica.group.role, order, kept * LESS) for order in orders)
            self._ordered[key] = [
                replace(p, capacity_req_s=min(p.capacity_req_s, most))
                for p in plans
                if p and p.capacity_req_s >= kept
            ]
        return self._ordered[key]
