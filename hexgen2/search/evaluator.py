"""The value of a solution: plans of its groups, KV routes between them, and the max flow.

Results are memoised by what they depend on; the flow is solved only if the replicas' capacities alone do not
decide it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hexgen2.search.bounds.relaxations import Relaxations
from hexgen2.search.bounds.upper_bounds import best_split, mixed_rates, node_rates
from hexgen2.search.flow.duals import Duals, Stages
from hexgen2.search.flow.max_flow import Flow, FlowNetwork, settled, solve
from hexgen2.search.flow.routes import RouteUse, pipeline_use, route_use
from hexgen2.search.flow.shared_use import SharedUse, shared_use
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
    network, flow : between prefill and decode replicas
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
        self._node_rates = node_rates(problem)
        self._rates = {
            "prefill": [p for p, _ in self._node_rates],
            "decode": [q for _, q in self._node_rates],
            "colocated": mixed_rates(problem),
        }
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
        return Relaxations(self.planner)

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
        self._evaluated[key] = self._reorder(evaluation)
        return self._evaluated[key]

    def at_full_load(self, evaluation: Evaluation) -> Evaluation:
        """The same prefill and decode replicas at the load that they carry without latency targets."""
        planner = self.planner

        def full(replicas: tuple[PlannedReplica, ...], queue_of: Callable) -> tuple[PlannedReplica, ...]:
            plans = (replace(r.plan, capacity_req_s=queue_of(r.plan).capacity_req_s) for r in replicas)
            return tuple(replace(r, plan=plan) for r, plan in zip(replicas, plans, strict=True))

        prefill = full(evaluation.prefill, planner.prefill_queue)
        decode = full(evaluation.decode, planner.decode_queue)
        return self.with_plans(evaluation.solution, prefill, decode, evaluation.colocated)

    def score_limit(self, solution: Solution, threshold: float) -> float:
        """An upper limit on the score without routes or flow: what the replicas alone could do.

        Plans are made only if the GPUs' own rates leave hope of passing the threshold.
        """
        limit = self._limit(solution, self._rate_limit)
        return limit if limit <= threshold else self._limit(solution, self._plan_capacity)

    def limit_with_rest(self, done: dict[str, float], free: Sequence[int]) -> float:
        """An upper limit on the flow of groups with these capacities (requests/s by role) once the free GPUs
        (counted per node) have joined either role at their best rates."""
        rates = [(p * n, q * n) for (p, q), n in zip(self._node_rates, free, strict=True) if n]
        return best_split(rates, done["prefill"], done["decode"])

    def _limit(self, solution: Solution, capacity_of: Callable[[Group], float]) -> float:
        capacity = {"prefill": 0.0, "decode": 0.0, "colocated": 0.0}
        for group in solution.groups:
            capacity[group.role] += capacity_of(group)
        served = min(capacity["prefill"], capacity["decode"]) + capacity["colocated"]
        return served + self.params.plateau_share * math.fsum(capacity.values())

    def _rate_limit(self, group: Group) -> float:
        key = (group.role, group.counts)
        known = self._rate_limits.get(key)
        if known is None:
            rates = self._rates[group.role]
            known = self._rate_limits[key] = math.fsum(count * rates[node] for node, count in group.counts)
        return known

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
        self.routes += len(prefill) * len(decode)
        alone, busy = self._alone(colocated)
        uses = [[self.route_use(p, d) for d in decode] for p in prefill]
        transfers = np.array(
            [
                use.transfer_s * self._slowed(use, d)
                for row in uses
                for use, d in zip(row, decode, strict=True)
            ]
        )
        shared = self._shared(uses)
        network = FlowNetwork(
            np.array([r.plan.capacity_req_s for r in prefill]),
            np.array([r.plan.capacity_req_s for r in decode]),
            (1 / transfers).reshape(len(prefill), len(decode)),
            shared.beside(busy) if shared and colocated else shared,
        )
        flow = solve(network)
        served = flow.value + float(alone.sum())
        total = float(network.prefill.sum() + network.decode.sum()) + _capacity(colocated)
        cost, idle = self.way_cost((*prefill, *decode, *colocated), served)
        score = served - cost + self.params.plateau_share * (total - idle)
        return Evaluation(solution, prefill, decode, network, flow, score, colocated, alone, cost, idle)

    def _slowed(self, use: RouteUse, decode: PlannedReplica) -> float:
        """1, or very much where a transfer alone makes the output tokens of its request late on average, so
        that such a route carries nothing."""
        target_s, gaps = self.problem.targets.tpot_s, self.problem.costs.osl - 1
        if target_s is None:
            return 1.0
        spare_s = max(self.params.transfer_part * target_s, target_s - decode.plan.latency_s)
        return 1.0 if use.transfer_s <= gaps * spare_s else _NEVER

    def _alone(self, colocated: tuple[PlannedReplica, ...]) -> tuple[np.ndarray, np.ndarray]:
        """[C] requests/s of colocated replicas: their capacities, unless their pipelines share links that
        cannot carry all of it; and how busy that keeps each link, network card and uplink."""
        capacity = np.array([r.plan.capacity_req_s for r in colocated])
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
        total = math.fsum(capacity for side in sides for _, capacity in side)
        return duals.flow_bound(*sides) + self.params.plateau_share * total

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
