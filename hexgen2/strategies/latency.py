"""The objective "latency": the least mean time from arrival to last token, at a request rate.

A placement's latency is a matter of its load, which no max flow sees. But a flow within targets for the
first token and for each token is one, so each pair of targets is a search of its own, as for goodput;
the tighter the targets that still carry the load, the sooner its requests are done. The pairs are points
of a grid, powers of Params.latency_step above what the best replica reaches alone: first, coarsely, those
where neither target can be tightened, then a compass search around the best (Kolda, Lewis and Torczon,
SIAM Review 45(3), 2003). Every placement that is met on the way and carries the load is valued by its
queues, and the best is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from cost_model.errors import InfeasibleError
from hexgen2.search.evaluation import Evaluation
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.flow.max_flow import balance
from hexgen2.search.infeasible import soonest_s
from hexgen2.search.load_prediction import LoadedPlacement
from hexgen2.search.local_search import refine
from hexgen2.search.params import Params
from hexgen2.search.perturbation import perturb_and_refine
from hexgen2.search.planning.plan import Planner
from hexgen2.search.state import SearchState
from hexgen2.search.ties import exceeds, least

PLAIN_UNTIL = 0.25
"""Share of the time limit within which the greatest throughput is looked for, unless it does not carry the
load by then."""
TIGHT_FIRST = ((4, 4), (8, 4), (8, 8), (12, 12), (16, 16))
"""Points of the grid that are tried first within a time limit, until one carries the load."""
PLANNED_ANEW = 0.25
"""The share of the time left in which the replicas of a start are to be mixed: within new targets they are
planned anew, too, which takes longer."""
STRIDES = (2, 1)
DIRECTIONS = ((1, -1), (-1, 1), (0, -1), (-1, 0))

Point = tuple[int, int]
"""Exponents of the targets for the first token and for each token."""

Plain = Callable[[SearchState, int], None]
"""The search without targets of its own, for a seed."""


def explore_latency(state: SearchState, seed: int, plain: Plain) -> None:
    """Leave the placement of least mean latency at the goal's request_rate as the incumbent.

    Raises
    ------
    InfeasibleError : the load is more than any placement found carries (within the goal's own targets)
    """
    problem = state.evaluator.problem
    load = problem.goal.request_rate
    assert load is not None
    whole = state.stopping
    for share in (PLAIN_UNTIL, 1.0):
        state.stopping = whole.only_until(share)
        try:
            plain(state, seed)
        finally:
            whole.after(state.stopping)
            state.stopping = whole
        if state.best_req_s > load or not whole.hurried or whole.out_of_time():
            break
    if state.incumbent.best is None or state.incumbent.best.req_s <= 0:
        return
    search = _LatencySearch(state, seed, load)
    state.finalists.clear()
    greatest = search.value(state.evaluator, state.incumbent.best, "of the greatest throughput")
    # What may be proved is the greatest throughput.
    state.incumbent.proved, state.incumbent.bound = False, None
    if greatest == float("inf") and state.incumbent.best.req_s <= load:
        within = " within the targets" if problem.targets.given else ""
        remedy = "raise --time-limit" if state.stopping.cut else "lower --request-rate or add GPUs"
        raise InfeasibleError(
            f"no placement found that carries {load:g} requests/s{within} on {problem.cluster.name}: the "
            f"most is {state.incumbent.best.req_s:.4g}; {remedy}"
        )
    search.run()


def for_latency(params: Params) -> Params:
    """The same for searches within targets whose point is latency: links wait no more than under a load."""
    return replace(params, goodput_link_share=params.link_share)


class _LatencySearch:
    """The best so far goes to the state; points tried are remembered."""

    def __init__(self, state: SearchState, seed: int, load: float) -> None:
        self._state, self._seed, self._load = state, seed, load
        self._problem, self._params = state.evaluator.problem, for_latency(state.evaluator.params)
        self._least_s = float("inf")
        self._tried: dict[Point, float] = {}

    @cached_property
    def _soonest(self) -> tuple[float, float]:
        """Seconds to the first token, and per output token, of the best replica alone."""
        return soonest_s(self._problem, self._state.stopping.out_of_time)

    def run(self) -> None:
        """Down the stairs of the coarse grid, then from point to point around the best. Within a time limit,
        the stairs may take too long: tight targets come first."""
        if self._state.stopping.time_limit_s is not None:
            next(filter(self._carried, TIGHT_FIRST), None)
        self._stairs()
        at = least(self._tried, lambda point: self._tried[point])[0]
        for stride in STRIDES:
            better: Point | None = at
            while better is not None:
                at, better = better, self._better_neighbour(better, stride)

    def _stairs(self) -> None:
        """For each target of the first token, from loose to tight, the tightest for each token that carries
        the load: it can only be looser than the one before."""
        loosest, coarse = self._params.latency_loosest, self._params.latency_coarse
        tokens = loosest
        for first in range(loosest, 0, -coarse):
            while not self._carried((first, tokens)):
                tokens += coarse
                if tokens > loosest:
                    return
            while first == loosest and tokens > coarse and self._carried((first, tokens - coarse)):
                tokens -= coarse

    def _carried(self, point: Point) -> bool:
        return self._try(point) < float("inf")

    def _better_neighbour(self, at: Point, stride: int) -> Point | None:
        near = [(at[0] + i * stride, at[1] + j * stride) for i, j in DIRECTIONS]
        best = next(iter(least((p for p in near if min(p) > 0), self._try)), at)
        if exceeds(self._try(at), self._try(best)):
            return best
        if self._try(at) == float("inf"):
            return None
        # As good within a tighter target: on the way to where a replica must change.
        tighter = (p for p in near if min(p) > 0 and sum(p) < sum(at))
        return next((p for p in tighter if not exceeds(self._try(p), self._try(at))), None)

    def _try(self, point: Point) -> float:
        """Least mean latency in seconds of what was found within these targets; infinite if nothing there
        carries the load."""
        if point not in self._tried:
            self._tried[point] = self._search(point)
        return self._tried[point]

    def _search(self, point: Point) -> float:
        state, own = self._state, self._problem.targets
        assert state.incumbent.best is not None
        late = state.slow_to_mix(state.incumbent.best.solution, PLANNED_ANEW)
        if late or state.stopping.out_of_time():
            return float("inf")
        step = self._params.latency_step
        ttft_s, tpot_s = (s * math.prod([step] * k) for s, k in zip(self._soonest, point, strict=True))
        goal = self._problem.goal.model_copy(
            update={
                "objective": "goodput",
                "ttft_ms": min(ttft_s, own.ttft_s or ttft_s) * 1e3,
                "tpot_ms": min(tpot_s, own.tpot_s or tpot_s) * 1e3,
            }
        )
        problem = replace(self._problem, goal=goal)
        evaluator = Evaluator(problem, self._params, Planner(problem, alike=state.evaluator.planner))
        least = float("inf")

        def look(tried: SearchState) -> None:
            nonlocal least
            if tried.incumbent.best is not None and tried.incumbent.best.req_s >= self._load:
                name = f"with TTFT within {goal.ttft_ms:.4g} ms, TPOT within {goal.tpot_ms:.4g} ms"
                least = min(least, self.value(evaluator, tried.incumbent.best, name))

        tried = SearchState(evaluator, state.stopping.again(), progress=look)
        tried.spend(self._params.latency_effort)
        refine(tried, state.incumbent.best.solution, "start from the best")
        perturb_and_refine(tried, self._seed, self._params.latency_perturbations)
        state.evaluator.evaluations += evaluator.evaluations
        state.stopping.cut = state.stopping.cut or tried.stopping.cut
        return least

    def value(self, evaluator: Evaluator, found: Evaluation, step: str) -> float:
        """Mean latency in seconds under the load, infinite if it is not carried; the least is kept."""
        at_full_load = evaluator.at_full_load(found)
        flow = balance(at_full_load.network, at_full_load.flow)
        loaded = LoadedPlacement.of(evaluator.planner, at_full_load, flow.routes)
        if self._load >= loaded.limit_req_s or not self._in_time(loaded):
            return float("inf")
        latency_s = loaded.mean_e2el_s(self._load)
        self._state.finalists.offer(at_full_load, -latency_s)
        if exceeds(self._least_s, latency_s):
            self._least_s = latency_s
            self._state.incumbent.best = at_full_load
            self._state.note(f"{latency_s:.4g} s on average {step}")
        return latency_s

    def _in_time(self, loaded: LoadedPlacement) -> bool:
        """Whether the goal's own targets are met under the load."""
        own = self._problem.targets
        return not own.given or replace(loaded, targets=own).attained(self._load) >= own.attainment
