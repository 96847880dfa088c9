"""Flow-guided refinement: the max flow says which replicas starve and which idle.

HexGen-2, section 3.4. Replicas at capacity are bottlenecks, the others have GPUs to give; where a KV
route is full, the replicas at its ends are tried against all others. The guided steps come first;
only when none of them improves is the whole neighbourhood tried, and when that does not either, the
search stops.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from hexgen2.placement import OPTIMAL
from hexgen2.search.bounds.upper_bounds import Limit
from hexgen2.search.budget import Budget, trades
from hexgen2.search.evaluator import Evaluation, Evaluator
from hexgen2.search.operators import flips, idle_gpus, merges, moves, recruits, splits, swaps
from hexgen2.search.problem import Solution
from hexgen2.search.steps import Neighbour, Step
from hexgen2.search.ties import exceeds, greatest_first

FULL = 1 - 1e-6
EFFORT_PER_PLAN = 3
EFFORT_PER_ROUTE = 1 / 50
EFFORT_PER_GROUP = 1 / 60


@dataclass
class SearchState:
    """The best solution so far, how it was reached, and when to stop: at a time or after an effort.
    limit is the tightest upper bound so far; proved is set once nothing better can exist, and a gap of
    `close` is good enough. With a budget,
    solutions over its budget are no candidates; with a target (requests/s), what reaches it is good enough.
    frontier has the best within other budgets.

    progress is called with the state after every improvement; interrupt it with KeyboardInterrupt, the
    best stays here.
    """

    evaluator: Evaluator
    deadline_s: float | None = None
    effort_limit: float | None = None
    progress: Callable[[SearchState], None] | None = None
    best: Evaluation | None = None
    trace: list[dict] = field(default_factory=list)
    cut: str | None = None
    limit: Limit | None = None
    close: float = 0.0
    proved: bool = False
    budget: Budget | None = None
    target_req_s: float = float("inf")
    groups_looked_at: int = 0
    frontier: list[tuple[float, Evaluation]] = field(default_factory=list)

    def offer(self, evaluation: Evaluation, step: Step | str) -> None:
        """Keep the evaluation if it can be paid for and ranks above the best."""
        if self.budget and not self.budget.affordable(evaluation.solution):
            return
        if self.best and not evaluation.better_than(self.best):
            return
        self.best = evaluation
        self._compare()
        self.note(step)

    def note(self, step: Step | str) -> None:
        """Write down how the best was reached, and tell of it."""
        assert self.best is not None
        evaluation = self.best
        self.trace.append(
            {
                "evaluations": self.evaluator.evaluations,
                "step": str(step),
                "req_s": evaluation.req_s,
                "prefill_replicas": len(evaluation.prefill),
                "decode_replicas": len(evaluation.decode),
                "colocated_replicas": len(evaluation.colocated),
            }
        )
        if self.progress:
            self.progress(self)

    def reached(self) -> bool:
        """True once the best carries the target."""
        return self.best is not None and self.best.req_s >= self.target_req_s

    def bounded_by(self, limit: Limit) -> None:
        """Keep the limit if it is the tightest."""
        if self.limit is None or exceeds(self.limit.req_s, limit.req_s):
            self.limit = limit
            self._compare()
            if self.progress and self.best:
                self.progress(self)

    def _compare(self) -> None:
        self.proved = self.proved or self._within(OPTIMAL)

    def _within(self, gap: float) -> bool:
        return bool(self.best and self.limit and self.best.req_s >= self.limit.req_s * (1 - gap))

    @property
    def time_left_s(self) -> float | None:
        """Seconds until the deadline, if there is one."""
        return None if self.deadline_s is None else max(0.0, self.deadline_s - time.monotonic())

    def out_of_time(self) -> bool:
        """True once the deadline has passed; the placement then says that the search was cut."""
        if self.deadline_s is not None and time.monotonic() > self.deadline_s:
            self.cut = "time limit"
        return self.cut is not None

    @property
    def effort(self) -> float:
        """Work done so far, counted and not timed, so that the same seed gives the same placement on any
        machine: one for each evaluation, and about as much for what takes as long."""
        evaluator = self.evaluator
        return (
            evaluator.evaluations
            + EFFORT_PER_ROUTE * evaluator.routes
            + EFFORT_PER_PLAN * evaluator.planner.computed
            + EFFORT_PER_GROUP * self.groups_looked_at
        )

    def finished(self) -> bool:
        """True once the best is proved, close enough or at the target, or time or effort is spent; only time
        counts as a cut."""
        if self.proved or self.out_of_time() or self.reached() or self._within(self.close):
            return True
        return self.effort_limit is not None and self.effort >= self.effort_limit


def refine(state: SearchState, start: Solution, label: Step | str) -> Evaluation:
    """Climb from `start` until no step improves the score; the state keeps the best seen."""
    evaluator = state.evaluator
    current = evaluator.reordered(evaluator.evaluate(start))
    state.offer(current, label)
    while not state.finished():
        better = _best_step(state, current, guided_steps(evaluator, current, state.budget))
        if better is None:
            better = _best_step(state, current, all_steps(evaluator, current, state.budget))
        if better is None:
            break
        step, current = better[0], evaluator.reordered(better[1])
        state.offer(current, step)
    return current


def _best_step(
    state: SearchState, current: Evaluation, steps: Iterable[Neighbour]
) -> tuple[Step, Evaluation] | None:
    """The step of highest score, if it improves. Steps are tried in the order of what they promise at most,
    until none left promises more than the best has."""
    evaluator = state.evaluator
    threshold = current.score
    prices = evaluator.prices(current)
    promising: list[tuple[float, Neighbour]] = []
    seen = set()
    for step, solution in steps:
        state.groups_looked_at += len(solution.groups)
        if state.budget and not state.budget.affordable(solution):
            continue
        limit = evaluator.score_limit(solution, threshold)
        if not exceeds(limit, threshold) or solution.key in seen:
            continue
        seen.add(solution.key)
        if prices:
            limit = min(limit, evaluator.priced_limit(solution, current, prices))
        if exceeds(limit, threshold):
            promising.append((limit, (step, solution)))
        if state.finished():
            break
    best: tuple[Step, Evaluation] | None = None
    for limit, (step, solution) in greatest_first(promising, lambda promise: promise[0]):
        if not exceeds(limit, threshold) or (best and state.finished()):
            break
        tried = evaluator.evaluate(solution, current)
        if exceeds(tried.score, threshold):
            best, threshold = (step, tried), tried.score
    return best


def guided_steps(
    evaluator: Evaluator, evaluation: Evaluation, budget: Budget | None = None
) -> Iterator[Neighbour]:
    """Steps that feed the bottlenecks: from idle replicas to full ones, and around full routes; with a
    budget, also with GPUs rented instead of others."""
    solution, alike = evaluation.solution, evaluator.alike
    full, spare = _pressure(evaluation)
    if full and spare:
        yield from moves(solution, spare, full, alike)
        yield from swaps(solution, spare, full, alike)
        yield from flips(solution, spare, alike)
    if budget:
        yield from trades(budget, solution, spare, full)
    else:
        yield from recruits(solution, idle_gpus(solution, _node_sizes(evaluator)), alike)
    ends = _full_route_ends(evaluation)
    if ends:
        everyone = list(range(len(solution.groups)))
        yield from swaps(solution, ends, everyone, alike)
        yield from flips(solution, ends, alike)


def all_steps(
    evaluator: Evaluator, evaluation: Evaluation, budget: Budget | None = None
) -> Iterator[Neighbour]:
    """The whole neighbourhood."""
    solution, alike = evaluation.solution, evaluator.alike
    everyone = list(range(len(solution.groups)))
    return itertools.chain(
        moves(solution, everyone, everyone, alike),
        swaps(solution, everyone, everyone, alike),
        flips(solution, everyone, alike),
        merges(solution, alike),
        splits(solution, alike),
        trades(budget, solution, everyone, everyone) if budget else (),
    )


def _node_sizes(evaluator: Evaluator) -> tuple[int, ...]:
    return tuple(len(gpus) for gpus in evaluator.problem.node_gpus)


def _pressure(evaluation: Evaluation) -> tuple[list[int], list[int]]:
    """Indices of groups whose replicas are at capacity, and of those with room (or no plan at all)."""
    loads = evaluation.routes
    full = [
        replica.index
        for replicas, capacity, carried in (
            (evaluation.prefill, evaluation.network.prefill, loads.sum(axis=1)),
            (evaluation.decode, evaluation.network.decode, loads.sum(axis=0)),
        )
        for replica, limit, load in zip(replicas, capacity, carried, strict=True)
        if load >= limit * FULL
    ]
    return full, sorted(set(range(len(evaluation.solution.groups))) - set(full))


def _full_route_ends(evaluation: Evaluation) -> list[int]:
    """Indices of the groups at either end of a KV route that is full or takes what is full."""
    network, flow = evaluation.network, evaluation.routes
    if not flow.size:
        return []
    full = (flow >= network.routes * FULL) & (flow > 0)
    if network.shared is not None:
        full |= network.shared.full_routes(flow)
    rows, columns = np.nonzero(full)
    ends = {evaluation.prefill[i].index for i in rows} | {evaluation.decode[j].index for j in columns}
    return sorted(ends)
