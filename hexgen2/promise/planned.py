"""What a placement carries by the formulas under other costs than those that it was planned with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cost_model.base import CostModel
from hexgen2.cluster import Cluster
from hexgen2.placement import Placement
from hexgen2.replica import Replica
from hexgen2.search.evaluation import Evaluation, PlannedReplica
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.planning.plan import PlannedStage
from hexgen2.search.problem import Group, Problem, Solution, counts_of


def planned_req_s(placements: Sequence[Placement], cluster: Cluster, costs: CostModel) -> list[float]:
    """Requests/s of placements for one goal, as the search values them (so within its targets): the max flow
    through their replicas, each with its stages, layers, batch and engine settings. A replica that cannot
    serve within the targets carries nothing.

    Parameters
    ----------
    cluster, costs : instead of the placements' own; with the same nodes, for the same requests
    """
    first = placements[0]
    flexible = any(placement.phases == "flexible" for placement in placements)
    problem = Problem(
        first.cluster,
        cluster,
        first.model,
        first.workload,
        costs,
        first.cost_model.pipeline,  # type: ignore[arg-type]
        first.goal,
        frozenset(first.lost),
        first.cost_model.links,
        phases="flexible" if flexible else "disaggregated",
    )
    evaluator = Evaluator(problem)
    return [_req_s(evaluator, placement) for placement in placements]


def under_costs_of(evaluator: Evaluator, found: Evaluation) -> Evaluation | None:
    """A solution that was found under other costs, with its plans, under those of the evaluator; None if a
    replica cannot serve within the targets."""
    sides: list[tuple[PlannedReplica, ...]] = []
    for side in (found.prefill, found.decode, found.colocated):
        plans = [
            evaluator.planner.plan_layers(
                r.group.role,
                r.stages,
                None if r.group.role == "prefill" else int(r.plan.batch),
                r.plan.engine,
            )
            for r in side
        ]
        sides.append(tuple(replace(r, plan=plan) for r, plan in zip(side, plans, strict=True) if plan))
        if len(sides[-1]) < len(side):
            return None
    return evaluator.with_plans(found.solution, *sides)


def _req_s(evaluator: Evaluator, placement: Placement) -> float:
    sides: dict[str, list[PlannedReplica]] = {"prefill": [], "decode": [], "colocated": []}
    groups: list[Group] = []
    for replica in placement.replicas:
        planned = _planned(evaluator, replica, len(groups))
        groups.append(_group(evaluator.problem, replica))
        if planned is not None:
            sides[replica.role_of_group].append(planned)
    if not sides["colocated"] and not (sides["prefill"] and sides["decode"]):
        return 0.0
    found = evaluator.with_plans(Solution(tuple(groups)), *(tuple(side) for side in sides.values()))
    return found.req_s


def _planned(evaluator: Evaluator, replica: Replica, index: int) -> PlannedReplica | None:
    """The replica as the search sees it; None if it cannot serve within the targets."""
    problem = evaluator.problem
    nodes = [problem.cluster.nodes_of(stage.gpus)[0] for stage in replica.stages]
    stages = tuple(
        PlannedStage(
            node,
            len(s.gpus),
            s.layer_count,
            attention_dp=s.attention_data_parallel,
            expert_parallel=s.expert_parallel,
        )
        for node, s in zip(nodes, replica.stages, strict=True)
    )
    batch = None if replica.role == "prefill" else replica.max_batch
    engine = replica.engine.explicit(problem.pipeline, len(stages))
    plan = evaluator.planner.plan_layers(replica.role_of_group, stages, batch, engine)
    return None if plan is None else PlannedReplica(index, _group(problem, replica), plan)


def _group(problem: Problem, replica: Replica) -> Group:
    counts: dict[int, int] = {}
    for node in problem.cluster.nodes_of(replica.gpus):
        counts[node] = counts.get(node, 0) + 1
    return Group(replica.role_of_group, counts_of(counts))
