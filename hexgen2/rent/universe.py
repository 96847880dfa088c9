"""The search over everything on offer, within one budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from hexgen2.rent.release import cheapest_alike, fitted
from hexgen2.search.budget import Budget
from hexgen2.search.enumeration import MAX_GPUS, enumerate_all
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.incumbent import Incumbent
from hexgen2.search.local_search import refine
from hexgen2.search.perturbation import perturb_and_refine
from hexgen2.search.problem import Solution
from hexgen2.search.state import SearchState
from hexgen2.search.ties import greatest_first

LISTED = 0.3
"""Once this share of the time limit has passed, linear programs do with the columns listed so far."""


def look_at_the_clock(state: SearchState) -> None:
    """Let linear programs over everything on offer end in time for a search."""
    state.evaluator.relaxed.stop = partial(state.stopping.spent, LISTED)
    state.evaluator.relaxed.over = state.stopping.out_of_time


def search_universe(state: SearchState, seed: int, effort: float, starts: Sequence[Solution]) -> None:
    """Search within state.budget; the result is the state's incumbent.

    First bounds what the budget can carry, and stops if that is less than the target. Then refines the given
    starts, those of the linear program, and the incumbent; enumerates small universes; and perturbs and
    refines until the effort is spent.
    """
    evaluator, budget, incumbent = state.evaluator, state.budget, state.incumbent
    params = evaluator.params
    assert budget is not None
    state.bounded_by(evaluator.relaxed.upper_bound(budget.per_hour))
    assert incumbent.bound is not None
    if incumbent.bound.req_s < state.stopping.target_req_s < math.inf:
        incumbent.proved = True
        return
    rounded = _linear_starts(evaluator, budget, state.stopping.out_of_time)
    linear = {solution.key: solution for solution in rounded if budget.affordable(solution)}
    state.spend(effort)
    for solution in starts:
        refine(state, solution, "start from another budget")
    ranked = greatest_first(linear.values(), lambda s: evaluator.evaluate(s).score)
    climbed = [refine(state, s, "start from the linear program") for s in ranked[: params.rental_climbs]]
    if incumbent.best is not None and not any(incumbent.best is found for found in climbed):
        refine(state, incumbent.best.solution, "start from the best rental")
    if len(evaluator.problem.cluster.gpu_ids) <= MAX_GPUS:
        enumerate_all(state, params.rental_branches)
    perturb_and_refine(state, seed, params.rental_perturbations)
    if incumbent.best is not None and incumbent.best.req_s > 0:
        incumbent.best = cheapest_alike(
            evaluator, incumbent.best, incumbent.best.req_s, state.stopping.out_of_time
        )


def fresh(state: SearchState) -> SearchState:
    """A new state for another budget or target, which shares evaluator, time limit, progress and trace."""
    incumbent, stopping = Incumbent(trace=state.incumbent.trace), state.stopping.with_target()
    return replace(state, incumbent=incumbent, stopping=stopping, budget=None)


def attempt(
    state: SearchState,
    seed: int,
    per_hour: float,
    starts: Sequence[Solution],
    target_req_s: float = float("inf"),
) -> SearchState:
    """Search within another budget (US dollars per hour); returns the state of that search."""
    tried = fresh(state)
    evaluator = state.evaluator
    tried.budget, tried.stopping.target_req_s = Budget(evaluator.problem, per_hour), target_req_s
    effort = evaluator.params.rental_attempt_effort
    search_universe(tried, seed, effort, [fitted(evaluator, tried.budget, s) for s in starts])
    state.stopping.cut = tried.stopping.cut
    return tried


def _linear_starts(evaluator: Evaluator, budget: Budget, stop: Callable[[], bool]) -> Iterator[Solution]:
    """Rounded solutions of the linear program over all GPU types, and until it is time to stop over each type
    alone."""
    problem = evaluator.problem
    types = problem.cluster.types
    for cards in (types, *((card,) for card in types)):
        if cards != types and stop():
            return
        nodes = [n for n, card in enumerate(problem.node_accelerator) if card in cards]
        yield evaluator.relaxed.start(budget.per_hour, nodes)
