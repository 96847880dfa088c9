"""HexGen-2's algorithm as the paper prints it (sections 3.2 to 3.4), for study.

The number of groups K comes from the memory estimate and never changes. Phase one partitions, phase
two plans and solves the max flow, and the refinement knows one step: the flow-guided swap between
replicas at capacity and replicas with room, which in the example of Appendix E.3 hands over a single
GPU. It ends when no such step improves.
"""

from __future__ import annotations

from collections.abc import Iterator

from cost_model.errors import InfeasibleError
from hexgen2.placement import Placement
from hexgen2.search.evaluation import Evaluation
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.local_search import guided_steps
from hexgen2.search.partition.initial import estimated_groups, initial_solution
from hexgen2.search.problem import Problem, Solution
from hexgen2.search.state import SearchState
from hexgen2.search.steps import MoveGpus, Neighbour, Step, SwapGpus
from hexgen2.search.ties import exceeds
from hexgen2.strategies.base import SearchOptions, run_search

NAME = "hexgen2-paper"


def search(problem: Problem, options: SearchOptions) -> Placement:
    """The placement where the guided swaps end. The seed changes nothing: no step is random."""

    def explore(state: SearchState) -> None:
        current = paper_start(state)
        while not state.stopping.out_of_time():
            better = _best_guided_swap(state, current)
            if better is None:
                break
            step, current = better
            state.offer(current, step)
        require_found(state, f"{NAME} keeps to {estimated_groups(problem)} groups, and too few of them")

    return run_search(NAME, problem, options, explore)


def paper_start(state: SearchState) -> Evaluation:
    """Phase one with the paper's K, and its first max flow."""
    groups = estimated_groups(state.evaluator.problem)
    start = valued(state.evaluator, initial_solution(state.evaluator, groups))
    state.offer(start, f"start with {groups} groups")
    return start


def valued(evaluator: Evaluator, solution: Solution) -> Evaluation:
    """The solution's plans and max flow, its stages ordered for the KV routes (Appendix A)."""
    return evaluator.reordered(evaluator.evaluate(solution))


def require_found(state: SearchState, why: str, other: str = "hexgen2") -> None:
    """Nothing, or an error that speaks for this strategy alone: `other` may find a placement.

    Raises
    ------
    InfeasibleError : no solution so far carries a request
    """
    if state.incumbent.best is not None and state.incumbent.best.req_s > 0:
        return
    problem = state.evaluator.problem
    if state.stopping.cut:
        raise InfeasibleError(
            f"no feasible placement found within the time limit on {problem.cluster.name}; raise --time-limit"
        )
    within = " within the targets" if problem.targets.given else ""
    raise InfeasibleError(
        f"no feasible placement on {problem.cluster.name}: {why} can hold {problem.model.name}{within}; "
        f"use --strategy {other}"
    )


def _best_guided_swap(state: SearchState, current: Evaluation) -> tuple[Step, Evaluation] | None:
    """The step of highest score, if it improves on the current one."""
    best: tuple[Step, Evaluation] | None = None
    threshold = current.score
    for step, solution in _guided_swaps(state.evaluator, current):
        tried = valued(state.evaluator, solution)
        if exceeds(tried.score, threshold):
            best, threshold = (step, tried), tried.score
        if state.stopping.out_of_time():
            break
    return best


def _guided_swaps(evaluator: Evaluator, current: Evaluation) -> Iterator[Neighbour]:
    """Of the flow-guided steps, swaps and moves of one GPU that empty no group."""
    for step, solution in guided_steps(evaluator, current):
        one_gpu = isinstance(step, SwapGpus) or (isinstance(step, MoveGpus) and step.count == 1)
        if one_gpu and len(solution.groups) == len(current.solution.groups):
            yield step, solution
