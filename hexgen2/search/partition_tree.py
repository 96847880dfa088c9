"""Branch and bound over partitions of a few nodes that are all different.

Each branch has some groups with roles, and what is left of the nodes; the next group is on the last of these,
or one of its GPUs stays idle. What a branch can reach is bounded at several prices of a prompt
(bounds/partitions.py): its groups are worth what they are worth, and the rest what its best partition is.
The most promising branch is opened first, so that the bound of the one that is next is one of all solutions
that were not looked at (best-first search; Land & Doig, 1960). Groups are planned only once a partition is
complete that may be the best.
"""

from __future__ import annotations

import heapq
import itertools
from typing import NamedTuple

import numpy as np

from hexgen2.search.bounds.partitions import GroupInRole, PartitionBound
from hexgen2.search.bounds.upper_bounds import UpperBound
from hexgen2.search.enumeration import ASSUMPTIONS
from hexgen2.search.state import SearchState
from hexgen2.search.ties import exceeds

LATE = 0.95
"""Once this share of the time limit has passed, stages stay in the order of the plans."""
COMPLETE = -1
"""Follows a branch to which no group is to be added."""


class _Branch(NamedTuple):
    """Groups, and the number of what is left for others."""

    groups: tuple[GroupInRole, ...]
    left: int


class PartitionTree:
    """Branches that are still open, and those that follow each of them, the most promising first."""

    def __init__(self, state: SearchState, bound: PartitionBound) -> None:
        self._state, self._bound = state, bound
        self._open: list[tuple[float, int, _Branch, np.ndarray, np.ndarray, int]] = []
        self._numbers = itertools.count()

    def search(self, most: int | None = None) -> None:
        """Offer whatever may beat the best, until nothing else can, so many branches were opened, or time is
        up; then bound what is left."""
        state, parts = self._state, self._bound.subsets
        found = self._bound.at_prices(state.stopping.out_of_time)
        if found is None:
            return
        self._prices, self._worth, self._best = found
        self._limit = min(self._bound.req_s, float(self._best[:, -1].min()))
        self._expand(_Branch((), len(parts) - 1), self._limit)
        opened = 0
        while self._open and not state.stopping.out_of_time():
            if (most is not None and opened >= most) or not exceeds(-self._open[0][0], state.best_req_s):
                break
            opened += 1
            self._open_next()
        complete = not self._open or not exceeds(-self._open[0][0], state.best_req_s)
        least = state.best_req_s if complete else max(state.best_req_s, -self._open[0][0])
        if least > 0:
            state.bounded_by(UpperBound(least, "enumeration" if complete else "partitions", ASSUMPTIONS))

    def _open_next(self) -> None:
        negative, _, branch, limits, codes, at = heapq.heappop(self._open)
        if codes[at] == COMPLETE:
            self._try(branch.groups)
            return
        if at + 1 < len(limits):
            self._push(branch, limits, codes, at + 1)
        which, number = divmod(int(codes[at]), len(self._bound.subsets))
        groups, left = branch.groups, branch.left - number
        if which < len(self._bound.roles):
            groups = (*groups, (number, which))
        if left and float(self._best[:, left].max()) > 0:
            self._expand(_Branch(groups, left), -negative)
        elif groups:
            self._hold(groups, -negative)

    def _expand(self, branch: _Branch, limit: float) -> None:
        """Find the branches that follow one of this limit."""
        parts, left = self._bound.subsets, branch.left
        some = parts.groups_on_last(left)
        idle = np.array([left - parts.fewer(left)])
        worth = np.zeros(len(self._prices))
        for number, which in branch.groups:
            worth = worth + self._worth[:, which, number]
        rest = self._best[:, left - some] + worth[:, None]
        limits, codes = [], []
        for which in range(len(self._bound.roles)):
            here = self._worth[:, which, some]
            limits.append(np.where(here.max(axis=0) > 0, (here + rest).min(axis=0), 0.0))
            codes.append(which * len(parts) + some)
        limits.append((self._best[:, left - idle] + worth[:, None]).min(axis=0))
        codes.append(len(self._bound.roles) * len(parts) + idle)
        every, code = np.minimum(limit, np.concatenate(limits)), np.concatenate(codes)
        hopeful = every > self._state.best_req_s
        every, code = every[hopeful], code[hopeful]
        order = np.argsort(-every, kind="stable")
        if len(order):
            self._push(branch, every[order], code[order], 0)

    def _push(self, branch: _Branch, limits: np.ndarray, codes: np.ndarray, at: int) -> None:
        entry = (-float(limits[at]), next(self._numbers), branch, limits, codes, at)
        heapq.heappush(self._open, entry)

    def _hold(self, groups: tuple[GroupInRole, ...], limit: float) -> None:
        """Keep a complete partition if it may be the best."""
        limit = min(limit, self._bound.served(groups))
        if exceeds(limit, self._state.best_req_s):
            self._push(_Branch(groups, 0), np.array([limit]), np.array([COMPLETE]), 0)

    def _try(self, groups: tuple[GroupInRole, ...]) -> None:
        """Evaluate a complete partition whose groups are planned; otherwise plan them, and keep it for when
        nothing is more promising."""
        state, bound, new = self._state, self._bound, False
        for number, which in groups:
            if bound.plan((number, which)):
                new = True
                planned = bound.worth_at(self._prices, (number, which))
                self._worth[:, which, number] = np.minimum(self._worth[:, which, number], planned)
                if not exceeds(bound.served(groups), state.best_req_s):
                    return
        if new:
            self._hold(groups, bound.req_s)
            return
        found = state.evaluator.evaluate(bound.solution(groups))
        if not state.stopping.spent(LATE):
            found = state.evaluator.reordered(found)
        state.offer(found, "partition")
