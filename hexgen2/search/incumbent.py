"""The best solution so far, the tightest upper bound, and how the search came to them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hexgen2.placement import OPTIMAL
from hexgen2.search.bounds.upper_bounds import UpperBound
from hexgen2.search.evaluation import Evaluation
from hexgen2.search.steps import Step
from hexgen2.search.ties import exceeds


@dataclass
class Incumbent:
    """What a search has to show.

    Attributes
    ----------
    best : of all solutions offered
    bound : no placement is better
    proved : whether nothing better than `best` can exist
    trace : one entry for each improvement, as in the placement's search.trace
    frontier : the best for each of several budgets (US dollars per hour)
    """

    best: Evaluation | None = None
    bound: UpperBound | None = None
    proved: bool = False
    trace: list[dict] = field(default_factory=list)
    frontier: list[tuple[float, Evaluation]] = field(default_factory=list)

    def offer(self, evaluation: Evaluation) -> bool:
        """Keep the evaluation if it ranks above the best, and say whether it does."""
        if self.best and not evaluation.better_than(self.best):
            return False
        self.best = evaluation
        self._compare()
        return True

    def tighten(self, bound: UpperBound) -> bool:
        """Keep the bound if it is the tightest, and say whether it is."""
        if self.bound is not None and not exceeds(self.bound.req_s, bound.req_s):
            return False
        self.bound = bound
        self._compare()
        return True

    def note(self, step: Step | str, evaluations: int) -> None:
        """Write down how the best was reached, after so many evaluations."""
        assert self.best is not None
        self.trace.append(
            {
                "evaluations": evaluations,
                "step": str(step),
                "req_s": self.best.req_s,
                "prefill_replicas": len(self.best.prefill),
                "decode_replicas": len(self.best.decode),
                "colocated_replicas": len(self.best.colocated),
            }
        )

    def within(self, gap: float) -> bool:
        """Whether the best is this close to the upper bound."""
        return bool(self.best and self.bound and self.best.req_s >= self.bound.req_s * (1 - gap))

    def _compare(self) -> None:
        self.proved = self.proved or self.within(OPTIMAL)
