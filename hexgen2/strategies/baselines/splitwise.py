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
from hexgen2.search.problem import Problem
from hexgen2.search.state import SearchState
from hexgen2.strategies.base import SearchOptions, run_search
from hexgen2.strategies.baselines.paper import require_found
from hexgen2.strategies.baselines.uniform import (
    Candidate,
    Replicas,
    UniformPlanner,
    as_solution,
    keep_best,
    nodes_by_type,
)

NAME = "splitwise"


def search(problem: Problem, options: SearchOptions) -> Placement:
    """The best cut and sizes, by enumeration. The seed changes nothing."""

    def explore(state: SearchState) -> None:
        keep_best(state, _candidates(state, nodes_by_type(problem)))
        require_found(state, f"no two pools of one type, with replicas inside a node as {NAME} wants them,")

    return run_search(NAME, problem, options, explore, evaluator=UniformPlanner.evaluator)


def _candidates(state: SearchState, types: dict[Accelerator, list[int]]) -> Iterator[Candidate]:
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
