"""The search over all that could be rented, within one budget."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hexgen2.rent.release import cheapest_alike, fitted
from hexgen2.search.budget import Budget
from hexgen2.search.enumeration import MAX_GPUS, enumerate_all
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.local_search import SearchState, refine
from hexgen2.search.perturbation import perturb_and_refine
from hexgen2.search.problem import Solution
from hexgen2.search.ties import greatest_first

ATTEMPT_EFFORT = 2500
"""Effort (see SearchState) for one of many budgets."""
ENUMERATION = 40_000
"""Branches tried on universes of up to MAX_GPUS GPUs."""
CLIMBS = 4
"""Starts of the linear program that are refined: the best so many."""
MAX_KICKS = 200


def search_universe(state: SearchState, seed: int, effort: float, starts: Sequence[Solution]) -> None:
    """Bound what the budget carries, and leave it at that if the target is more. Climb from the starts, from
    those of the linear program and from the state's best; settle small universes by enumeration; perturb and
    climb on until the effort is spent."""
    evaluator, budget = state.evaluator, state.budget
    assert budget is not None
    state.bounded_by(evaluator.relaxed.limit(budget.per_hour))
    assert state.limit is not None
    if state.limit.req_s < state.target_req_s < math.inf:
        state.proved = True
        return
    linear = {s.key: s for s in _linear_starts(evaluator, budget) if budget.affordable(s)}
    state.effort_limit = state.effort + effort
    for solution in starts:
        refine(state, solution, "start from another budget")
    ranked = greatest_first(linear.values(), lambda s: evaluator.evaluate(s).score)
    climbed = [refine(state, s, "start from the linear program") for s in ranked[:CLIMBS]]
    if state.best is not None and not any(state.best is found for found in climbed):
        refine(state, state.best.solution, "start from the best rental")
    if len(evaluator.problem.cluster.gpu_ids) <= MAX_GPUS:
        enumerate_all(state, ENUMERATION)
    perturb_and_refine(state, seed, MAX_KICKS)
    if state.best is not None and state.best.req_s > 0:
        state.best = cheapest_alike(evaluator, state.best, state.best.req_s)


def fresh(state: SearchState) -> SearchState:
    """A state of its own for other budgets and targets; shares evaluator, deadline, progress and trace."""
    return replace(state, best=None, limit=None, proved=False, budget=None, target_req_s=float("inf"))


def attempt(
    state: SearchState,
    seed: int,
    per_hour: float,
    starts: Sequence[Solution],
    target_req_s: float = float("inf"),
) -> SearchState:
    """Search within another budget (US dollars per hour); what is found is in the state returned."""
    tried = fresh(state)
    tried.budget, tried.target_req_s = Budget(state.evaluator.problem, per_hour), target_req_s
    evaluator = state.evaluator
    search_universe(tried, seed, ATTEMPT_EFFORT, [fitted(evaluator, tried.budget, s) for s in starts])
    state.cut = tried.cut
    return tried


def _linear_starts(evaluator: Evaluator, budget: Budget) -> Iterator[Solution]:
    """From the linear program over all types, and over each alone."""
    problem = evaluator.problem
    types = problem.cluster.types
    for cards in (types, *((card,) for card in types)):
        nodes = [n for n, card in enumerate(problem.node_accelerator) if card in cards]
        yield evaluator.relaxed.start(budget.per_hour, nodes)
