"""Names for the replicas of a solution and for the GPUs of their stages: fresh ones, or, after a re-plan,
those of the replicas that they continue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hexgen2.moves import Action, Move
from hexgen2.replan.migration import Migrator, Successor
from hexgen2.replan.previous import OldReplica
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


def moved_names(migrator: Migrator, evaluation: Evaluation) -> tuple[list[Name], list[Move]]:
    """Names in the order of `fresh_names`, and the moves from the placement that runs.

    A replica keeps the id of the one that it continues in the same role; others get ids never used before.
    """
    found = migrator.successors(evaluation.replicas)
    found = _with_origins(found, migrator.previous.replicas)
    known = {old.id for old in migrator.previous.replicas}
    names, moves = [], []
    for successor in found:
        role, old = successor.replica.group.role, successor.old
        if old is not None and old.role == role:
            name = old.id
        else:
            name = next(n for n in _numbered(role) if n not in known)
            known.add(name)
        names.append(Name(name, successor.gpus))
        costs = successor.load_bytes, successor.drain_s, successor.load_s
        moves.append(_move(successor.action, name, old, _ids(migrator, successor.gpus), *costs))
    continued = {successor.old.id for successor in found if successor.old}
    for old in migrator.previous.replicas:
        if old.id not in continued:
            moves.append(_move("stop", old.id, old, _ids(migrator, old.gpus), 0.0, old.drain_s, 0.0))
    return names, moves


def _ids(migrator: Migrator, gpus: Sequence[Sequence[int | None]]) -> list[str]:
    ids = migrator.problem.cluster.gpu_ids
    return [ids[gpu] for stage in gpus for gpu in stage if gpu is not None]


def _move(
    action: Action,
    name: str,
    old: OldReplica | None,
    gpus: list[str],
    load_bytes: float,
    drain_s: float,
    load_s: float,
) -> Move:
    return Move.model_validate(
        {
            "action": action,
            "replica": name,
            "from": old.id if old else None,
            "gpus": gpus,
            "load_bytes": load_bytes,
            "drain_s": drain_s,
            "load_s": load_s,
        }
    )


def _with_origins(found: list[Successor], olds: Sequence[OldReplica]) -> list[Successor]:
    """Replicas whose stages are new, each as a reload of the old one that it shares most GPUs with (of
    equals: one of its role), if any is left."""
    open_olds = [old for old in olds if all(s.old is not old for s in found)]
    pairs = []
    for k, successor in enumerate(found):
        gpus = {gpu for stage in successor.gpus for gpu in stage}
        for j, old in enumerate(open_olds):
            shared = len(gpus & {gpu for stage in old.gpus for gpu in stage if gpu is not None})
            if successor.old is None and shared:
                pairs.append((-shared, old.role != successor.replica.group.role, k, j))
    result, used = list(found), set()
    for _, _, k, j in sorted(pairs):
        if result[k].old is None and j not in used:
            used.add(j)
            result[k] = replace(found[k], old=open_olds[j], action="reload")
    return result


def _numbered(role: str) -> Iterator[str]:
    number = 0
    while True:
        yield f"{role}-{number}"
        number += 1
