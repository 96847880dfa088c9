"""Names for the replicas of a solution, and the GPUs of their stages."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hexgen2.search.evaluation import Evaluation
from hexgen2.search.problem import Problem


@dataclass(frozen=True)
class Name:
    """A replica's id and the indices of its GPUs, by stage."""

    id: str
    gpus: tuple[tuple[int, ...], ...]


def fresh_names(problem: Problem, evaluation: Evaluation) -> list[Name]:
    """Prefill, decode and colocated replicas, numbered by role, of those the mixed ones too; the GPUs of each
    node in their order."""
    free = [list(gpus) for gpus in problem.node_gpus]
    names = []
    numbers: Counter[str] = Counter()
    for side in (evaluation.prefill, evaluation.decode, evaluation.colocated):
        for replica in side:
            role = evaluation.role_of(replica)
            gpus = []
            for stage in replica.stages:
                taken = free[stage.node][: stage.degree]
                free[stage.node] = free[stage.node][stage.degree :]
                gpus.append(tuple(taken))
            names.append(Name(f"{role}-{numbers[role]}", tuple(gpus)))
            numbers[role] += 1
    return names
