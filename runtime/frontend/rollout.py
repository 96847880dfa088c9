"""The order in which replicas are replaced while requests run: in waves, so that some always serve."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Wave:
    """Replicas that leave together, and those that start once these have finished their requests."""

    leave: frozenset[str]
    start: frozenset[str]


def waves(
    staying: Collection[str],
    leaving: Collection[str],
    blockers: Mapping[str, Collection[str]],
    roles: Mapping[str, str],
) -> list[Wave]:
    """The waves that lead from one set of replicas to another.

    Each wave replaces as many replicas as possible while some can still prefill and some decode; only if no
    such wave exists does one replace all that are left.

    Parameters
    ----------
    staying : replicas in both sets, which serve throughout
    leaving : replicas that serve until their wave
    blockers : for each new replica, those of `leaving` that occupy its GPUs
    roles : by replica: "prefill", "decode", "colocated" or "mixed"
    """
    standing, left, found = set(staying) | set(leaving), dict(blockers), list[Wave]()
    while left:
        gone = set[str]()
        for name in sorted(left, key=lambda name: (len(left[name]), name)):
            more = gone | set(left[name])
            if _serve(standing - more, roles):
                gone = more
        start = {name for name in left if gone >= set(left[name]) & standing}
        if not start:
            gone, start = {each for own in left.values() for each in own}, set(left)
        found.append(Wave(frozenset(gone & standing), frozenset(start)))
        standing = (standing - gone) | start
        left = {name: own for name, own in left.items() if name not in start}
    if rest := standing & set(leaving):
        found.append(Wave(frozenset(rest), frozenset()))
    return found


def _serve(names: Collection[str], roles: Mapping[str, str]) -> bool:
    have = {roles[name] for name in names}
    return bool(have & {"colocated", "mixed"}) or have >= {"prefill", "decode"}
