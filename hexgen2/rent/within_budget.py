"""The best rental within a budget, at least as good as the best rental of a single GPU type.

The search runs over the universe of all nodes and offers; solutions over the budget are rejected. It starts
from the plain search on the largest affordable rental of each GPU type alone, and from the linear program
over all types and over each type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hexgen2.rent.cheapest import refuse_budget
from hexgen2.rent.rental import part_of
from hexgen2.rent.universe import look_at_the_clock, search_universe
from hexgen2.search.budget import Budget, spendable
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.local_search import refine
from hexgen2.search.state import SearchState
from hexgen2.search.stopping import Stopping

Plain = Callable[[SearchState, int], None]
"""Searches a cluster without prices: takes a state, to which it offers solutions, and a seed."""


def explore_budget(state: SearchState, seed: int, plain: Plain) -> None:
    """Offer the best solution within the goal's budget.

    Raises
    ------
    InfeasibleError : the budget is too small for any placement; says how much is needed
    """
    problem = state.evaluator.problem
    budget = state.budget = Budget(problem, spendable(problem))
    look_at_the_clock(state)
    alone = list(single_types(budget))
    for k, (accelerator, counts) in enumerate(alone):
        if state.stopping.out_of_time():
            return
        # All types, and everything together, have the same share of the time limit.
        until = state.stopping.only_until((k + 1) / (len(alone) + 1))
        _search_alone(state, until, f"rent {accelerator} alone", counts, seed, plain)
    search_universe(state, seed, state.evaluator.params.rental_effort, [])
    if state.incumbent.best is None or state.incumbent.best.req_s <= 0:
        refuse_budget(state, seed)
    elif not (state.incumbent.proved or state.stopping.out_of_time()):
        _prove(state, budget)


def _prove(state: SearchState, budget: Budget) -> None:
    """The integer program, which often proves the best to be optimal, and may know a better start."""
    evaluator, best = state.evaluator, state.incumbent.best
    assert best is not None
    groups, bound = evaluator.relaxed.whole(
        budget.per_hour, evaluator.params.certify_branches, state.stopping.time_left_s, best.req_s
    )
    state.bounded_by(bound)
    if groups.groups and budget.affordable(groups):
        state.spend(evaluator.params.rental_attempt_effort)
        refine(state, groups, "start from the integer program")


def single_types(budget: Budget) -> Iterator[tuple[str, list[int]]]:
    """For each GPU type, fastest first: its name, and the most GPUs of each node that the budget allows."""
    problem = budget.problem
    for card in problem.cluster.types:
        nodes = [n for n, other in enumerate(problem.node_accelerator) if other == card]
        counts, left = [0] * len(problem.node_gpus), budget.per_hour
        for node in sorted(nodes, key=lambda n: (problem.node_price[n], -len(problem.node_gpus[n]), n)):
            counts[node] = budget.most(node, left)
            left -= counts[node] * problem.node_price[node]
        if sum(counts) >= 2:
            yield card.name, counts


def _search_alone(
    state: SearchState, until: Stopping, label: str, counts: Sequence[int], seed: int, plain: Plain
) -> None:
    part = part_of(state.evaluator.problem, counts)
    alone = SearchState(Evaluator(part.problem, state.evaluator.params), until.again())
    try:
        plain(alone, seed)
    finally:
        state.stopping.after(alone.stopping)
        if alone.incumbent.best is not None:
            evaluator = state.evaluator
            found = evaluator.evaluate(part.outside(alone.incumbent.best.solution))
            state.offer(evaluator.reordered(found), label)
