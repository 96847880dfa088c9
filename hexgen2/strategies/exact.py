"""Exhaustive search, for small clusters."""

from __future__ import annotations

from cost_model.errors import InputError
from hexgen2.placement import Placement
from hexgen2.search.budget import Budget
from hexgen2.search.enumeration import MAX_GPUS, enumerate_all
from hexgen2.search.problem import Problem
from hexgen2.search.state import SearchState
from hexgen2.strategies.base import SearchOptions, run_search

NAME = "exact"


def search(problem: Problem, options: SearchOptions) -> Placement:
    """The best of all placements.

    Raises
    ------
    InputError : more than MAX_GPUS GPUs, or a goal that takes more than one search
    """
    if problem.goal.objective == "cost" or problem.goal.frontier is not None:
        raise InputError("--strategy", NAME, "takes one budget only", "use --strategy hexgen2")
    count = len(problem.cluster.gpu_ids)
    if count > MAX_GPUS:
        problem_text = f"{count} GPUs are too many to enumerate"
        raise InputError("--strategy", "exact", problem_text, "use --strategy hexgen2")

    def explore(state: SearchState) -> None:
        if problem.goal.budget_per_hour is not None:
            state.budget = Budget(problem, problem.goal.budget_per_hour)
        enumerate_all(state)

    return run_search(NAME, problem, options, explore, rents=True)
