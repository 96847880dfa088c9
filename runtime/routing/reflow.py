"""Recomputes routes and weights after replicas are lost, or for requests of other lengths: a balanced maximum
flow over what is left.

The front end repeats the flow step of the search (HexGen-2, section 3.3) in milliseconds: replicas and their
plans stay, only the flow changes. It solves two linear programs: the first finds the maximum flow, the second
a flow of that size with the lowest peak utilisation. For other lengths, a third one finds among those the
flow that is closest to the planned shares. A mixed replica may carry any flow within its region:
requests that it serves alone, prompts for others and answers for others. Links, network cards, uplinks and
GPU ports are shared as in hexgen2.checks, unless the placement says that links are pairwise.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import ClassVar

import numpy as np
from scipy.sparse import coo_array, csr_array, hstack, vstack

from cluster_specs.loader import resolve
from cost_model.pipeline import PipelineSemantics
from hexgen2.cluster import Cluster
from hexgen2.network.occupancy import KvTransfer, Resource, Sent, activations, occupied_s, parts_of_gpus
from hexgen2.network.shared_links import SharedLinks
from hexgen2.placement import Placement, Replica, Throughput
from hexgen2.placement import Route as PlacedRoute
from hexgen2.prediction.bottlenecks import bottlenecks_of
from hexgen2.prediction.latency import latency_of
from hexgen2.region import Region
from hexgen2.workload.prompt_limits import divided, prompt_factors
from runtime.routing.router import Route, routes_of

MANY_PAIRS = 400
"""Up to this many pairs of a replica that prefills and one that decodes, for others, every pair may become a
route; beyond, only the placement's own routes, plus new ones for replicas that lost all of theirs."""
PARTNERS = 4
"""New routes for such a replica: to this many others, those with the largest capacity."""
NEGLIGIBLE = 1e-6
"""A route that carries less than this share of the flow is a spare."""
KEPT = (1 - 1e-9, 1 - 1e-6)
"""Shares of the largest flow that balancing has to keep, the first that the solver can: its largest flow may
exceed the limits by its tolerance (1e-7), so that keeping all of it is impossible."""
EACH_ROLE = 1e-4
"""Weight of each role's peak utilisation beside the largest of them."""
ENOUGH = 0.98
"""A flow close to the planned shares has to carry this share of the largest: formulas know no better."""

Pair = tuple[str, str]


class Reflow:
    """Computes the flow of a placement without some of its replicas.

    Parameters
    ----------
    placement : checked (see hexgen2.checks)
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._replicas = {replica.id: replica for replica in placement.replicas}
        self._planned = routes_of(placement)
        self._cluster = Cluster.from_spec(resolve(placement.cluster, "cluster", Path()))
        self._links = SharedLinks(self._cluster)
        self._costs = placement.costs()
        self._semantics: PipelineSemantics = placement.cost_model.pipeline  # type: ignore[assignment]
        self._known: dict[Pair, PlacedRoute] = {(r.from_, r.to): r for r in placement.routes}
        self._busy: dict[Pair, dict[Resource, float]] = {}

    def routes(self, lost: Collection[str]) -> list[Route]:
        """The routes without the lost replicas, with the flow in requests/s as weight; 0 makes a spare.

        Without a loss these are the placement's own routes. Colocated replicas keep their load. As long as a
        mixed replica, or a prefill and a decode replica are left, there is a route that can serve. Routes for
        long prompts stay such where another one to the same replica takes the short ones.
        """
        return self._limited(self._solved(lost)) if lost else list(self._planned)

    def _limited(self, routes: list[Route]) -> list[Route]:
        """The routes, whose flow is for requests of all lengths, with the limits of the placement's."""
        limits = {(r.prefill, r.decode): r.min_prompt_tokens for r in self._planned if r.min_prompt_tokens}
        if not limits:
            return routes
        flows, kept = divided(self._costs.lengths, {(r.prefill, r.decode): r.weight for r in routes}, limits)
        return [Route(*pair, flow, kept.get(pair, 0)) for pair, flow in flows.items()]

    def _of_all_lengths(self, lost: Collection[str]) -> dict[Pair, float]:
        """The flow of each route if all had requests of all lengths."""
        if lost:
            return {(r.prefill, r.decode): r.weight for r in self._solved(lost)}
        flows = [(r.weight, r.min_prompt_tokens) for r in self._planned]
        factors = prompt_factors(self._costs.lengths, flows)
        return {
            (r.prefill, r.decode): r.weight * factor for r, factor in zip(self._planned, factors, strict=True)
        }

    def _solved(self, lost: Collection[str], near: Mapping[Pair, float] | None = None) -> list[Route]:
        """The routes without the lost replicas and their flow, close to the shares of `near` if given."""
        pairs = self._pairs(lost) if near is None else [pair for pair in near if not self._is_colocated(pair)]
        shares = None if near is None else np.array([near[pair] for pair in pairs])
        flows = self._flow(pairs, lost, shares) if pairs else np.zeros(0)
        least = float(flows.sum()) * NEGLIGIBLE
        weights = (flow if flow > least else 0.0 for flow in flows.tolist())
        routes = [Route(*pair, weight) for pair, weight in zip(pairs, weights, strict=True)]
        return routes + [
            r for r in self._planned if self._is_colocated((r.prefill, r.decode)) and r.prefill not in lost
        ]

    def moved(self, lost: Collection[str], other: Reflow) -> list[Route]:
        """As `routes`, but under the lengths of requests that `other` has, which has the same replicas. No
        share moves without need, and none to a route that there was not, but that of a mixed replica to
        itself."""
        return other._limited(self._nearest(lost, other))

    def gain(self, lost: Collection[str], other: Reflow) -> float:
        """How much more requests/s the flow of `moved` carries than that of `routes` does under the other
        lengths, as a share of these. Much can stay as planned: admission sends requests around what is full,
        so that only what mixed replicas do with their time is left to gain."""
        planned = other._carried(self._of_all_lengths(lost), lost)
        moved = {(r.prefill, r.decode): r.weight for r in self._nearest(lost, other)}
        return other._carried(moved, lost) / planned - 1 if planned > 0 else 0.0

    def _nearest(self, lost: Collection[str], other: Reflow) -> list[Route]:
        """The routes of `moved`, if all had requests of all lengths."""
        near = self._of_all_lengths(lost)
        mixed = (r.id for r in self._placement.replicas if r.role == "mixed" and r.id not in lost)
        return other._solved(lost, {(name, name): 0.0 for name in mixed} | near)

    def _carried(self, weights: Mapping[Pair, float], lost: Collection[str]) -> float:
        """The requests/s that routes carry when more come than that: each gets requests in proportion to its
        weight until something that it needs is full, and the others go on."""
        pairs = [pair for pair, weight in weights.items() if weight > 0 and not self._is_colocated(pair)]
        colocated = [pair[0] for pair in weights if self._is_colocated(pair)]
        whole = math.fsum(self._replicas[name].capacity_req_s for name in colocated)
        if not pairs:
            return whole
        limits, (shared, free) = _Limits.of(pairs, self._replicas), self._shared(pairs, lost)
        most = [self.between(*pair).capacity_req_s for pair in pairs]
        takes = vstack([limits.members, shared, np.eye(len(pairs))], format="csr")
        left = np.concatenate([limits.capacity, free, most])
        going, carried = np.array([weights[pair] for pair in pairs]), 0.0
        while going.any():
            used = takes @ going
            lasts = np.divide(left, used, out=np.full(len(left), np.inf), where=used > 0)
            first = int(lasts.argmin())
            carried += float(going.sum() * lasts[first])
            left = np.maximum(0.0, left - used * lasts[first])
            going[takes[[first]].indices] = 0.0
        return whole + carried

    def placement(self, lost: Collection[str]) -> Placement:
        """The placement without the lost replicas, with the recomputed flow and figures; it passes the same
        checks. The bound stays that of all GPUs, which holds for fewer too; `goodput` is left out, and so are
        limits of prompts' lengths: flows are those of requests of all lengths."""
        if not lost:
            return self._placement
        routes = self._solved(lost)
        prompts: dict[str, float] = defaultdict(float)
        answers: dict[str, float] = defaultdict(float)
        for route in routes:
            prompts[route.prefill] += route.weight
            answers[route.decode] += route.weight
        replicas, gone = list[Replica](), set(self._placement.lost)
        for replica in self._placement.replicas:
            if replica.id in lost:
                gone |= set(replica.gpus)
            else:
                used = _utilisation(replica, prompts[replica.id], answers[replica.id])
                replicas.append(replica.model_copy(update={"utilisation": used}))
        served = math.fsum(route.weight for route in routes)
        carrying = [
            self.between(route.prefill, route.decode).model_copy(
                update={"flow_req_s": route.weight, "min_prompt_tokens": 0}
            )
            for route in routes
            if not self._is_colocated((route.prefill, route.decode)) and route.weight > 0
        ]
        kept = {replica.id for replica in replicas}
        workers = [w for w in self._placement.attention_workers if w.replica in kept and w.gpu not in gone]
        serving = {*(gpu for replica in replicas for gpu in replica.gpus), *(w.gpu for w in workers)}
        idle = [gpu for gpu in self._cluster.gpu_ids if gpu not in gone | serving]
        bound, costs = self._placement.bound, self._costs
        changed = {
            "lost": [gpu for gpu in self._cluster.gpu_ids if gpu in gone],
            "replicas": replicas,
            "routes": carrying,
            "throughput": Throughput(req_s=served, output_tok_s=served * self._placement.workload.osl),
            "attention_workers": workers,
            "latency": latency_of(replicas, self._cluster, costs, self._semantics, workers),
            "goodput": None,
            "bound": bound.model_copy(update={"gap": 1 - served / bound.req_s if bound.req_s else 0.0}),
            "bottlenecks": bottlenecks_of(
                *(replicas, carrying, idle, self._cluster, costs, self._placement.cost_model.links)
            ),
        }
        return self._placement.model_copy(update=changed)

    def between(self, prefill: str, decode: str) -> PlacedRoute:
        """The route between two replicas, whether or not the placement has one."""
        pair = prefill, decode
        if pair not in self._known:
            self._known[pair] = self._made(self._replicas[prefill], self._replicas[decode])
        return self._known[pair]

    def _is_colocated(self, pair: Pair) -> bool:
        """Whether it is a colocated replica, whose load no loss changes."""
        return self._replicas[pair[0]].role == "colocated"

    # -- candidates

    def _pairs(self, lost: Collection[str]) -> list[Pair]:
        """Pairs of remaining replicas that may become routes; the placement's own come first."""
        left = [replica for replica in self._placement.replicas if replica.id not in lost]
        prefill = [replica for replica in left if replica.prefills_for_others]
        decode = [replica for replica in left if replica.decodes_for_others]
        own = (route for route in self._planned if not self._is_colocated((route.prefill, route.decode)))
        pairs = dict.fromkeys(
            (route.prefill, route.decode)
            for route in own
            if route.prefill not in lost and route.decode not in lost
        )
        pairs |= dict.fromkeys((each.id, each.id) for each in left if each.role == "mixed")
        if len(prefill) * len(decode) <= MANY_PAIRS:
            return list(pairs | dict.fromkeys((p.id, d.id) for p, d in product(prefill, decode)))
        served = {name for pair in pairs for name in pair}
        for replica in prefill:
            if replica.id not in served:
                pairs |= dict.fromkeys((replica.id, partner.id) for partner in _largest(decode))
        for replica in decode:
            if replica.id not in served:
                pairs |= dict.fromkeys((partner.id, replica.id) for partner in _largest(prefill))
        return list(pairs)

    def _made(self, source: Replica, target: Replica) -> PlacedRoute:
        """A new route between two replicas, or of a mixed one to itself."""
        if source is target:
            ends = {"from": source.id, "to": source.id, "capacity_req_s": source.capacity_req_s}
            return PlacedRoute.model_validate(ends | {"flow_req_s": 0.0, "kv_bytes_per_req": 0.0})
        costs = self._costs
        route = PlacedRoute.between(
            source, target, costs.kv_bytes_per_layer, to_every_rank=costs.kv_to_every_rank
        )
        seconds = KvTransfer.of(parts_of_gpus(self._cluster, route.parts)).alone_s(self._links)
        return route.model_copy(update={"capacity_req_s": 1 / max(seconds, 1e-12)})

    # -- what is shared

    def _use(self, pair: Pair) -> dict[Resource, float]:
        """Seconds that one request of a route occupies each resource, pipeline traffic included."""
        if pair not in self._busy:
            transfer = KvTransfer.of(parts_of_gpus(self._cluster, self.between(*pair).parts))
            prefill, decode = (self._replicas[name] for name in pair)
            hops = [*self._activations(prefill, self._costs.isl), *self._activations(decode, self._costs.osl)]
            self._busy[pair] = transfer.busy_s(self._links, hops)
        return self._busy[pair]

    def _activations(self, replica: Replica, tokens: float) -> list[Sent]:
        """The activations that so many tokens send from stage to stage."""
        nodes = self._cluster.nodes_of(stage.gpus[0] for stage in replica.stages)
        return activations(nodes, tokens * self._costs.activation_bytes_per_token)

    def _shared(self, pairs: list[Pair], lost: Collection[str]) -> tuple[csr_array, np.ndarray]:
        """Seconds per request [resources, pairs], and the share of each resource's time [resources] that
        colocated replicas leave free; no rows if routes share nothing."""
        if self._placement.cost_model.links != "shared":
            return csr_array((0, len(pairs))), np.zeros(0)
        sent = list[Sent]()
        for replica in self._placement.replicas:
            if replica.role == "colocated" and replica.id not in lost:
                own = replica.capacity_req_s * replica.utilisation
                sent += self._activations(replica, own * (self._costs.isl + self._costs.osl))
        taken = occupied_s(self._links, sent)
        rows: dict[Resource, int] = {}
        entries = [
            (rows.setdefault(resource, len(rows)), column, seconds)
            for column, pair in enumerate(pairs)
            for resource, seconds in self._use(pair).items()
        ]
        row, column, seconds = zip(*entries, strict=True) if entries else ((), (), ())
        left = np.array([max(0.0, 1 - taken.get(resource, 0.0)) for resource in rows])
        return csr_array(coo_array((seconds, (row, column)), shape=(len(rows), len(pairs)))), left

    # -- the flow

    def _flow(self, pairs: list[Pair], lost: Collection[str], near: np.ndarray | None = None) -> np.ndarray:
        """The flow of each pair [pairs], in requests/s; if `near` is given [pairs], as close to its shares as
        a balanced maximum flow can be."""
        limits = _Limits.of(pairs, self._replicas)
        shared, left = self._shared(pairs, lost)
        unit = limits.unit_req_s  # scale rates, so that tolerances are relative
        if unit <= 0:
            return np.zeros(len(pairs))
        capacity = limits.capacity / unit
        most = np.array([min(self.between(*pair).capacity_req_s / unit, 1.0) for pair in pairs])
        matrix = vstack([limits.members, shared * unit], format="csr")
        largest = _minimised(-np.ones(len(pairs)), matrix, np.concatenate([capacity, left]), most)
        value = 0.0 if largest is None else float(largest.sum())
        if largest is None or value <= 0:
            return np.zeros(len(pairs))
        if near is not None and near.sum() > 0:
            carried = value * ENOUGH
            rows = vstack([matrix, -np.ones((1, len(pairs)))], format="csr")
            sides = np.concatenate([capacity, left, [-carried]])
            closest = _closest(rows, sides, most, near * (carried / near.sum()))
            return (largest if closest is None else closest[: len(pairs)]) * unit
        # Balance: scale each capacity from the role's mean utilisation (slack 0) up to the whole (slack 1).
        # Columns: the pairs, the largest slack, and each role's.
        means = limits.means(value, capacity)
        roles = len(_Limits.ROLES)
        spread = capacity * (means - 1)
        slack = coo_array((spread, (range(len(spread)), limits.role)), shape=(len(spread), roles))
        matrix = vstack(
            [
                hstack([limits.members, csr_array((len(spread), 1)), slack]),
                hstack([shared * unit, csr_array((len(left), 1 + roles))]),
                hstack([csr_array((roles, len(pairs))), -np.ones((roles, 1)), np.eye(roles)]),
                hstack([-np.ones((1, len(pairs))), csr_array((1, 1 + roles))]),
            ],
            format="csr",
        )
        cost = np.concatenate([np.zeros(len(pairs)), [1.0], np.full(roles, EACH_ROLE)])
        most = np.append(most, np.ones(1 + roles))
        for share in KEPT:
            sides = np.concatenate([capacity * means, left, np.zeros(roles), [-value * share]])
            balanced = _minimised(cost, matrix, sides, most)
            if balanced is not None:
                return balanced[: len(pairs)] * unit
        return largest * unit


@dataclass(frozen=True)
class _Limits:
    """What the replicas at the ends of some pairs can do: a row for each, but for a mixed one a row for each
    edge of its region.

    Attributes
    ----------
    members : requests/s of the row's capacity that one request/s of each pair takes [rows, pairs]
    capacity : requests/s [rows]
    role : of the row's replica, as an index of ROLES [rows]
    unit_req_s : requests/s that all of them can prefill, or decode if that is less
    """

    ROLES: ClassVar = ("prefill", "decode", "mixed")

    members: csr_array
    capacity: np.ndarray
    role: np.ndarray
    unit_req_s: float

    @classmethod
    def of(cls, pairs: list[Pair], replicas: dict[str, Replica]) -> _Limits:
        rows: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
        capacity, roles, sides = list[float](), list[int](), [0.0, 0.0]
        for name in dict.fromkeys(name for pair in pairs for name in pair):
            replica = replicas[name]
            for prompts, answers, most in _edges(replica):
                rows[name].append((len(capacity), prompts, answers))
                capacity.append(most)
                roles.append(cls.ROLES.index(replica.role))
            if replica.prefills_for_others:
                sides[0] += min(most / prompts for prompts, _, most in _edges(replica) if prompts > 0)
            if replica.decodes_for_others:
                sides[1] += min(most / answers for _, answers, most in _edges(replica) if answers > 0)
        entries = [
            (row, column, share)
            for column, (prefill, decode) in enumerate(pairs)
            for row, share in [(r, a) for r, a, _ in rows[prefill]] + [(r, b) for r, _, b in rows[decode]]
        ]
        row, column, share = zip(*entries, strict=True)
        members = coo_array((share, (row, column)), shape=(len(capacity), len(pairs)))
        return cls(csr_array(members), np.array(capacity), np.array(roles), min(sides))

    def means(self, value: float, capacity: np.ndarray) -> np.ndarray:
        """A limit below which the busiest of each row's role can't be when so much is carried [rows]: the
        mean utilisation of the role, or 0 where mixed replicas can take over its work.

        Parameters
        ----------
        value, capacity : in the same unit
        """
        if self.ROLES.index("mixed") in self.role:
            return np.zeros(len(capacity))
        whole = np.bincount(self.role, weights=capacity)
        return np.minimum(1.0, value / whole)[self.role]


def _edges(replica: Replica) -> list[tuple[float, float, float]]:
    """(a, b, c) of each limit a p + b d <= c on the prompts/s p and answers/s d of a replica; the larger of a
    and b is 1, and c is in requests/s."""
    if replica.region is None:
        return [(1.0, 1.0, replica.capacity_req_s)]
    edges = Region(tuple(replica.region)).edges
    return [(a / max(a, b), b / max(a, b), 1 / max(a, b)) for a, b in edges]


def _utilisation(replica: Replica, prompts: float, answers: float) -> float:
    """The share of a replica that so many prompts/s and answers/s take."""
    if replica.role == "mixed":
        return replica.busy(prompts, answers)
    return max(prompts, answers) / replica.capacity_req_s if replica.capacity_req_s else 0.0


def _largest(replicas: list[Replica]) -> list[Replica]:
    return sorted(replicas, key=lambda replica: -replica.capacity_req_s)[:PARTNERS]


def _closest(matrix: csr_array, limits: np.ndarray, most: np.ndarray, to: np.ndarray) -> np.ndarray | None:
    """The x, 0 <= x <= most and matrix x <= limits, whose first entries differ least from `to`, by the sum of
    the differences; None if the solver finds none."""
    count, wide = len(to), len(most)
    # One more column for each of them: at least the difference, up or down.
    picks = csr_array((np.ones(count), (range(count), range(count))), shape=(count, wide))
    wider = vstack(
        [
            hstack([matrix, csr_array((matrix.shape[0], count))]),
            hstack([picks, -np.eye(count)]),
            hstack([-picks, -np.eye(count)]),
        ],
        format="csr",
    )
    cost = np.concatenate([np.zeros(wide), np.ones(count)])
    sides = np.concatenate([limits, to, -to])
    return _minimised(cost, wider, sides, np.concatenate([most, np.full(count, np.inf)]))


def _minimised(
    cost: np.ndarray, matrix: csr_array, limits: np.ndarray, most: np.ndarray
) -> np.ndarray | None:
    """argmin cost x over 0 <= x <= most and matrix x <= limits; None if the solver finds none."""
    from scipy.optimize import linprog  # Slow to import, and seldom needed.

    bounds = np.stack([np.zeros(len(most)), most], axis=1)
    found = linprog(cost, A_ub=matrix, b_ub=limits, bounds=bounds, method="highs")
    return np.asarray(found.x) if found.success else None
