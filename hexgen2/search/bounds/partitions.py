"""An upper bound over all partitions of a few nodes that are all different, and the partitions that reach it.

Of any solution let p and d be the prompts/s that a group computes, for itself or others, and the answers/s
that it decodes. The requests/s are at most the sum of p and at most that of d, so for any w in [0, 1]

    requests/s <= sum over groups of w p + (1 - w) d <= max over partitions of sum of v_w(T),

where v_w(T) is the most that w p + (1 - w) d can be on the GPUs T in any role (a Lagrangian relaxation: what
is given up is that the same requests are computed and decoded). subsets.py finds that maximum exactly, with
whole groups on the nodes that they are on, so that links inside a group count as they are; the least of all w
is the bound. It is tighter than a linear program where only a few groups fit.

A group sends p - d KV caches/s more than it receives. Each leaves the nodes of all its layers: if all GPUs
of these are in the group, by links to other nodes. So in a plan with a share s_n of the layers on node n, at
most min over n of c_n / s_n leave, where c_n are the KV caches/s that the network card of node n and its
links to nodes outside of the group carry; whatever the plan, at most the sum of c_n, since the shares add up
to 1. The same holds for what arrives. The shares of a colocated group are those of its plan; others may have
the order of their stages changed, and their layers with it.

v_w(T) is first what no plan of T exceeds. The groups are planned that the best partition for a w has, and
those with which another one could be best: v_w(T) + best(all less T) says how good. That is repeated until
the best partition is all planned, and then w moves to where the partitions found so far are worth least
(Kelley, 1960).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from cost_model.base import TensorGroup
from cost_model.hardware import NO_LINK
from hexgen2.region import Point, Region
from hexgen2.search.bounds.columns import cut
from hexgen2.search.bounds.subsets import Subsets
from hexgen2.search.knapsack import most_served
from hexgen2.search.planning.plan import GroupPlan, Planner
from hexgen2.search.problem import Group, NodeCounts, Problem, Solution
from hexgen2.search.ties import first_largest

FEWEST_NODES, DIFFERENT = 8, 0.25
"""Fewer nodes are not worth the trouble, and neither are those with fewer different links between them than
this share of all ordered pairs: there, patterns over classes of nodes say as much."""
MOST_PAIRS = 60_000_000
"""Pairs of a part of all GPUs and a group in it that there is time for: 3 to the power of 16 single GPUs."""
MOST_GROUPS = 25_000
"""And groups."""
LOOKED_AT_ONCE, AT_ONCE = 768, 40
"""Groups that are looked at together, and that are planned before the best partition is looked for again."""
HALVINGS = 6
"""How often the range of w is halved before groups are planned."""
CLOSE = 1e-3
"""A bound is left as it is once no other w can tighten it by more than this share."""
GRID = 257
"""The values of w at which partitions are compared."""
BESIDE = (0.05, 0.12)
"""How far from the best w others are looked at, for parts of all groups."""
DIGITS = 9
"""Of what partitions with a group may be worth, relative to the bound, where groups are put in order."""

GroupInRole = tuple[int, int]
"""The number of a group's GPUs (see Subsets), and that of its role among the problem's."""


class _Carried(NamedTuple):
    """KV caches/s that can leave and reach a group (infinity if nothing is known)."""

    sent: float
    received: float


NOTHING = _Carried(0.0, 0.0)


class PartitionBound:
    """The bound for one problem, which tightens as groups are planned.

    Attributes
    ----------
    complete : whether all groups were looked at; nothing else is valid before
    req_s : requests/s that no solution exceeds
    """

    def __init__(self, planner: Planner, problem: Problem) -> None:
        self.problem, self._planner, self.roles = problem, planner, problem.roles
        self.subsets = Subsets([len(gpus) for gpus in problem.node_gpus])
        self.req_s, self.complete = math.inf, False
        self._everything = len(self.subsets) - 1
        self._kv_limits = _KvLimits(problem)
        self._corners: dict[GroupInRole, tuple[Point, ...]] = {}
        # [roles] of [c, 2, parts]: the corners of what groups can do, 0 where there are fewer than c.
        self._able = [np.zeros((1, 2, len(self.subsets))) for _ in self.roles]
        self._planned: set[GroupInRole] = set()
        self._least_price = 0.5

    @staticmethod
    def fits(planner: Planner, problem: Problem) -> bool:
        """Whether there is time for all partitions, and the links between nodes are all different, so that
        there is no shorter way."""
        nodes, kinds = len(problem.node_gpus), problem.link_kinds[0]
        different = len(np.unique(kinds[~np.eye(nodes, dtype=bool)]))
        if nodes < FEWEST_NODES or different < nodes * (nodes - 1) * DIFFERENT or problem.targets.given:
            return False
        groups = sum(map(planner.classes.count_patterns, range(1, planner.span + 1)))
        sizes = [len(gpus) for gpus in problem.node_gpus]
        return groups <= MOST_GROUPS and Subsets.pairs(sizes) <= MOST_PAIRS

    def look(self, stop: Callable[[float], bool]) -> bool:
        """Find out what no plan of any group exceeds; whether there was time for all.

        Parameters
        ----------
        stop : whether to stop after this share of all groups
        """
        numbers = self._large_enough()
        # Groups on many nodes take longest: so that their pace is known, they come among the others.
        numbers = numbers[np.random.default_rng(0).permutation(len(numbers))]
        for first in range(0, len(numbers), LOOKED_AT_ONCE):
            if stop(first / len(numbers)):
                return False
            self._look_at(numbers[first : first + LOOKED_AT_ONCE].tolist())
        self.complete = True
        return True

    def _large_enough(self) -> np.ndarray:
        """The groups on no more nodes than replicas span whose memory holds the weights."""
        costs, counts = self.problem.costs, self.subsets.counts
        memory = [
            costs.stage_memory("decode", TensorGroup(accelerator, 1, NO_LINK), first=True, last=True)
            for accelerator in self.problem.node_accelerator
        ]
        room = np.cumsum(counts * np.array([each.limit for each in memory]), axis=1)[:, -1]
        weights = min(each.per_layer for each in memory) * self.problem.model.layers
        nodes = (counts > 0).sum(axis=1)
        return np.flatnonzero((nodes > 0) & (nodes <= self._planner.span) & (room >= weights))

    def _look_at(self, numbers: Sequence[int]) -> None:
        groups = {number: self.counts(number) for number in numbers}
        self._planner.look_ahead(self.roles, groups.values(), at_once=LOOKED_AT_ONCE)
        for number, group in groups.items():
            limits = [self._planner.limit(role, group) for role in self.roles]
            carried = self._kv_limits.of_any_plan(group) if any(limits) else NOTHING
            for which, limit in enumerate(limits):
                if limit is not None:
                    region = limit.region if self.problem.mixes else None
                    self._set((number, which), limit.req_s, region, carried)

    def counts(self, number: int) -> NodeCounts:
        """The GPUs with this number."""
        return tuple((n, c) for n, c in enumerate(self.subsets.counts[number].tolist()) if c)

    def solution(self, groups: Sequence[GroupInRole]) -> Solution:
        """These groups."""
        return Solution(tuple(Group(self.roles[which], self.counts(number)) for number, which in groups))

    def _set(self, group: GroupInRole, req_s: float, region: Region | None, carried: _Carried) -> None:
        """A group serves so many requests/s by itself, or does this for others, as far as KV caches move."""
        number, which = group
        corners: tuple[Point, ...] = ((req_s, req_s),)
        if self.roles[which] == "prefill":
            corners = ((min(req_s, carried.sent), 0.0),)
        elif self.roles[which] == "decode":
            corners = ((0.0, min(req_s, carried.received)),)
        elif region is not None:
            corners = (*corners, *_within(region.corners, carried))
        able = self._able[which]
        if len(corners) > len(able):
            more = np.zeros((len(corners) - len(able), *able.shape[1:]))
            able = self._able[which] = np.concatenate([able, more])
        able[:, :, number] = 0.0
        able[: len(corners), :, number] = corners
        self._corners[group] = corners

    def plan(self, group: GroupInRole) -> bool:
        """Plan a group in a role, from then on it is worth no more than that; whether that is new."""
        if group in self._planned:
            return False
        self._planned.add(group)
        number, which = group
        role, counts = self.roles[which], self.counts(number)
        plan = self._planner.plan(role, counts)
        if plan is None:
            self._corners.pop(group, None)
            self._able[which][:, :, number] = 0.0
            return True
        mixes = role == "colocated" and self.problem.mixes
        region = self._planner.mixtures(plan).widest if mixes else None
        carried = self._kv_limits.of_plan(counts, plan) if mixes else self._kv_limits.of_any_plan(counts)
        self._set(group, plan.capacity_req_s, region, carried)
        return True

    def worth(self, price: float) -> np.ndarray:
        """[roles, parts] what each group is worth where a prompt is worth `price` and an answer the rest of
        1."""
        return np.stack([(price * able[:, 0] + (1 - price) * able[:, 1]).max(axis=0) for able in self._able])

    def tightened(
        self, stop: Callable[[], bool], known: Callable[[], float], most: int
    ) -> Iterator[Solution]:
        """The best partitions for one price of a prompt after the other, as groups get plans and the bound
        tightens: until it is as tight as it gets, so many groups are planned, or it is time to stop.

        Parameters
        ----------
        known : requests/s that are reached already; groups with which no more can be reached are not planned
        """
        prices = np.linspace(0.0, 1.0, GRID)
        floor = np.zeros(GRID)  # What the partitions found are worth at each price.
        price = self._price_by_limits(stop)
        while not stop():
            worth = self.worth(price)
            best = self._best(worth, stop)
            if best is None or self.req_s <= known():
                return
            groups = self._chosen(worth, best)
            yield self.solution(groups)
            new = [group for group in groups if group not in self._planned]
            if not new:
                floor = np.maximum(floor, sum(self.worth_at(prices, group) for group in groups))
                if "colocated" in self.roles and len(self.roles) > 1:
                    yield Solution(tuple(Group("colocated", g.counts) for g in self.solution(groups).groups))
                if self.req_s <= float(floor.min()) * (1 + CLOSE):
                    return
                price = float(prices[first_largest(-floor)])
                continue
            for group in (*new, *self._hopeful(worth, best, known())):
                if stop() or len(self._planned) >= most:
                    return
                self.plan(group)

    def _best(self, worth: np.ndarray, stop: Callable[[], bool]) -> np.ndarray | None:
        """[parts] the best of each part at this worth [roles, parts], which is a bound."""
        found = self.subsets.best(worth.max(axis=0)[:, None], stop)
        if found is None:
            return None
        self.req_s = min(self.req_s, float(found[-1, 0]))
        return found[:, 0]

    def _chosen(self, worth: np.ndarray, best: np.ndarray) -> list[GroupInRole]:
        """The groups of the best partition of everything, each in the role in which it is worth most."""
        numbers = self.subsets.partition(worth.max(axis=0), best, self._everything)
        return [(number, first_largest(worth[:, number])) for number in numbers]

    def _hopeful(self, worth: np.ndarray, best: np.ndarray, known: float) -> list[GroupInRole]:
        """The groups without plans with which a partition could be best, and better than what is known."""
        together = np.where(worth > 0, worth + best[::-1], 0.0)
        for number, which in self._planned:
            together[which, number] = 0.0
        flat = np.round(together.ravel() / best[-1], DIGITS)
        order = np.argsort(-flat, kind="stable")[:AT_ONCE]
        return [
            (int(at) % len(self.subsets), int(at) // len(self.subsets))
            for at in order
            if flat[at] * best[-1] > known
        ]

    def worth_at(self, prices: np.ndarray, group: GroupInRole) -> np.ndarray:
        """[k] what a group is worth at these prices [k]."""
        corners = self._corners.get(group, ((0.0, 0.0),))
        return np.stack([prices * p + (1 - prices) * d for p, d in corners]).max(axis=0)

    def _price_by_limits(self, stop: Callable[[], bool]) -> float:
        """The price at which limits bound the most: halfway, and halfway again on the side to which what the
        best partition does more of loses worth."""
        least, low, high = (math.inf, 0.5), 0.0, 1.0
        for _ in range(HALVINGS):
            price = (low + high) / 2
            worth = self.worth(price)
            best = self._best(worth, stop)
            if best is None:
                break
            least = min(least, (float(best[-1]), price))
            step = np.array([price, min(1.0, price + 1e-6)])
            lines = [self.worth_at(step, group) for group in self._chosen(worth, best)]
            rises = math.fsum(float(after - before) for before, after in lines) > 0
            low, high = (low, price) if rises else (price, high)
        return least[1]

    def at_prices(self, stop: Callable[[], bool]) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Prices [k] at which parts of all groups are bounded, what each group is worth [k, roles, parts] and
        the best of each part [k, parts]; None once it is time to stop."""
        near = self._price_by_limits(stop)
        beside = [near + sign * step for step in BESIDE for sign in (-1, 1)]
        prices = sorted({0.0, 1.0, near, near / 2, (1 + near) / 2, *(p for p in beside if 0 < p < 1)})
        worth = np.stack([self.worth(price) for price in prices])
        best = []
        for each in worth:
            found = self._best(each, stop)
            if found is None:
                return None
            best.append(found)
        return np.array(prices), worth, np.stack(best)

    def served(self, groups: Sequence[GroupInRole]) -> float:
        """Requests/s that these groups do not exceed together; 0 if one of them has no plan."""
        if not all(group in self._corners for group in groups):
            return 0.0
        prefill, decode, regions = 0.0, 0.0, list[Region]()
        for group in groups:
            corners = self._corners[group]
            role = self.roles[group[1]]
            if role == "prefill":
                prefill += corners[0][0]
            elif role == "decode":
                decode += corners[0][1]
            elif len(corners) == 1:
                prefill, decode = prefill + corners[0][0], decode + corners[0][1]
            else:
                regions.append(Region.around(corners))
        return most_served(prefill, decode, regions)[0] if regions else min(prefill, decode)


def _within(corners: Sequence[Point], carried: _Carried) -> Sequence[Point]:
    """The corners of what a region of these corners has, as far as KV caches move."""
    if any(p - d > carried.sent for p, d in corners):
        corners = cut(corners, carried.sent, 1.0)
    if any(d - p > carried.received for p, d in corners):
        corners = cut(corners, carried.received, -1.0)
    return corners


class _KvLimits:
    """What network cards and links to nodes outside of a group carry, in KV caches/s."""

    def __init__(self, problem: Problem) -> None:
        self._problem, nodes = problem, len(problem.node_gpus)
        kv_bytes = problem.costs.kv_bytes_per_layer * problem.model.layers
        self._limited = problem.links == "shared" and kv_bytes > 0
        self._sizes = [len(gpus) for gpus in problem.node_gpus]
        if self._limited:
            links = problem.shared_links.capacity_bytes_s[: nodes**2].reshape(nodes, nodes).copy()
            np.fill_diagonal(links, 0.0)
            self._cards = (problem.cluster.card_bytes_s / kv_bytes).tolist()
            self._pairs = (links / kv_bytes).tolist()
            into = zip(*self._pairs, strict=True)
            self._all = [(math.fsum(a), math.fsum(b)) for a, b in zip(self._pairs, into, strict=True)]

    def of_any_plan(self, counts: NodeCounts) -> _Carried:
        """The sum over the nodes of a group."""
        return self._of(counts, None)

    def of_plan(self, counts: NodeCounts, plan: GroupPlan) -> _Carried:
        """The least over the nodes of a group, each over its share of the layers."""
        layers = dict.fromkeys((node for node, _ in counts), 0)
        for stage in plan.stages:
            layers[stage.node] += stage.layers
        return self._of(counts, [layers[node] / self._problem.model.layers for node, _ in counts])

    def _of(self, counts: NodeCounts, shares: Sequence[float] | None) -> _Carried:
        if not self._limited:
            return _Carried(math.inf, math.inf)
        whole = [node for node, count in counts if count == self._sizes[node]]
        sent, received = list[float](), list[float]()
        for node, count in counts:
            if count < self._sizes[node]:
                sent.append(math.inf)
                received.append(math.inf)
                continue
            out, into = self._all[node]
            out -= math.fsum(self._pairs[node][other] for other in whole)
            into -= math.fsum(self._pairs[other][node] for other in whole)
            sent.append(min(self._cards[node], max(0.0, out)))
            received.append(min(self._cards[node], max(0.0, into)))
        if shares is None:
            return _Carried(math.fsum(sent), math.fsum(received))
        each = [
            [most / share for most, share in zip(side, shares, strict=True) if share > 0]
            for side in (sent, received)
        ]
        return _Carried(*(min(side, default=math.inf) for side in each))
