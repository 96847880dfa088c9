"""From what target on it pays to split replicas by phase: the goodput of each choice of phases.

Mixed steps make output tokens wait for chunks of prompts, so that colocated replicas serve less within a
tight target per output token, and more where it is loose: they move no KV caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from cost_model.errors import InfeasibleError
from hexgen2.goal import Goal
from hexgen2.search.problem import Phases, Problem
from hexgen2.strategies.base import SearchOptions, Strategy

CHOICES: tuple[Phases, ...] = ("disaggregated", "colocated", "flexible")
assert set(CHOICES) == set(get_args(Phases))


@dataclass(frozen=True)
class WithinTarget:
    """Requests/s within a target per output token, for each choice of phases; 0 where none meets it."""

    workload: str
    tpot_ms: float
    goodput_req_s: dict[str, float]

    def row(self) -> dict[str, Any]:
        """A flat record for tables."""
        columns = {f"{phases}_req_s": req_s for phases, req_s in self.goodput_req_s.items()}
        return {"workload": self.workload, "tpot_ms": self.tpot_ms, **columns}


def goodput_by_target(
    problem_of: Callable[[Goal, Phases], Problem],
    workload: str,
    ttft_ms: float | None,
    tpots_ms: Sequence[float],
    search: Strategy,
    options: SearchOptions,
    progress: Callable[[str], None],
) -> list[WithinTarget]:
    """The goodput of each choice of phases within each target, tightest first.

    Parameters
    ----------
    problem_of : the problem for a goal and a choice of phases
    ttft_ms, tpots_ms : targets for the first token (None: none) and per output token
    """
    found = []
    for tpot_ms in sorted(set(tpots_ms)):
        goal = Goal(objective="goodput", ttft_ms=ttft_ms, tpot_ms=tpot_ms)
        served: dict[str, float] = {}
        for phases in CHOICES:
            progress(f"{workload}: {phases}, TPOT within {tpot_ms:g} ms")
            try:
                goodput = search(problem_of(goal, phases), options).goodput
            except InfeasibleError:
                goodput = None
            served[phases] = (goodput.goodput_req_s or 0.0) if goodput else 0.0
        found.append(WithinTarget(workload, tpot_ms, served))
    return found


def where_splitting_pays(within: Sequence[WithinTarget]) -> str:
    """Within which targets all disaggregated replicas serve more than all colocated ones, in words."""
    ahead = [w.goodput_req_s["disaggregated"] > w.goodput_req_s["colocated"] for w in within]
    if not any(ahead):
        return "replicas that do both phases serve at least as much within every target"
    if all(ahead):
        return "replicas that do one phase each serve more within every target"
    last = max(k for k, splits in enumerate(ahead) if splits)
    if ahead == sorted(ahead, reverse=True):
        return (
            f"replicas that do one phase each serve more up to {within[last].tpot_ms:g} ms per output token, "
            f"those that do both from {within[last + 1].tpot_ms:g} ms"
        )
    where = ", ".join(f"{w.tpot_ms:g}" for w, splits in zip(within, ahead, strict=True) if splits)
    return f"replicas that do one phase each serve more at {where} ms per output token"
