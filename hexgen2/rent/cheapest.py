"""The objective "cost": finds the cheapest rental that carries a load, under shrinking budgets."""

from __future__ import annotations

import itertools

from cost_model.errors import InfeasibleError
from hexgen2.rent.release import cheapest_alike
from hexgen2.rent.universe import attempt, fresh
from hexgen2.search.budget import Budget, spendable
from hexgen2.search.evaluator import Evaluation
from hexgen2.search.local_search import SearchState
from hexgen2.search.problem import Solution

GROWTH = 1.2
"""Factor by which the budget grows until the load is carried."""
HALVINGS = 4
"""Bisections between the largest failed budget and the best price; minimal steps down follow."""
CARRIED = 1 + 2e-6
"""Slack on the load, so that it is still carried after the flow has been balanced."""


def explore_cost(state: SearchState, seed: int) -> None:
    """Set state.best to the cheapest rental that carries the goal's request_rate, and state.proved if none
    can be cheaper.

    Raises
    ------
    InfeasibleError : no rental was found that carries the load (within the budget, if there is one)
    """
    problem = state.evaluator.problem
    load = problem.goal.request_rate
    assert load is not None
    most = leave_cheapest(state, seed, load, spendable(problem))
    if state.best is None and (most is None or most.req_s <= 0):
        refuse_budget(state, seed)
    elif most is not None and state.cut is None:
        price = Budget(problem, 0.0).price(most.solution)
        raise InfeasibleError(
            f"no rental found that carries {load:g} requests/s: the most is {most.req_s:.4g}, "
            f"for {price:.2f} $/h; lower --request-rate, or raise --budget or offer more GPUs"
        )


def leave_cheapest(state: SearchState, seed: int, req_s: float, most_per_hour: float) -> Evaluation | None:
    """Set state.best to the cheapest solution that carries req_s (0: any throughput) for at most
    most_per_hour US dollars per hour. If none is found, return the best solution for that budget instead."""
    evaluator = state.evaluator
    prices = Budget(evaluator.problem, most_per_hour)
    target = max(req_s * CARRIED, 1e-9)
    failed = evaluator.relaxed.least_price(req_s)
    if failed > most_per_hour:
        return attempt(state, seed, most_per_hour, []).best
    # Raise the budget until the load is carried.
    budget = max(failed * 1.05, most_per_hour / 64)
    starts: list[Solution] = []
    while state.best is None:
        budget = min(budget, most_per_hour)
        tried = attempt(state, seed, budget, starts, target)
        if tried.reached():
            _take(state, tried, target)
        elif budget >= most_per_hour or state.cut:
            return tried.best
        else:
            failed, budget = budget, budget * GROWTH
            starts = [tried.best.solution] if tried.best else []
    # Lower it again: first by bisection, then by the smallest step.
    for halving in itertools.count():
        price = prices.price(state.best.solution)
        budget = (failed + price) / 2 if halving < HALVINGS else price * (1 - 1e-6)
        tried = attempt(state, seed, budget, [state.best.solution], target)
        if tried.reached():
            _take(state, tried, target)
        elif state.cut or halving >= HALVINGS:
            state.proved = tried.proved
            break
        else:
            failed = budget
    return None


def _take(state: SearchState, tried: SearchState, target: float) -> None:
    """Make a solution that carries the target as cheap as its neighbours allow, and keep it as the best."""
    assert tried.best is not None
    state.best = cheapest_alike(state.evaluator, tried.best, target)


def refuse_budget(state: SearchState, seed: int) -> None:
    """Reject a budget that is too small for any placement.

    Raises
    ------
    InfeasibleError : the cheapest placement costs more than the goal's budget; says how much
    """
    problem = state.evaluator.problem
    if problem.goal.budget_per_hour is None or state.cut:
        return
    everything = float(problem.cluster.price_per_hour.sum())
    free = fresh(state)
    leave_cheapest(free, seed, 0.0, everything)
    if free.best is not None:
        price = Budget(problem, everything).price(free.best.solution)
        raise InfeasibleError(
            f"no placement of {problem.model.name} within {problem.goal.budget_per_hour:g} $/h: the cheapest "
            f"{'' if free.proved else 'found '}costs {price:.2f} $/h; raise --budget to that"
        )
