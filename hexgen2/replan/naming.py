"""Which running replica each replica of a re-plan continues, what it is called, and the moves that follow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hexgen2.moves import Action, Move
from hexgen2.replan.migration import Migrator, Successor
from hexgen2.replan.previous import OldReplica
from hexgen2.search.evaluation import Evaluation
from hexgen2.search.naming import Name


def moved_names(migrator: Migrator, evaluation: Evaluation) -> tuple[list[Name], list[Move]]:
    """Names in the order of `evaluation.replicas`, and the moves from the running placement.

    A replica that continues an old one in the same role keeps its id; the others get unused ids.
    """
    found = migrator.successors(evaluation.replicas, evaluation.role_of)
    found = _with_origins(found, migrator.previous.replicas)
    known = {old.id for old in migrator.previous.replicas}
    names, moves = [], []
    for successor in found:
        role, old = evaluation.role_of(successor.replica), successor.old
        if old is not None and old.placed_role == role:
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
    """Turn new replicas into reloads: each continues the unclaimed old replica with which it shares most
    GPUs (ties go to one of the same role), if there is one."""
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
    return (f"{role}-{number}" for number in itertools.count())
