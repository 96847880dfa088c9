"""Placements that several test files share: each is searched once per run, and nobody may change it."""

from __future__ import annotations

import functools

from hexgen2.placement import Placement
from hexgen2.search.problem import make_problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy

SETTING_1 = ("hexgen2-setting-1", "llama-2-70b", "HPHD")


@functools.cache
def searched(cluster: str, model: str, workload: str, strategy: str = "hexgen2", **problem: str) -> Placement:
    """What a strategy finds on a shipped cluster; `problem`: further options of make_problem."""
    made = make_problem(cluster, model, workload, **problem)  # type: ignore[arg-type]
    return find_strategy(strategy)(made, SearchOptions())
