"""Price against throughput: the best rental for each of a series of budgets."""

from __future__ import annotations

import numpy as np

from hexgen2.rent.cheapest import leave_cheapest
from hexgen2.rent.universe import attempt, fresh
from hexgen2.rent.within_budget import Plain, explore_budget
from hexgen2.search.budget import Budget, spendable
from hexgen2.search.evaluation import Evaluation
from hexgen2.search.state import SearchState
from hexgen2.search.ties import exceeds


def explore_frontier(state: SearchState, seed: int, plain: Plain) -> None:
    """Make the best rental for the goal's budget (or for everything on offer) the incumbent, and fill its
    frontier with the best rental for each of the goal's `frontier` budgets, spaced evenly from the cheapest
    feasible price up to that budget. A larger budget never gives less throughput.

    Raises
    ------
    InfeasibleError : see explore_budget
    """
    problem = state.evaluator.problem
    last = spendable(problem)
    explore_budget(state, seed, plain)
    cheapest = fresh(state)
    leave_cheapest(cheapest, seed, 0.0, last)
    state.stopping.cut = cheapest.stopping.cut
    best = cheapest.incumbent.best
    if best is None or problem.goal.frontier is None:
        return
    for budget in np.linspace(Budget(problem, last).price(best.solution), last, problem.goal.frontier)[:-1]:
        if state.stopping.out_of_time():
            break
        starts = [found.solution for found in (best, state.incumbent.best) if found]
        best = _better(best, attempt(state, seed, float(budget), starts).incumbent.best)
        state.incumbent.frontier.append((float(budget), best))
    state.offer(best, "start from another budget")
    state.incumbent.frontier.append((last, _better(best, state.incumbent.best)))


def _better(cheaper: Evaluation, dearer: Evaluation | None) -> Evaluation:
    """The dearer rental only if its throughput is higher by more than rounding."""
    return dearer if dearer is not None and exceeds(dearer.req_s, cheaper.req_s) else cheaper
