"""The value of a solution: plans of its groups, KV routes between them, and the max flow.

Results are memoised by what they depend on; the flow is solved only if the replicas' capacities alone do not
decide it.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from hexgen2.region import Point, Region
from hexgen2.search.bounds.relaxations import Relaxations
from hexgen2.search.evaluation import Evaluation, PlannedReplica
from hexgen2.search.flow.duals import Duals, Stages
from hexgen2.search.flow.max_flow import MANY_PAIRS, FlowNetwork, solve
from hexgen2.search.flow.regions import MixedFlow, Share, flow_by_program
from hexgen2.search.flow.routes import NO_ROUTE, RouteUse, pipeline_use, route_use
from hexgen2.search.flow.shared_use import SharedUse, shared_use
from hexgen2.search.knapsack import best_points, served
from hexgen2.search.operators import Alike
from hexgen2.search.params import DEFAULT, Params
from hexgen2.search.partition.parts import near_parts
from hexgen2.search.planning.contenders import PlanLimit
from hexgen2.search.planning.plan import GroupPlan, Mixtures, Planner
from hexgen2.search.planning.waiting_prompts import mean_waiting_s
from hexgen2.search.problem import Group, NodeCounts, Phases, Problem, Solution
from hexgen2.search.score_limits import ScoreLimits
from hexgen2.search.stage_orders import StageOrders
from hexgen2.search.ties import first_greatest

SMALL = 1e-9
"""Requests/s that are rounding."""
NEAR_PAIRS = 2500
"""Of more pairs of replicas, those in one part of the cluster have routes, and some others."""
ROUTES_AWAY = 4
"""Routes of a replica to other parts of the cluster, where there are too many for all."""
ROUNDING = 1e-6
"""Share of a linear program's value that may be the solver's rounding."""
MOST_PAIRS = 200_000
"""Between more pairs of replicas, links do not decide what each replica does: that program takes seconds."""
QUICK_PAIRS = 2000
"""With more, that program takes as long as it would save."""
MOST_TRIED = 200
"""Of more mixed replicas, one plan makes little difference, and to try others takes seconds."""
WAITS_TRIED = 3
"""How often replicas are divided between both phases anew, because those that send then take another time."""
_NEVER = math.inf
"""Stretches the transfers of routes that are not to be used."""


def _capacity(replicas: Sequence[PlannedReplica]) -> float:
    return math.fsum(replica.capacity_req_s for replica in replicas)


def _best_plans(
    carried: tuple[float, float], mixtures: Sequence[Mixtures], points: Sequence[Point]
) -> tuple[list[int], list[Point]]:
    """The numbers of the plans with which replicas serve most if KV caches move freely, beside so many
    prompts/s and answers/s of others, and what they do then: near the points, which are best if a replica
    could run all of its plans at once."""

    def with_plans(numbers: Sequence[int]) -> list[Point]:
        return best_points(
            *carried, [each.regions[number] for each, number in zip(mixtures, numbers, strict=True)]
        )

    numbers = [each.nearest(point) for each, point in zip(mixtures, points, strict=True)]
    tried = [numbers, [0] * len(numbers)]
    alternatives = zip(mixtures, points, strict=True) if len(mixtures) <= MOST_TRIED else ()
    for k, (each, point) in enumerate(alternatives):
        if point not in each.widest.corners:  # One at most; the ends of its side may be of different plans.
            others = (number for number in range(len(each.plans)) if number != numbers[k])
            tried += [[*numbers[:k], number, *numbers[k + 1 :]] for number in others]
    found = [(each, with_plans(each)) for each in tried]
    return first_greatest(found, [served(*carried, points) for _, points in found])


class Evaluator:
    """Evaluates solutions of one problem, and counts the evaluations and the routes they looked at.

    Attributes
    ----------
    limits, orders : upper limits on scores; orders of the replicas' stages
    """

    def __init__(self, problem: Problem, params: Params = DEFAULT, planner: Planner | None = None) -> None:
        self.problem, self.params = problem, params
        self.planner = planner or Planner(problem)
        self.evaluations = self.routes = 0
        self._evaluated: dict[tuple, Evaluation] = {}
        self._reordered_keys: set[tuple] = set()
        # What follows is the same where fewer GPUs can be used.
        self.limits = ScoreLimits(problem, params, self.plan_of, self.limit_of, self.region_of)
        self.orders = StageOrders(params, self.planner)
        self._uses: dict[tuple, RouteUse] = {}

    def of_part(self, free: Mapping[int, int]) -> Evaluator:
        """For solutions with so many GPUs of each of these nodes alone. Both share what they remember of
        groups and routes."""
        part = copy.copy(self)
        for name in ("alike", "parts", "relaxed"):
            vars(part).pop(name, None)
        part.problem = self.problem.only(free)
        part.evaluations = part.routes = 0
        part._evaluated, part._reordered_keys = {}, set()
        return part

    def with_phases(self, phases: Phases) -> Evaluator:
        """For solutions with these phases only, with the same plans. To find out what very many colocated
        replicas could do for others takes seconds, which one for "colocated" spares."""
        restricted = replace(self.problem, phases=phases)
        return Evaluator(restricted, self.params, self.planner.counting_anew())

    @cached_property
    def alike(self) -> Alike:
        """Which groups and nodes take each other's place."""
        return Alike(self.planner.classes.class_of, self.problem.node_links)

    @cached_property
    def parts(self) -> list[tuple[int, ...]]:
        """The parts of the cluster: nodes that are near each other."""
        return near_parts(self.problem)

    @cached_property
    def relaxed(self) -> Relaxations:
        """The relaxations of the problem, with the same plans."""
        return Relaxations(self.planner, self.problem)

    def plan_of(self, group: Group) -> GroupPlan | None:
        """The plan that a group runs."""
        return self.planner.plan(group.role, group.counts)

    def limit_of(self, group: Group) -> PlanLimit | None:
        """What no plan that a group runs exceeds; None if the model does not fit."""
        return self.planner.limit(group.role, group.counts)

    def region_of(self, plan: GroupPlan) -> Region:
        """What a colocated group with this plan can do that may work for others, with any size of chunks."""
        return self.planner.mixtures(plan).widest

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
            known = self._evaluated[key] = self._with_best_chunks(solution, *sides)
        return known

    def knows(self, solution: Solution) -> bool:
        """Whether the solution was evaluated before, with all that its replicas do for one another."""
        return solution.key in self._evaluated

    def limit_by_links(self, solution: Solution, near: Evaluation) -> float:
        """An upper limit on the score of a solution whose colocated replicas work for others, in a fraction
        of the time that `evaluate` takes: what links let them do if each had all sizes of chunks at once, and
        nobody waited for prompts. Infinity where it would take long, or nobody works for others."""
        known = self._evaluated.get(solution.key)
        if known is not None:
            return known.score
        if not self.problem.mixes:
            return math.inf
        prefill, decode, colocated = (
            self._replicas(solution, role, near.plans) for role in ("prefill", "decode", "colocated")
        )
        mixed = tuple(replica for replica in colocated if self.planner.moves_kv(replica.plan))
        pairs = (len(prefill) + len(mixed)) * (len(decode) + len(mixed))
        if not mixed or pairs > QUICK_PAIRS:
            return math.inf
        alone = _capacity([replica for replica in colocated if replica not in mixed])
        found = self._flow_by_program(prefill, decode, mixed, [self.region_of(r.plan) for r in mixed])
        total = _capacity(prefill) + _capacity(decode) + _capacity(colocated)
        return (found.req_s + alone) * (1 + ROUNDING) + self.params.plateau_share * total

    def reordered(self, evaluation: Evaluation, stop: Callable[[], bool] = lambda: False) -> Evaluation:
        """The same solution with the stage orders that suit its KV routes best, if the routes limit it, as
        far as there is time."""
        if evaluation.network.routes.size > MANY_PAIRS:
            return evaluation
        limit = min(evaluation.network.prefill.sum(), evaluation.network.decode.sum())
        key = evaluation.solution.key
        if evaluation.flow.value >= limit * (1 - 1e-6) or key in self._reordered_keys:
            return self._evaluated.get(key, evaluation)
        self._reordered_keys.add(key)
        if evaluation.mixed:
            return evaluation
        self._evaluated[key] = self.orders.improved(evaluation, self, stop)
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
        """The same replicas where colocated ones work for themselves only, with the plans that suit that."""
        colocated = tuple(replace(r, plan=r.own or r.plan, own=None) for r in evaluation.colocated)
        decode = self._beside(evaluation.decode, self._waits_s(evaluation.prefill))
        return self._with_shares(evaluation.solution, evaluation.prefill, decode, colocated)

    def _replicas(
        self, solution: Solution, role: str, plans: Mapping[tuple[str, NodeCounts], GroupPlan]
    ) -> tuple[PlannedReplica, ...]:
        planned = (
            (index, group, plans.get((role, group.counts)) or self.plan_of(group))
            for index, group in enumerate(solution.groups)
            if group.role == role
        )
        return tuple(PlannedReplica(index, group, plan) for index, group, plan in planned if plan)

    def mixtures_of(self, replica: PlannedReplica, waits_s: float | None) -> Mixtures:
        """The plans that a colocated replica with this one may run to work for others, where requests wait
        for so long for the prompts that others compute."""
        return self.planner.mixtures(replica.plan, waits_s)

    def _with_best_chunks(
        self,
        solution: Solution,
        prefill: tuple[PlannedReplica, ...],
        decode: tuple[PlannedReplica, ...],
        colocated: tuple[PlannedReplica, ...] = (),
    ) -> Evaluation:
        """The solution's value where each replica runs the plan it has here, but colocated ones take the size
        of chunks that suits what they do for others: first as if they had all sizes at once, then with those
        nearest to that."""
        if not (colocated and self.problem.mixes):
            return self.with_plans(solution, prefill, decode, colocated)
        able = [k for k, replica in enumerate(colocated) if self.planner.moves_kv(replica.plan)]
        alone = _capacity(tuple(replica for k, replica in enumerate(colocated) if k not in able))
        mixed, waits_s = [colocated[k] for k in able], self._waits_s(prefill)
        for _ in range(WAITS_TRIED):
            mixtures = [self.mixtures_of(replica, waits_s) for replica in mixed]
            if all(len(each.plans) == 1 for each in mixtures):
                return self.with_plans(solution, prefill, decode, colocated)
            carried = _capacity(prefill) + alone, _capacity(self._beside(decode, waits_s)) + alone
            widest = [each.widest for each in mixtures]
            numbers, points = _best_plans(carried, mixtures, best_points(*carried, widest))
            most = served(*carried, points)
            plans = [each.plans[number] for each, number in zip(mixtures, numbers, strict=True)]
            now_s = self._waits_s(prefill, plans, points)
            if now_s == waits_s:
                break
            waits_s = now_s

        def running(numbers: Sequence[int]) -> Evaluation:
            chosen = list(colocated)
            for k, each, number in zip(able, mixtures, numbers, strict=True):
                if number:
                    chosen[k] = replace(colocated[k], plan=each.plans[number], own=colocated[k].plan)
            return self.with_plans(solution, prefill, decode, tuple(chosen))

        found = running(numbers)
        pairs = (len(prefill) + len(mixed)) * (len(decode) + len(mixed))
        if found.req_s >= most * (1 - 1e-6) or pairs > MOST_PAIRS:
            return found
        beside = self._beside(decode, waits_s)
        by_program = self._flow_by_program(prefill, beside, tuple(mixed), widest).shares
        worked = [(share.alone + share.sent, share.alone + share.received) for share in by_program]
        near = [each.nearest(point) for each, point in zip(mixtures, worked, strict=True)]
        own = [0] * len(mixtures)
        for others in (each for each in (near, own) if each != numbers):
            tried = running(others)
            found = tried if tried.better_than(found) else found
        return found

    def with_plans(
        self,
        solution: Solution,
        prefill: tuple[PlannedReplica, ...],
        decode: tuple[PlannedReplica, ...],
        colocated: tuple[PlannedReplica, ...] = (),
    ) -> Evaluation:
        """The solution's value where each replica runs the plan it has here."""
        waits_s = self._waits_s(prefill)
        if not (colocated and self.problem.mixes):
            return self._with_shares(solution, prefill, self._beside(decode, waits_s), colocated)
        able = [k for k, replica in enumerate(colocated) if self.planner.moves_kv(replica.plan)]
        alone = _capacity(tuple(replica for k, replica in enumerate(colocated) if k not in able))
        for _ in range(WAITS_TRIED):
            regions = tuple(self.planner.region(replica.plan, waits_s) for replica in colocated)
            beside = self._beside(decode, waits_s)
            carried = _capacity(prefill) + alone, _capacity(beside) + alone
            points = best_points(*carried, [regions[k] for k in able])
            now_s = self._waits_s(prefill, [colocated[k].plan for k in able], points)
            if now_s == waits_s:
                break
            waits_s = now_s
        decode = beside
        shares = [Share(replica.plan.capacity_req_s, 0.0, 0.0) for replica in colocated]
        for k, (p, d) in zip(able, points, strict=True):
            shares[k] = Share(min(p, d), max(0.0, p - d), max(0.0, d - p))
        found = self._with_shares(solution, prefill, decode, colocated, shares, regions)
        most = served(*carried, points)
        if not able or found.req_s >= most * (1 - 1e-6):
            return found
        mixed = tuple(colocated[k] for k in able)
        if (len(prefill) + len(mixed)) * (len(decode) + len(mixed)) > MOST_PAIRS:
            apart = self._with_shares(solution, prefill, decode, colocated)
            return apart if apart.better_than(found) else found
        by_program = self._flow_by_program(prefill, decode, mixed, [regions[k] for k in able])
        for k, share in zip(able, by_program.shares, strict=True):
            shares[k] = share
        return self._with_shares(solution, prefill, decode, colocated, shares, regions)

    def _waits_s(
        self,
        prefill: Sequence[PlannedReplica],
        plans: Sequence[GroupPlan] = (),
        points: Sequence[Point] = (),
    ) -> float | None:
        """How long requests wait on average, before they decode, for the prompts of prefill replicas, and of
        colocated ones with these plans that do so much of both phases; None if nobody sends, or nobody counts
        it: targets leave more room than that takes."""
        if self.problem.pipeline != "pipelined" or self.problem.targets.given:
            return None
        senders = [("prefill", replica.plan, replica.plan.capacity_req_s) for replica in prefill]
        sending = zip(plans, points, strict=True)
        senders += [("colocated", plan, p - d) for plan, (p, d) in sending if p - d > SMALL]
        return mean_waiting_s(self.problem.costs, senders)

    def _beside(
        self, decode: tuple[PlannedReplica, ...], waits_s: float | None
    ) -> tuple[PlannedReplica, ...]:
        """The decode replicas, with what they serve beside requests that wait for so long."""
        if waits_s is None:
            return tuple(replace(replica, beside_req_s=None) for replica in decode)
        able = (self.planner.decodes_beside(replica.plan, waits_s) for replica in decode)
        return tuple(replace(each, beside_req_s=req_s) for each, req_s in zip(decode, able, strict=True))

    def _flow_by_program(
        self,
        prefill: tuple[PlannedReplica, ...],
        decode: tuple[PlannedReplica, ...],
        mixed: tuple[PlannedReplica, ...],
        regions: Sequence[Region],
    ) -> MixedFlow:
        """The flow, and what each mixed replica does, where the links limit it."""
        senders, receivers = (*prefill, *mixed), (*decode, *mixed)
        sends, takes = (np.array([r.capacity_req_s for r in side]) for side in (senders, receivers))
        routes, shared = self._routes_between(senders, receivers)
        own = [pipeline_use(self.problem, r.stages) for r in mixed]
        at = np.repeat(np.arange(len(mixed)), [len(use.resources) for use in own])
        resource, busy_s = (
            np.concatenate(parts) for parts in ([use.resources for use in own], [use.busy_s for use in own])
        )
        return flow_by_program(FlowNetwork(sends, takes, routes, shared), regions, resource, at, busy_s)

    def _routes_between(
        self, senders: tuple[PlannedReplica, ...], receivers: tuple[PlannedReplica, ...]
    ) -> tuple[np.ndarray, SharedUse | None]:
        """[S, R] requests/s that each route can carry alone, and what all of them share."""
        near = self._near_pairs(senders, receivers)
        self.routes += len(senders) * len(receivers) if near is None else int(near.sum())
        if near is None:
            uses = [[self.route_use(p, d) for d in receivers] for p in senders]
        else:
            uses = [
                [self.route_use(p, d) if here else NO_ROUTE for d, here in zip(receivers, row, strict=True)]
                for p, row in zip(senders, near.tolist(), strict=True)
            ]
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

    def _near_pairs(
        self, senders: tuple[PlannedReplica, ...], receivers: tuple[PlannedReplica, ...]
    ) -> np.ndarray | None:
        """[S, R] between which replicas there are to be routes: with more pairs than NEAR_PAIRS, between
        those in one part of the cluster, and some in others, so that parts help each other out; None for
        all."""
        if len(senders) * len(receivers) <= NEAR_PAIRS:
            return None
        part_of = {node: k for k, part in enumerate(self.parts) for node in part}
        of_sender, of_receiver = (
            np.array([part_of[replica.stages[0].node] for replica in side]) for side in (senders, receivers)
        )
        near = of_sender[:, None] == of_receiver[None, :]
        for i in range(len(senders)):
            for k in range(ROUTES_AWAY):
                near[i, (i * ROUTES_AWAY + k) % len(receivers)] = True
        for j in range(len(receivers)):
            for k in range(ROUTES_AWAY):
                near[(j * ROUTES_AWAY + k) % len(senders), j] = True
        return near

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
            np.array([*(r.capacity_req_s for r in decode), *(received for _, received in taking)]),
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
                goodput = self.problem.goal.objective == "goodput"
                share = self.params.goodput_link_share if goodput else self.params.link_share
                found = found.stretched(1 / share)
            self._uses[key] = found
        return found

    def duals(self, evaluation: Evaluation) -> Duals | None:
        """What the flow's bottlenecks are worth; None where the replicas' capacities alone decide."""
        network = evaluation.network
        limit = min(network.prefill.sum(), network.decode.sum())
        if network.routes.size > MANY_PAIRS:
            return None
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
