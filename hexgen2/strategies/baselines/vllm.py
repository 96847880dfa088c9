"""vLLM's deployment on a mixed cluster: colocated replicas of one GPU type each, behind a router.

vLLM (Kwon et al., SOSP 2023) is started with one tensor and one pipeline degree: tensor-parallel groups
stay inside a node, pipelines cross nodes of the same type with as many GPUs on each. For each type the
shape is chosen whose copies serve most together. All copies of a type have that shape, so GPUs that no
whole copy fills stay idle.
"""

from __future__ import annotations

import math

from cost_model.hardware import Accelerator
from hexgen2.placement import Placement
from hexgen2.search.problem import Group, Problem, Solution
from hexgen2.search.state import SearchState
from hexgen2.search.ties import exceeds
from hexgen2.strategies.base import SearchOptions, run_search
from hexgen2.strategies.baselines.paper import require_found
from hexgen2.strategies.baselines.uniform import Replicas, UniformPlanner, copies, nodes_by_type

NAME = "vllm"
ROLE = "colocated"


def search(problem: Problem, options: SearchOptions) -> Placement:
    """The best shape for each type, by enumeration. The seed changes nothing."""

    def explore(state: SearchState) -> None:
        planner = state.evaluator.planner
        assert isinstance(planner, UniformPlanner)
        groups: tuple[Group, ...] = ()
        for accelerator, nodes in nodes_by_type(problem).items():
            if state.stopping.out_of_time():
                break
            degree, replicas = _best_copies(problem, accelerator, nodes)
            planner.fix_degree(accelerator, degree)
            groups += tuple(Group(ROLE, counts) for counts in replicas)
            state.offer(
                state.evaluator.evaluate(Solution(groups)),
                f"{accelerator.name}: {len(replicas)} replicas of tensor degree {degree}",
            )
        require_found(state, f"no one type, with the uniform shapes of {NAME},", other="hexgen")

    return run_search(
        NAME,
        problem,
        options,
        explore,
        fewest_gpus=1,
        objectives=("throughput",),
        evaluator=UniformPlanner.evaluator,
    )


def _best_copies(problem: Problem, accelerator: Accelerator, nodes: list[int]) -> tuple[int, Replicas]:
    """Tensor degree and replicas of the shape that serves most; no replicas if the model fits in none."""
    best: tuple[float, int, Replicas] = (0.0, 1, [])
    for degree in problem.model.tensor_degrees(max(len(problem.node_gpus[node]) for node in nodes)):
        planner = UniformPlanner(problem)
        planner.fix_degree(accelerator, degree)
        for _, _, replicas in copies(problem, nodes):
            plans = (planner.plan(ROLE, counts) for counts in replicas)
            served = math.fsum(plan.capacity_req_s for plan in plans if plan)
            if exceeds(served, best[0]):
                best = (served, degree, replicas)
    return best[1:]
