"""Orders of a replica's stages: KV caches go from stage to stage, so some orders use faster links."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from hexgen2.search.evaluation import Evaluation, PlannedReplica
from hexgen2.search.flow.duals import Duals
from hexgen2.search.flow.routes import RouteUse
from hexgen2.search.params import Params
from hexgen2.search.planning.plan import LESS, GroupPlan, Planner
from hexgen2.search.problem import Solution
from hexgen2.search.ties import exceeds, greatest, least


class Flows(Protocol):
    """What values replicas with other plans: the evaluator."""

    def with_plans(
        self,
        solution: Solution,
        prefill: tuple[PlannedReplica, ...],
        decode: tuple[PlannedReplica, ...],
        colocated: tuple[PlannedReplica, ...] = (),
    ) -> Evaluation:
        """The solution's value where each replica runs the plan it has here."""

    def duals(self, evaluation: Evaluation) -> Duals | None:
        """What the flow's bottlenecks are worth."""

    def route_use(self, prefill: PlannedReplica, decode: PlannedReplica) -> RouteUse:
        """What a request occupies between two replicas."""


class StageOrders:
    """Finds the orders that suit the KV routes best."""

    def __init__(self, params: Params, planner: Planner) -> None:
        self._params, self._planner = params, planner
        self._orders: dict[tuple, list[GroupPlan]] = {}

    def improved(
        self, start: Evaluation, flows: Flows, stop: Callable[[], bool] = lambda: False
    ) -> Evaluation:
        """Stage orders that move KV caches faster, replica by replica, until none does (Appendix A).

        An order is judged by what it takes of the full links at their duals, and a little by the transfer
        time, to all partners, each weighted by its capacity; so the flow is solved once per round. Such a
        climb may end early, so it also starts where all pipelines of one side, or both, are turned round,
        whichever is best. Once it is time to stop, replicas keep the order that they have.
        """
        sides = [(side, tuple(map(self._turned, side))) for side in (start.prefill, start.decode)]
        ways = [
            flows.with_plans(start.solution, prefill, decode, start.colocated)
            for prefill, decode in list(dict.fromkeys(itertools.product(*sides)))[1:]
        ]
        starts = [start, *greatest(ways, lambda way: way.score)[:1]]
        return greatest(
            [self._climb(way, flows, stop) for way in starts if way is start or not stop()],
            lambda way: way.score,
        )[0]

    def _turned(self, replica: PlannedReplica) -> PlannedReplica:
        """The replica with its stages in the opposite order, if that keeps its capacity."""
        wanted = tuple(s.shape for s in reversed(replica.stages))
        plans = (plan for plan in self.of(replica) if tuple(s.shape for s in plan.stages) == wanted)
        return replace(replica, plan=next(plans, replica.plan))

    def _climb(self, start: Evaluation, flows: Flows, stop: Callable[[], bool]) -> Evaluation:
        best = start
        for _ in range(self._params.reorder_rounds):
            if stop():
                break
            duals = flows.duals(best)
            prefill = tuple(
                p if stop() else self._reordered(p, best.decode, flows, duals, True) for p in best.prefill
            )
            decode = tuple(
                d if stop() else self._reordered(d, prefill, flows, duals, False) for d in best.decode
            )
            tried = flows.with_plans(best.solution, prefill, decode, best.colocated)
            if not exceeds(tried.score, best.score):
                break
            best = tried
        return best

    def _reordered(
        self,
        replica: PlannedReplica,
        partners: tuple[PlannedReplica, ...],
        flows: Flows,
        duals: Duals | None,
        sending: bool,
    ) -> PlannedReplica:
        def cost(candidate: PlannedReplica) -> float:
            total = 0.0
            for partner in partners:
                use = flows.route_use(*((candidate, partner) if sending else (partner, candidate)))
                toll = duals.toll(use) if duals else 0.0
                total += (toll + self._params.transfer_share * use.transfer_s) * partner.plan.capacity_req_s
            return total

        candidates = [replace(replica, plan=plan) for plan in self.of(replica)]
        return least([replica, *candidates], cost)[0]

    def of(self, replica: PlannedReplica) -> list[GroupPlan]:
        """The replica's plan under other orders of its stages that keep its capacity; the layers are split
        anew for each. A gain in capacity is not counted (below 1 %: another stage has the LM head), for the
        bounds rest on the planner's best."""
        shape = tuple(s.shape for s in replica.stages)
        key = (replica.group.role, shape)
        if key not in self._orders:
            orders = dict.fromkeys(itertools.islice(itertools.permutations(shape), self._params.stage_orders))
            best = self._planner.plan(replica.group.role, replica.group.counts) or replica.plan
            most, kept = best.capacity_req_s, replica.plan.capacity_req_s * self._params.capacity_kept
            plans = self._planner.plan_shapes(replica.group.role, list(orders), kept * LESS)
            self._orders[key] = [
                replace(p, capacity_req_s=min(p.capacity_req_s, most))
                for p in plans
                if p and p.capacity_req_s >= kept
            ]
        return self._orders[key]
