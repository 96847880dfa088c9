"""HexGen-2's search on a few nodes that are all different, such as machines over the internet: the best
partitions by what groups can do are its starts and its bound, and branch and bound over partitions comes
last. Beyond the paper."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from hexgen2.placement import OPTIMAL
from hexgen2.search.bounds.partitions import PartitionBound
from hexgen2.search.bounds.upper_bounds import UpperBound
from hexgen2.search.evaluation import Evaluation
from hexgen2.search.partition_tree import PartitionTree
from hexgen2.search.state import SearchState
from hexgen2.search.ties import exceeds

LOOKED, COLOCATED, STARTS, SEARCHED = 0.3, 0.4, 0.55, 0.8
"""Shares of the time limit: after the first, all groups have to be looked at; the second, of what is left
then, is for the best colocated groups; after the third the starts are those found so far, and after the last
comes branch and bound."""
PACE_KNOWN = 0.05
"""Share of the time limit after which the pace says whether there is time to look at all groups."""
PLANNED, OPENED = 3000, 20_000
"""Groups planned for the bound, and branches opened, where no time limit says how many."""
ASSUMPTIONS = (
    "no plan of a group is faster than the planner's best",
    "tensor-parallel groups stay inside a node",
    "KV caches can be routed at will, as far as the links of each group carry them",
)


def bound_by_partitions(state: SearchState) -> bool:
    """Bound the state by partitions, and offer the best of them; whether nodes are few and different enough,
    and there was time."""
    evaluator, stopping = state.evaluator, state.stopping
    problem, planner = evaluator.problem, evaluator.planner
    if state.budget is not None or not PartitionBound.fits(planner, problem):
        return False
    bound = PartitionBound(planner, problem)
    if not bound.look(partial(_late, state, stopping.spent_share)):
        return False
    if problem.phases == "flexible":
        _offer_colocated(state)
    _offer(state, bound, partial(stopping.spent, STARTS))
    if bound.req_s == math.inf:
        return False
    state.partitions = bound
    span = planner.span
    limited = (f"a replica spans at most {span} nodes",) if span < len(problem.node_gpus) else ()
    state.bounded_by(UpperBound(bound.req_s, "partitions", (*ASSUMPTIONS, *limited)))
    return True


def _offer_colocated(state: SearchState) -> None:
    """Offer the best partitions of colocated replicas, which are soon known, since no KV cache moves. Once
    the best is proved, nobody has to look for it."""
    evaluator, stopping = state.evaluator, state.stopping
    bound = PartitionBound(evaluator.planner, replace(evaluator.problem, phases="colocated"))
    bound.look(lambda looked: False)
    until = stopping.spent_share + COLOCATED * (1 - stopping.spent_share)
    best = _offer(state, bound, partial(stopping.spent, until))
    if best is not None and not exceeds(bound.req_s, best.req_s * (1 + OPTIMAL)):
        state.pure["colocated"] = evaluator.each_alone(best)


def _offer(state: SearchState, bound: PartitionBound, stop: Callable[[], bool]) -> Evaluation | None:
    """Offer the best partitions by this bound as it tightens; the best of them, if there are any."""
    best: Evaluation | None = None
    for solution in bound.tightened(stop, lambda: state.best_req_s, PLANNED):
        found = state.evaluator.evaluate(solution)
        state.offer(found, "start from a partition")
        if best is None or found.better_than(best):
            best = found
    return best


def _late(state: SearchState, began: float, looked: float) -> bool:
    """Whether at this pace not all groups are looked at in time, of which this share is, since so much of the
    time limit had passed."""
    stopping, spent = state.stopping, state.stopping.spent_share
    over = began + (spent - began) / looked if looked else began
    return stopping.spent(LOOKED) or (over > LOOKED and stopping.spent(began + PACE_KNOWN))


def try_partitions(state: SearchState) -> None:
    """Branch and bound over partitions, until nothing is better than the best or time is up."""
    assert state.partitions is not None
    most = OPENED if state.stopping.time_limit_s is None else None
    PartitionTree(state, state.partitions).search(most)
