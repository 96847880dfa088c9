"""What one search works with: the evaluator, the best so far, and when to stop."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial

from hexgen2.search.bounds.upper_bounds import UpperBound
from hexgen2.search.budget import Budget
from hexgen2.search.evaluation import Evaluation
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.finalists import Finalists
from hexgen2.search.incumbent import Incumbent
from hexgen2.search.problem import Phases, Solution
from hexgen2.search.steps import Step
from hexgen2.search.stopping import GRACE_S, Stopping

LATE = 0.8
"""Once this share of the time limit has passed, solutions of pure phases are taken as they are."""
MIXED_S_PER_REPLICA = 5e-3
"""Seconds that it takes to find out for the first time what replicas do for one another, for each of them, on
a slow machine: 1 to 10 ms in fleets of 30 to 500."""
S_PER_ROUTE = 4e-5
"""The same of each route where nobody does both phases."""


@dataclass
class SearchState:
    """A search under way. With a budget, only solutions that keep to it count.

    unmixed : the best offered in which no replica works for both itself and others
    pure : the best of all disaggregated and of all colocated solutions, in a flexible search
    earlier : what was the best before a search went on to other means
    improved_at : effort when the best last improved
    elsewhere : effort of searches in parts of the cluster, less what does not count
    started_by_parts : whether the groups of each part by itself were offered
    keeps_finalists : whether finalists are kept without latency targets, too
    progress is called with the state after every improvement; interrupt it with KeyboardInterrupt, the best
    stays in the incumbent.
    """

    evaluator: Evaluator
    stopping: Stopping = field(default_factory=Stopping)
    incumbent: Incumbent = field(default_factory=Incumbent)
    budget: Budget | None = None
    progress: Callable[[SearchState], None] | None = None
    keeps_finalists: bool = False
    groups_looked_at: int = 0
    unmixed: Evaluation | None = None
    pure: dict[str, Evaluation] = field(default_factory=dict)
    earlier: list[Evaluation] = field(default_factory=list)
    improved_at: float = 0.0
    elsewhere: float = 0.0
    started_by_parts: bool = False

    @property
    def best_req_s(self) -> float:
        """Requests/s of the best so far; 0 if there is none."""
        return 0.0 if self.incumbent.best is None else self.incumbent.best.req_s

    @property
    def bound_req_s(self) -> float | None:
        """The same of the bound."""
        return None if self.incumbent.bound is None else self.incumbent.bound.req_s

    @property
    def evaluations(self) -> int:
        """Solutions that were evaluated."""
        return self.evaluator.evaluations

    @cached_property
    def finalists(self) -> Finalists:
        """The best solutions offered; for a closer look where the goal has latency targets,
        or the most robust of them is asked for."""
        return Finalists(self.evaluator.problem, self.evaluator.params.finalists)

    def offer(self, evaluation: Evaluation, step: Step | str) -> None:
        """Keep the evaluation if it is affordable and ranks above the best."""
        if self.budget and not self.budget.affordable(evaluation.solution):
            return
        wanted = self.keeps_finalists or self.evaluator.problem.targets.given
        if evaluation.req_s > 0 and wanted:
            self.finalists.offer(evaluation, evaluation.req_s)
        if not evaluation.mixed and (self.unmixed is None or evaluation.better_than(self.unmixed)):
            self.unmixed = evaluation
        if self.incumbent.offer(evaluation):
            self.improved_at = self.effort
            self.note(step)

    def note(self, step: Step | str) -> None:
        """Write down how the best was reached, and report it."""
        self.incumbent.note(step, self.evaluator.evaluations)
        if self.progress:
            self.progress(self)

    def bounded_by(self, bound: UpperBound) -> None:
        """Keep the upper bound if it is the tightest."""
        if self.incumbent.tighten(bound) and self.progress and self.incumbent.best:
            self.progress(self)

    def reached(self) -> bool:
        """Whether the best carries the target."""
        best = self.incumbent.best
        return best is not None and best.req_s >= self.stopping.target_req_s

    def restricted_to(self, phases: Phases, listed: float, until: float) -> SearchState:
        """A search within this one among solutions with these phases only; `take_pure` takes what it finds.
        Its effort does not depend on what was planned before, and it shows no progress.

        Parameters
        ----------
        listed, until : shares of the time limit after which linear programs do with what they have, and the
            search ends
        """
        evaluator = self.evaluator
        pure = SearchState(evaluator.with_phases(phases), self.stopping.of_which(1 - until))
        pure.evaluator.relaxed.stop = partial(self.stopping.spent, listed)
        pure.evaluator.relaxed.over = pure.stopping.out_of_time
        pure.evaluator.relaxed.enough = evaluator.relaxed.enough
        if evaluator.relaxed.listed:
            pure.evaluator.relaxed.take_columns(evaluator.relaxed)
        return pure

    def take_pure(self, phases: Phases, found: Evaluation | None) -> None:
        """Offer the best solution that was found among those with these phases only."""
        if found is None or found.req_s <= 0:
            return
        self.pure[phases] = found
        # What its replicas could do for others is a large program where there are many of them.
        late = self.stopping.spent(LATE) or self.slow_to_mix(found.solution)
        mixed = found if late else self.evaluator.evaluate(found.solution, found)
        self.offer(mixed, f"best of those all {phases}")

    def slow_to_mix(self, solution: Solution, share: float = 1.0) -> bool:
        """Whether it takes longer than this share of the time left to find out what these replicas could do
        for one another. Where there is no answer yet, one may be a little late."""
        left_s = self.stopping.time_left_s
        if left_s is None or not self.evaluator.problem.mixes:
            return False
        grace_s = 0.0 if self.incumbent.best else GRACE_S
        roles = Counter(group.role for group in solution.groups)
        takes_s = len(solution.groups) * MIXED_S_PER_REPLICA
        if not roles["colocated"]:
            takes_s = roles["prefill"] * roles["decode"] * S_PER_ROUTE
        return takes_s > share * left_s + grace_s

    def first_mixture_is_late(self) -> bool:
        """Whether that would take too long for the best, of which no one has found it out yet: for solutions
        near it, it takes as long."""
        best = self.incumbent.best
        return (
            best is not None and not self.evaluator.knows(best.solution) and self.slow_to_mix(best.solution)
        )

    def offer_mixed(self, share: float) -> None:
        """Offer what the replicas of the best could do for one another, unless that is known or takes longer
        than this share of the time left."""
        best = self.incumbent.best
        if best and not self.evaluator.knows(best.solution) and not self.slow_to_mix(best.solution, share):
            self.offer(self.evaluator.evaluate(best.solution), "the best with replicas that work for others")

    @property
    def effort(self) -> float:
        """Work done so far (see Params)."""
        evaluator, params = self.evaluator, self.evaluator.params
        return (
            evaluator.evaluations
            + params.effort_per_route * evaluator.routes
            + params.effort_per_plan * evaluator.planner.computed
            + params.effort_per_group * self.groups_looked_at
            + self.elsewhere
        )

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Work that brings the effort's limits no nearer."""
        before = self.effort
        try:
            yield
        finally:
            self.elsewhere -= self.effort - before

    def spend(self, effort: float, close_gap: float | None = None, stale_effort: float = math.inf) -> None:
        """Stop after so much more effort, or so much without an improvement, or within that gap to the upper
        bound."""
        self.improved_at = self.effort
        self.stopping.effort_limit, self.stopping.stale_effort = self.effort + effort, stale_effort
        if close_gap is not None:
            self.stopping.close_gap = close_gap

    def finished(self) -> bool:
        """Whether the best is proved, close enough or at the target, or time or effort is spent; only a time
        limit cuts a search."""
        incumbent, stopping = self.incumbent, self.stopping
        if incumbent.proved or stopping.out_of_time() or self.reached():
            return True
        if self.effort >= min(stopping.effort_limit, self.improved_at + stopping.stale_effort):
            return True
        return incumbent.within(stopping.close_gap)
