"""Names for the replicas of a solution, and the GPUs of their stages."""

from __future__ import annotations

from dataclasses import dataclass

from hexgen2.search.evaluator import Evaluation
from hexgen2.search.problem import Problem


@dataclass(frozen=True)
class Name:
    """A replica's id and the indices of its GPUs, by stage."""

    id: str
    gpus: tuple[tuple[int, ...], ...]


def fresh_names(problem: Problem, evaluation: Evaluation) -> list[Name]:
    """Prefill, decode and colocated replicas, numbered by role; the GPUs of each node in their order."""
    free = [list(gpus) for gpus in problem.node_gpus]
    names = []
    for side in (evaluation.prefill, evaluation.decode, evaluation.colocated):
        for number, replica in enumerate(side):
            gpus = []
            for stage in replica.stages:
                taken = free[stage.node][: stage.degree]
                free[stage.node] = free[stage.node][stage.degree :]
                gpus.append(tuple(taken))
            names.append(Name(f"{replica.group.role}-{number}", tuple(gpus)))
    return names
