"""A search over whole partitions of a few nodes that are all different, such as machines over the internet:
the best partitions by what groups can do, a bound over all of them, and branch and bound. It runs beside the
other search. Beyond the paper."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from hexgen2.search.bounds.partitions import PartitionBound
from hexgen2.search.bounds.upper_bounds import UpperBound
from hexgen2.search.evaluation import Evaluation
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.partition_tree import PartitionTree
from hexgen2.search.state import SearchState

TIGHTENED = 0.6
"""Share of the time limit after which the bound is left, and branch and bound begins."""
ALL_BUT_OUTPUT = 0.95
"""Share of the time limit that there is for all of it."""
PLANNED, OPENED = 3000, 20_000
"""Groups planned for the bound, and branches opened, where no time limit says how many."""
ASSUMPTIONS = (
    "no plan of a group is faster than the planner's best",
    "tensor-parallel groups stay inside a node",
    "KV caches can be routed at will, as far as the links of each group carry them",
)


class PartitionsFound(NamedTuple):
    """The bound over all partitions, and the best solution met, as far as there was time for them."""

    bound: UpperBound | None
    best: Evaluation | None


def partitions_matter(state: SearchState) -> bool:
    """Whether the nodes are few enough, and different enough, for all their partitions to be looked at."""
    evaluator = state.evaluator
    return state.budget is None and PartitionBound.fits(evaluator.planner, evaluator.problem)


def search_partitions(state: SearchState, report: Callable[[PartitionsFound], None]) -> PartitionsFound:
    """What a search over whole partitions finds, beside that of `state`, which it leaves as it is. What is
    known so far is reported."""
    evaluator = state.evaluator
    planner = evaluator.planner.counting_anew()
    beside = SearchState(
        Evaluator(evaluator.problem, evaluator.params, planner), state.stopping.only_until(ALL_BUT_OUTPUT)
    )

    def found(now: SearchState) -> PartitionsFound:
        return PartitionsFound(now.incumbent.bound, now.incumbent.best)

    beside.progress = lambda now: report(found(now))
    bound, stopping = PartitionBound(planner, evaluator.problem), beside.stopping
    if bound.look(lambda looked: stopping.out_of_time()):
        for solution in bound.tightened(
            partial(stopping.spent, TIGHTENED), lambda: beside.best_req_s, PLANNED
        ):
            beside.offer(beside.evaluator.evaluate(solution), "start from a partition")
        if bound.req_s < math.inf:
            span, nodes = planner.span, len(evaluator.problem.node_gpus)
            limited = (f"a replica spans at most {span} nodes",) if span < nodes else ()
            beside.bounded_by(UpperBound(bound.req_s, "partitions", (*ASSUMPTIONS, *limited)))
            most = OPENED if stopping.time_limit_s is None else None
            PartitionTree(beside, bound).search(most)
    return found(beside)
