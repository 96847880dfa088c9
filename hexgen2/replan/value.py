"""The value of a solution in a re-plan: its throughput less the requests missed during the moves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hexgen2.replan.migration import Migrator, same_service
from hexgen2.replan.previous import OldReplica
from hexgen2.search.evaluation import Evaluation, PlannedReplica
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.params import Params
from hexgen2.search.planning.contenders import PlanLimit
from hexgen2.search.planning.plan import GroupPlan, Mixtures
from hexgen2.search.planning.shards import shard_bytes, shards_of
from hexgen2.search.problem import Group, NodeCounts, Problem, Solution
from hexgen2.search.ties import exceeds


class ReplanEvaluator(Evaluator):
    """Maximises req_s * horizon - missed requests; the cost of a solution is its missed requests per second
    of the horizon. Running groups keep their stages unless new ones gain enough."""

    def __init__(self, problem: Problem, params: Params, migrator: Migrator) -> None:
        super().__init__(problem, params)
        self.migrator = migrator
        self._running: dict[NodeCounts, list[OldReplica]] = {}
        for old in migrator.previous.intact:
            self._running.setdefault(old.counts, []).append(old)
        self._chosen: dict[Group, GroupPlan | None] = {}

    def way_cost(self, replicas: Sequence[PlannedReplica], req_s: float) -> tuple[float, float]:
        horizon = self.migrator.terms.horizon_s
        found = self.migrator.successors(replicas)
        idle = math.fsum(s.replica.capacity_req_s * min(1.0, s.absent_s / horizon) for s in found)
        return self.migrator.missed_requests(found, req_s) / horizon, idle

    def plan_of(self, group: Group) -> GroupPlan | None:
        """The best plan; for GPUs on which a replica runs, the plan that serves most within the horizon."""
        if group.counts not in self._running:
            return self.planner.plan(group.role, group.counts)
        if group not in self._chosen:
            horizon = self.migrator.terms.horizon_s
            best, most = None, 0.0
            for plan, absent_s in self._options(group):
                served = plan.capacity_req_s * max(0.0, horizon - absent_s)
                if best is None or exceeds(served, most):
                    best, most = plan, served
            self._chosen[group] = best
        return self._chosen[group]

    def limit_of(self, group: Group) -> PlanLimit | None:
        """A running replica may have a plan that the planner never makes, so its plan itself is the limit."""
        if group.counts not in self._running:
            return super().limit_of(group)
        plan = self.plan_of(group)
        if plan is None:
            return None
        mixes = group.role == "colocated" and self.problem.mixes
        return PlanLimit(plan.capacity_req_s, self.planner.region(plan) if mixes else None)

    def mixtures_of(self, replica: PlannedReplica, waits_s: float | None) -> Mixtures:
        """Running replicas keep their engines' settings."""
        if replica.group.counts not in self._running:
            return super().mixtures_of(replica, waits_s)
        return Mixtures.of([replica.plan], [self.planner.region(replica.plan, waits_s)])

    def _options(self, group: Group) -> Iterator[tuple[GroupPlan, float]]:
        """Plans with the seconds for which the replica would be absent: the old replica unchanged, its stages
        in this role or with another batch size, and the best plan of the group with all weights to load."""
        planner, terms = self.planner, self.migrator.terms
        drain_s = 0.0
        for old in self._running.get(group.counts, ()):
            assert old.stages is not None
            drain_s = max(drain_s, old.drain_s)
            for own in ((old.batch, old.engine), (None, None)):
                plan = planner.plan_layers(group.role, old.stages, *own)
                if plan:
                    same = same_service(group.role, plan, old)
                    yield plan, 0.0 if same else old.drain_s / 2 + terms.turn_s
        plan = planner.plan(group.role, group.counts)
        if plan:
            shards = shards_of([stage[1:] for stage in plan.stages])
            largest = max(shard_bytes(self.problem.model, rank) for stage in shards for rank in stage)
            yield plan, drain_s / 2 + terms.restart_s + largest / terms.load_bytes_s

    def unchanged(self) -> Evaluation:
        """The surviving replicas if nothing is done. A replica whose batch no longer fits the workload gets
        one that does; one that does not fit at all serves nothing."""
        groups: list[Group] = []
        replicas: list[PlannedReplica] = []
        for old in self.migrator.previous.intact:
            assert old.stages is not None
            group = Group(old.role, old.counts)
            ways = ((old.batch, old.engine), (None, None))
            plans = (self.planner.plan_layers(old.role, old.stages, *own) for own in ways)
            plan = next((plan for plan in plans if plan), None)
            if plan:
                replicas.append(PlannedReplica(len(groups), group, plan))
            groups.append(group)
        return self.with_plans(Solution(tuple(groups)), *_by_role(replicas))

    def adopt(self, evaluation: Evaluation) -> Evaluation:
        """Value the replicas of another evaluator's solution with their plans unchanged; the result is kept
        for that solution unless a better one is known."""
        found = self.with_plans(evaluation.solution, *_by_role(evaluation.replicas))
        known = self._evaluated.get(found.solution.key)
        if known is None or found.better_than(known):
            self._evaluated[found.solution.key] = found
        return found

    def polished(self, evaluation: Evaluation) -> Evaluation:
        """The same groups with the best plans and stage orders found by trying them replica by replica."""
        best = evaluation
        for _ in range(self.params.polish_rounds):
            before = best
            for place in range(len(best.replicas)):
                best = self._polish(best, place)
            if best is before:
                break
        return best

    def _polish(self, start: Evaluation, place: int) -> Evaluation:
        best, replica = start, start.replicas[place]
        plans = [plan for plan, _ in self._options(replica.group)]
        for plan in dict.fromkeys([*plans, *self.orders.of(replica)]):
            replicas = list(start.replicas)
            replicas[place] = replace(replica, plan=plan)
            tried = self.with_plans(start.solution, *_by_role(replicas))
            if tried.better_than(best):
                best = tried
        return best


def _by_role(replicas: Sequence[PlannedReplica]) -> tuple[tuple[PlannedReplica, ...], ...]:
    """The prefill, decode and colocated replicas."""
    roles = ("prefill", "decode", "colocated")
    return tuple(tuple(r for r in replicas if r.group.role == role) for role in roles)
