"""Spending less: releases GPUs until a budget is met, or for as long as a load is still carried."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from hexgen2.search.budget import Budget, releases, trades
from hexgen2.search.evaluation import Evaluation
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.problem import Solution
from hexgen2.search.ties import exceeds, least, smallest_first


def fitted(evaluator: Evaluator, budget: Budget, solution: Solution) -> Solution:
    """The solution cut down to the budget, one release at a time: always the one that loses the least score
    per dollar saved."""
    while not budget.affordable(solution):
        price, score = budget.price(solution), evaluator.evaluate(solution).score

        def loss_per_dollar(rest: Solution, price: float = price, score: float = score) -> float:
            saved = price - budget.price(rest)
            return (score - evaluator.evaluate(rest).score) / saved if saved > 0 else float("inf")

        rests = [rest for _, rest in releases(solution, range(len(solution.groups)))]
        solution = least(rests, loss_per_dollar)[0]
    return solution


def cheapest_alike(
    evaluator: Evaluator, start: Evaluation, req_s: float, stop: Callable[[], bool] = lambda: False
) -> Evaluation:
    """Release and trade GPUs, largest saving first, while the rest still carries req_s (requests/s), until it
    is time to stop."""
    current = start
    while (cheaper := _cheaper(evaluator, current, req_s, stop)) is not None:
        current = cheaper
    return current


def _cheaper(
    evaluator: Evaluator, current: Evaluation, req_s: float, stop: Callable[[], bool]
) -> Evaluation | None:
    """The cheapest neighbour that still carries req_s, if it costs less."""
    solution = current.solution
    everyone = list(range(len(solution.groups)))
    price = Budget(evaluator.problem, 0.0).price(solution)
    below = Budget(evaluator.problem, price * (1 - 1e-6))
    steps = itertools.chain(releases(solution, everyone), trades(below, solution, everyone, everyone))
    options = dict[tuple, Solution]()
    for _, rest in steps:
        if stop():
            return None
        if below.affordable(rest):
            options[rest.key] = rest
    for rest in smallest_first(options.values(), below.price):
        if stop():
            break
        if exceeds(req_s, evaluator.limits.of(rest, req_s)):
            continue
        found = evaluator.reordered(evaluator.evaluate(rest))
        if not exceeds(req_s, found.req_s):
            return found
    return None
