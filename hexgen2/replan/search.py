"""Re-planning: finds a better placement after GPUs were lost or added, or the workload changed.

The search starts from the surviving replicas, and from the best placement that it finds when moves are free,
which also shows what the moves cost. It refines both with the steps of HexGen-2's search, under a value that
deducts the requests missed during the moves (value.py).
"""

from __future__ import annotations

from hexgen2.moves import Migration
from hexgen2.placement import Placement, SearchRecord
from hexgen2.replan.migration import Migrator, Terms
from hexgen2.replan.naming import moved_names
from hexgen2.replan.previous import Previous
from hexgen2.replan.value import ReplanEvaluator
from hexgen2.search.bounds.upper_bounds import UpperBound
from hexgen2.search.build import build_placement
from hexgen2.search.evaluation import Evaluation
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.local_search import refine
from hexgen2.search.params import Params
from hexgen2.search.problem import Problem, Solution
from hexgen2.search.state import SearchState
from hexgen2.strategies.base import SearchOptions, run_search
from hexgen2.strategies.hexgen2 import NAME, climb_from_starts, settle


def replan(problem: Problem, previous: Placement, options: SearchOptions, terms: Terms) -> Placement:
    """The placement that serves most requests within the horizon, moves included, and its moves.

    Raises
    ------
    InfeasibleError : the remaining GPUs cannot serve the model
    """
    return _Replan(problem, previous, options, terms).run()


class _Replan:
    def __init__(self, problem: Problem, previous: Placement, options: SearchOptions, terms: Terms) -> None:
        self._problem, self._options, self._terms = problem, options, terms
        self._previous = Previous(problem, previous)
        self._migrator = Migrator(problem, self._previous, terms)
        self._unchanged: Evaluation | None = None
        self._free: Evaluation | None = None
        self._limit: UpperBound | None = None

    def run(self) -> Placement:
        alone = any(replica.role == "colocated" for replica in self._previous.replicas)
        return run_search(
            NAME,
            self._problem,
            self._options,
            self._explore,
            fewest_gpus=1 if alone else 2,
            evaluator=self._evaluator,
            build=self._build,
        )

    def _evaluator(self, problem: Problem, params: Params) -> Evaluator:
        return ReplanEvaluator(problem, params, self._migrator)

    def _explore(self, state: SearchState) -> None:
        evaluator = state.evaluator
        assert isinstance(evaluator, ReplanEvaluator)
        self._unchanged = evaluator.adopt(evaluator.unchanged())
        state.offer(self._unchanged, "nothing moves")
        starts = self._survivors(self._unchanged.solution)
        self._free = self._search_with_free_moves(state, starts)
        if self._free:
            state.offer(evaluator.adopt(self._free), "best without regard to moves")
            starts.append(self._free.solution)
        state.spend(self._effort())
        for start in starts:
            refine(state, start, "from what survives")
        settle(state, self._options.seed)
        if state.incumbent.best is not None:
            state.offer(evaluator.polished(state.incumbent.best), "polish")

    def _effort(self) -> float:
        params = self._options.params
        return params.replan_effort * min(1.0, params.replan_few_nodes / len(self._problem.node_gpus))

    def _survivors(self, intact: Solution) -> list[Solution]:
        """The intact groups, with and without the surviving GPUs of the broken ones."""
        remains = tuple(self._previous.remains())
        found = [Solution((*intact.groups, *remains))] if remains else []
        return found + ([intact] if intact.groups else [])

    def _search_with_free_moves(self, state: SearchState, starts: list[Solution]) -> Evaluation | None:
        evaluator = Evaluator(self._problem, self._options.params, state.evaluator.planner)
        free = SearchState(evaluator, state.stopping.again())
        free.spend(self._effort())
        # Not the bound of the enumeration: a kept replica may have stages that the planner never makes.
        self._limit = free.evaluator.relaxed.upper_bound()
        free.bounded_by(self._limit)
        for start in starts:
            refine(free, start, "from what survives")
        climb_from_starts(free)
        settle(free, self._options.seed)
        state.stopping.cut = free.stopping.cut
        return free.incumbent.best

    def _build(
        self, problem: Problem, best: Evaluation, strategy: str, record: SearchRecord, _: UpperBound | None
    ) -> Placement:
        names, moves = moved_names(self._migrator, best)
        # A running replica may have a plan that this planner never makes; the bound does not cover it then.
        limit = self._limit if self._limit and self._limit.req_s >= best.req_s * (1 - 1e-9) else None
        placement = build_placement(problem, best, strategy, record, limit, names)
        terms = self._terms
        free = self._free if self._free and self._free.req_s > best.req_s else best
        return placement.model_copy(
            update={
                "moves": moves,
                "migration": Migration(
                    horizon_s=terms.horizon_s,
                    load_gbyte_s=terms.load_bytes_s / 1e9,
                    restart_s=terms.restart_s,
                    before_req_s=self._previous.placement.throughput.req_s,
                    unchanged_req_s=self._unchanged.req_s if self._unchanged else 0.0,
                    chosen=self._migrator.cost(best),
                    free=self._migrator.cost(free),
                    assumptions=terms.assumptions,
                ),
            }
        )
