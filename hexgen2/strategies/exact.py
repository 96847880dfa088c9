"""Exhaustive search, for small clusters."""

from __future__ import annotations

from cost_model.errors import InputError
from hexgen2.placement import Placement
from hexgen2.search.enumeration import enumerate_all
from hexgen2.search.problem import Problem
from hexgen2.search.refine import SearchState
from hexgen2.strategies.base import SearchOptions, run_search

NAME = "exact"
MAX_GPUS = 12


def search(problem: Problem, options: SearchOptions) -> Placement:
    """The best of all placements.

    Raises
    ------
    InputError : more than MAX_GPUS GPUs
    """
    count = len(problem.cluster.gpu_ids)
    if count > MAX_GPUS:
        problem_text = f"{count} GPUs are too many to enumerate"
        raise InputError("--strategy", "exact", problem_text, "use --strategy hexgen2")

    def explore(state: SearchState) -> None:
        state.proved = enumerate_all(state)

    return run_search(NAME, problem, options, explore)
