"""Price against throughput: the best rental for one budget after the other."""

from __future__ import annotations

import numpy as np

from hexgen2.search.evaluate import Evaluation
from hexgen2.search.market import Market, spendable
from hexgen2.search.refine import SearchState
from hexgen2.strategies.renting.budget import Plain, explore_budget
from hexgen2.strategies.renting.cost import leave_cheapest
from hexgen2.strategies.renting.universe import attempt, fresh


def explore_frontier(state: SearchState, seed: int, plain: Plain) -> list[tuple[float, Evaluation]]:
    """The best rental for each of the goal's `frontier` budgets, evenly from the cheapest feasible price up;
    the last is also left in state.best. More money never gives less.

    Raises
    ------
    InfeasibleError : as explore_budget
    """
    problem = state.evaluator.problem
    assert problem.goal.frontier is not None
    last = spendable(problem)
    cheapest = fresh(state)
    leave_cheapest(cheapest, seed, 0.0, last)
    state.cut = cheapest.cut
    if cheapest.best is None:
        explore_budget(state, seed, plain)
        return []
    first, best = Market(problem, last).price(cheapest.best.solution), cheapest.best
    points = []
    for budget in np.linspace(first, last, problem.goal.frontier)[:-1]:
        if state.out_of_time():
            break
        best = attempt(state, seed, float(budget), [best.solution]).best or best
        points.append((float(budget), best))
    state.market = Market(problem, last)
    state.offer(best, "the frontier so far")
    explore_budget(state, seed, plain)
    assert state.best is not None
    return [*points, (last, state.best)]
