"""The best solutions that a search has met, each unlike the others, for a closer look at the end."""

from __future__ import annotations

from hexgen2.search.evaluation import Evaluation
from hexgen2.search.problem import Problem
from hexgen2.search.ties import exceeds, greatest_first

SIMPLER_UNSEEN = 0.98
"""Without a simulation, a fleet in which nobody works for others is preferred at this share of the
requests/s: formulas are kinder to the others."""


class Finalists:
    """Keeps the solutions offered that rank highest. Of those whose replicas are alike, on nodes that are
    alike, only the best is kept."""

    def __init__(self, problem: Problem, most: int) -> None:
        self._kind, self._most = problem.node_kind, most
        self._kept: dict[tuple, tuple[float, Evaluation]] = {}

    def offer(self, evaluation: Evaluation, value: float) -> None:
        """Consider a solution; more value is better."""
        key = self._makeup(evaluation)
        known = self._kept.get(key)
        if known is not None and not exceeds(value, known[0]):
            return
        self._kept[key] = value, evaluation
        if len(self._kept) > 4 * self._most:
            self._kept = {self._makeup(kept[1]): kept for kept in self._ranked()}

    def best(self) -> list[Evaluation]:
        """Those of the greatest value, best first."""
        return [evaluation for _, evaluation in self._ranked()]

    def clear(self) -> None:
        """Forget them all."""
        self._kept.clear()

    def _ranked(self) -> list[tuple[float, Evaluation]]:
        return greatest_first(self._kept.values(), lambda kept: kept[0])[: self._most]

    def _makeup(self, evaluation: Evaluation) -> tuple:
        """The shapes of the replicas, by kinds of nodes."""
        return tuple(
            sorted(
                (r.group.role, tuple((self._kind[s.node], *s[1:]) for s in r.stages))
                for r in evaluation.replicas
            )
        )
