"""The objective "cost": finds the cheapest rental that carries a load, under shrinking budgets."""

from __future__ import annotations

import itertools
import math
from functools import partial

from cost_model.errors import InfeasibleError
from hexgen2.placement import OPTIMAL
from hexgen2.rent.release import cheapest_alike
from hexgen2.rent.universe import attempt, fresh, look_at_the_clock
from hexgen2.search.budget import Budget, spendable
from hexgen2.search.evaluation import Evaluation
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.incumbent import Incumbent
from hexgen2.search.partition.whole_nodes import first_look, whole_nodes
from hexgen2.search.problem import Group, Solution
from hexgen2.search.state import SearchState
from hexgen2.search.ties import exceeds, greatest_first, least

FOR_THE_FIRST = 0.2
"""Share of the time limit within which whole nodes are planned for a first rental, and once more as much
within which they are left out of it."""
FOR_THE_BOUND = 0.4
"""Share of the time left in which the least price is looked for."""
UNTIL_ANY_WILL_DO = 0.35
"""Share of the time limit after which a rental that carries the load is looked for at any price, if none is
known."""
CARRIED = 1 + 2e-6
"""Slack on the load, so that it is still carried after the flow has been balanced."""


def explore_cost(state: SearchState, seed: int) -> None:
    """Make the cheapest rental that carries the goal's request_rate the incumbent, proved if none can be
    cheaper.

    Raises
    ------
    InfeasibleError : no rental was found that carries the load (within the budget, if there is one)
    """
    problem = state.evaluator.problem
    load = problem.goal.request_rate
    assert load is not None
    look_at_the_clock(state)
    first = _first_rental(state, load)
    tried = leave_cheapest(state, seed, load, spendable(problem), first is None)
    if tried is None:
        return
    if first is not None and state.stopping.cut is not None:
        state.incumbent.offer(first)
        return
    if tried.best is None or tried.best.req_s <= 0:
        refuse_budget(state, seed)
    _refuse_load(state, load, tried)


def _refuse_load(state: SearchState, load: float, tried: Incumbent) -> None:
    """Reject a load that no rental carries; or that none was found to carry by a search that was not cut.

    Raises
    ------
    InfeasibleError : says how much the best carries, and the bound
    """
    best, bound = tried.best, tried.bound
    most = math.inf if bound is None else bound.req_s
    proved, found = exceeds(load, most), best is not None and best.req_s > 0
    if not proved and not (found and state.stopping.cut is None):
        return
    known = list[str]()
    if best is not None and found:
        price = Budget(state.evaluator.problem, 0.0).price(best.solution)
        known.append(f"the best found carries {best.req_s:.4g} for {price:.2f} $/h")
    if proved:
        known.append(f"none carries more than {most:.4g}")
    raise InfeasibleError(
        f"no rental {'' if proved else 'found '}carries {load:g} requests/s: {', and '.join(known)}; "
        "lower --request-rate, or raise --budget or offer more GPUs"
    )


def _first_rental(state: SearchState, req_s: float) -> Evaluation | None:
    """A rental that carries so much, found at once: whole nodes, the cheapest for what they do first. It is
    there so that a search which has to stop early has an answer."""
    evaluator, target, found = state.evaluator, max(req_s * CARRIED, 1e-9), list[Evaluation]()
    prices = Budget(evaluator.problem, spendable(evaluator.problem))
    stopping, began = state.stopping, state.stopping.spent_share
    planned, fewest = (partial(stopping.spent, began + k * FOR_THE_FIRST) for k in (1, 2))
    for role in ("colocated", "decode"):
        if role not in evaluator.problem.roles or (found and planned()):
            continue
        kept = first_look(evaluator, whole_nodes(evaluator, role, planned, stopping.too_late))
        left = greatest_first(kept.solution.groups, lambda g: _price_per_request(prices, evaluator, g))
        # Half of what is left goes at once, if it is not needed; else it is looked at in smaller parts.
        parts = [left]
        while parts and not (fewest() and prices.affordable(kept.solution)):
            part = parts.pop()
            gone = set(part)
            groups = tuple(group for group in kept.solution.groups if group not in gone)
            fewer = first_look(evaluator, Solution(groups))
            if not exceeds(target, fewer.req_s):
                kept = fewer
            elif len(part) > 1:
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]
        if not exceeds(target, kept.req_s) and prices.affordable(kept.solution):
            found.append(kept)
    return least(found, lambda each: prices.price(each.solution))[0] if found else None


def _price_per_request(prices: Budget, evaluator: Evaluator, group: Group) -> float:
    """US dollars per hour of a group for each request/s that it can carry."""
    plan = evaluator.plan_of(group)
    able = plan.capacity_req_s if plan else 0.0
    return prices.price(Solution((group,))) / able if able > 0 else float("inf")


def leave_cheapest(
    state: SearchState, seed: int, req_s: float, most_per_hour: float, unknown: bool = False
) -> Incumbent | None:
    """Make the cheapest solution that carries req_s (0: any throughput) for at most most_per_hour US dollars
    per hour the incumbent. If none is found, return what is known of that budget or the last one tried.

    Parameters
    ----------
    unknown : whether no rental is known that carries req_s: then some time is left for one at any price
    """
    evaluator, incumbent, whole = state.evaluator, state.incumbent, state.stopping
    prices = Budget(evaluator.problem, most_per_hour)
    target = max(req_s * CARRIED, 1e-9)
    left_s = state.stopping.time_left_s
    failed, groups = evaluator.relaxed.cheapest(
        req_s, evaluator.params.certify_branches, None if left_s is None else left_s * FOR_THE_BOUND
    )
    if failed > most_per_hour:
        return attempt(state, seed, most_per_hour, []).incumbent
    start = evaluator.evaluate(groups)
    if prices.affordable(groups) and not exceeds(target, start.req_s):
        state.offer(start, "start from the integer program")
    # Raise the budget until the load is carried.
    budget = max(failed * 1.05, most_per_hour / 64)
    starts = [groups]
    while incumbent.best is None:
        budget = min(budget, most_per_hour)
        in_time = unknown and budget < most_per_hour
        if in_time:
            state.stopping = whole.only_until(UNTIL_ANY_WILL_DO)
        try:
            tried = attempt(state, seed, budget, starts, target)
        finally:
            whole.after(state.stopping)
            state.stopping = whole
        if tried.reached():
            _take(state, tried, target)
        elif in_time and whole.spent(UNTIL_ANY_WILL_DO) and not whole.cut:
            budget = most_per_hour
        elif budget >= most_per_hour or state.stopping.cut:
            if budget < most_per_hour:
                tried.incumbent.bound = None  # It says nothing of what may be spent.
            return tried.incumbent
        else:
            failed, budget = budget, budget * evaluator.params.budget_growth
            starts = [tried.incumbent.best.solution] if tried.incumbent.best else []
    # Lower it again: first by bisection, then by the smallest step.
    for halving in itertools.count():
        price = prices.price(incumbent.best.solution)
        if price <= failed * (1 + OPTIMAL):
            incumbent.proved = True
            break
        budget = (failed + price) / 2 if halving < evaluator.params.budget_halvings else price * (1 - 1e-6)
        tried = attempt(state, seed, budget, [incumbent.best.solution], target)
        if tried.reached():
            _take(state, tried, target)
        elif state.stopping.cut or halving >= evaluator.params.budget_halvings:
            incumbent.proved = tried.incumbent.proved
            break
        else:
            failed = budget
    return None


def _take(state: SearchState, tried: SearchState, target: float) -> None:
    """Make a solution that carries the target as cheap as its neighbours allow, and keep it as the best."""
    assert tried.incumbent.best is not None
    stop = state.stopping.out_of_time
    state.incumbent.best = cheapest_alike(state.evaluator, tried.incumbent.best, target, stop)


def refuse_budget(state: SearchState, seed: int) -> None:
    """Reject a budget that is too small for any placement.

    Raises
    ------
    InfeasibleError : the cheapest placement costs more than the goal's budget; says how much
    """
    problem = state.evaluator.problem
    if problem.goal.budget_per_hour is None or state.stopping.cut:
        return
    everything = float(problem.cluster.price_per_hour.sum())
    free = fresh(state)
    leave_cheapest(free, seed, 0.0, everything)
    if free.incumbent.best is not None:
        price = Budget(problem, everything).price(free.incumbent.best.solution)
        raise InfeasibleError(
            f"no placement of {problem.model.name} within {problem.goal.budget_per_hour:g} $/h: the cheapest "
            f"{'' if free.incumbent.proved else 'found '}costs {price:.2f} $/h; raise --budget to that"
        )
