"""The truncated variant that HexGen-2 compares itself with: random swaps instead of guided ones.

Section 5.3: the same partition and the same max flow, but the GPUs that change places are drawn at
random, and a swap stays if it improves. Swaps keep the size of every group.
"""

from __future__ import annotations

import numpy as np

from hexgen2.placement import Placement
from hexgen2.search.operators import swaps
from hexgen2.search.partition.initial import estimated_groups
from hexgen2.search.problem import Problem
from hexgen2.search.state import SearchState
from hexgen2.search.ties import exceeds
from hexgen2.strategies.base import SearchOptions, run_search
from hexgen2.strategies.baselines.paper import paper_start, require_found, valued

NAME = "random-swap"
MAX_SWAPS = 2000
"""Swaps drawn in all; the same one may be drawn twice."""


def search(problem: Problem, options: SearchOptions) -> Placement:
    """The best placement that the seed's swaps lead to."""

    def explore(state: SearchState) -> None:
        current = paper_start(state)
        rng = np.random.default_rng(options.seed)
        for _ in range(MAX_SWAPS):
            if state.stopping.out_of_time():
                break
            pair = rng.permutation(len(current.solution.groups))[:2].tolist()
            steps = list(swaps(current.solution, pair[:1], pair[1:]))
            if not steps:
                continue
            name, solution = steps[int(rng.integers(len(steps)))]
            tried = valued(state.evaluator, solution)
            if exceeds(tried.score, current.score):
                current = tried
                state.offer(current, name)
        require_found(state, f"{NAME} keeps to {estimated_groups(problem)} groups, and too few of them")

    return run_search(NAME, problem, options, explore)
