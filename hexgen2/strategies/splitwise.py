"""Splitwise's pools: fast GPUs compute prompts, slow ones generate tokens (Patel et al., ISCA 2024).

Every replica has GPUs of one type, inside one node, and all replicas of a type are alike. With the
types in the order of their FLOP/s, the search cuts the order in two and chooses a replica size for
each type. Where one type alone holds the model, its replicas are divided between the phases.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from cost_model.hardware import Accelerator
from hexgen2.placement import Placement
from hexgen2.search.plan import GroupPlan, Planner
from hexgen2.search.problem import Blocks, Group, Problem, Solution
from hexgen2.search.refine import SearchState
from hexgen2.strategies.base import SearchOptions, run_search
from hexgen2.strategies.paper import require_found, valued

NAME = "splitwise"

Step = tuple[str, Solution]
Replicas = list[Blocks]


class UniformPlanner(Planner):
    """Plans with one tensor degree in all stages, TP x PP."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._degrees_of = problem.model.tensor_degrees(max(len(gpus) for gpus in problem.node_gpus))
        self._uniform: dict[tuple[str, Blocks], GroupPlan | None] = {}

    def plan(self, role: str, blocks: Blocks) -> GroupPlan | None:
        """The plan of greatest capacity, or None if the model fits in no uniform shape."""
        key = (role, blocks)
        if key not in self._uniform:
            self.computed += 1
            shapes = (
                [(node, degree) for node, count in blocks for _ in range(count // degree)]
                for degree in self._degrees_of
                if all(count % degree == 0 for _, count in blocks)
            )
            plans = [plan for plan in (self.plan_shape(role, shape) for shape in shapes) if plan]
            self._uniform[key] = max(plans, key=lambda plan: plan.capacity_req_s, default=None)
        return self._uniform[key]


def search(problem: Problem, options: SearchOptions) -> Placement:
    """The best cut and sizes, by enumeration. The seed changes nothing."""

    def explore(state: SearchState) -> None:
        state.evaluator.planner = UniformPlanner(problem)
        keep_best(state, _candidates(state, nodes_by_type(problem)))
        require_found(state, f"no two pools of one type, with replicas inside a node as {NAME} wants them,")

    return run_search(NAME, problem, options, explore)


def nodes_by_type(problem: Problem) -> dict[Accelerator, list[int]]:
    """The nodes of each accelerator, the one of most FLOP/s first."""
    found: dict[Accelerator, list[int]] = {}
    for node, accelerator in enumerate(problem.node_accelerator):
        found.setdefault(accelerator, []).append(node)
    return dict(sorted(found.items(), key=lambda item: (-item[0].flops_s, item[0].name)))


def keep_best(state: SearchState, candidates: Iterator[Step]) -> None:
    """Value the candidates in turn, those whose replicas alone could beat the best so far."""
    for name, solution in candidates:
        if state.out_of_time():
            return
        best = state.best.req_s if state.best else 0.0
        if state.evaluator.score_limit(solution, best) > best:
            state.offer(valued(state.evaluator, solution), name)


def as_solution(prefill: Replicas, decode: Replicas) -> Solution:
    """Groups of both roles."""
    return Solution((*(Group("prefill", b) for b in prefill), *(Group("decode", b) for b in decode)))


def _candidates(state: SearchState, types: dict[Accelerator, list[int]]) -> Iterator[Step]:
    """Every cut with every size of each type, or every division of the only type that holds the model."""
    sizes = {accelerator.name: _sizes(state, nodes) for accelerator, nodes in types.items()}
    usable = [name for name, options in sizes.items() if options]
    if len(usable) == 1:
        for size, replicas in sizes[usable[0]].items():
            for count in range(1, len(replicas)):
                yield (
                    f"{count} of {len(replicas)} prefill, size {size}",
                    as_solution(replicas[:count], replicas[count:]),
                )
    for cut in range(1, len(usable)):
        for chosen in itertools.product(*(sizes[name] for name in usable)):
            pools = [sizes[name][size] for name, size in zip(usable, chosen, strict=True)]
            yield (
                f"prefill on {', '.join(usable[:cut])}; sizes {chosen}",
                as_solution(list(itertools.chain(*pools[:cut])), list(itertools.chain(*pools[cut:]))),
            )


def _sizes(state: SearchState, nodes: list[int]) -> dict[int, Replicas]:
    """The replicas that fill the nodes, for every size in which the model fits in some role."""
    node_gpus, planner = state.evaluator.problem.node_gpus, state.evaluator.planner
    found = {}
    for size in range(1, max(len(node_gpus[node]) for node in nodes) + 1):
        replicas: Replicas = [((node, size),) for node in nodes for _ in range(len(node_gpus[node]) // size)]
        if any(planner.plan(role, replicas[0]) for role in ("prefill", "decode")):
            found[size] = replicas
    return found
