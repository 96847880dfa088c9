"""KV caches on their way from prefill to decode replicas, over links that they share.

A transfer takes the network cards, uplinks and links of its route and the ports of its GPUs; each of these
serves all its transfers side by side, in equal shares of its time. Every chunk of a prompt is a transfer. It
begins with the step that computes it: until that ends it goes no faster than layers are computed, and leaves
the rest of its shares to the others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hexgen2.cluster import Cluster
from hexgen2.placement import Route
from hexgen2.shared_links import Links, SharedLinks

Resource = tuple


@dataclass(frozen=True, eq=False)
class RouteCost:
    """Of one route: the seconds for which a prompt token's KV cache occupies each resource, its bytes, and
    the seconds before the first byte."""

    busy_s: Mapping[Resource, float]
    bytes_per_token: float
    latency_s: float


def route_cost(route: Route, cluster: Cluster, shared: SharedLinks, links: Links, isl: float) -> RouteCost:
    """From the GPU pairs of a placement's route; isl: the prompt tokens that its bytes are for.

    With links "pairwise" the traffic between two nodes has the link between them to itself, route by route.
    """
    busy: dict[Resource, float] = defaultdict(float)
    latency = 0.0
    for link in route.links:
        a, b = cluster.index(link.from_), cluster.index(link.to)
        latency = max(latency, float(cluster.latency_s[a, b]))
        source, target = int(cluster.node_of[a]), int(cluster.node_of[b])
        if source == target:
            seconds = link.bytes_per_req / float(cluster.bandwidth_bytes_s[a, b])
            busy["send", a] += seconds
            busy["receive", b] += seconds
        elif links == "shared":
            for resource in shared.resources_between(source, target):
                busy["link", resource] += link.bytes_per_req / float(shared.capacity_bytes_s[resource])
        else:
            own = source * shared.nodes + target
            busy["route", route.from_, route.to, own] += link.bytes_per_req / float(
                shared.capacity_bytes_s[own]
            )
    per_token = {resource: seconds / isl for resource, seconds in busy.items()}
    return RouteCost(per_token, route.kv_bytes_per_req / isl, latency)


@dataclass(eq=False, slots=True)
class _Transfer:
    request: object
    busy_s: dict[Resource, float]
    begun_s: float
    left: float = 1.0
    rate: float = 0.0
    most: float = 0.0
    at_s: float = 0.0
    version: int = 0
    done: Callable[[Any, float], None] = field(repr=False, kw_only=True)


class Transfers:
    """All transfers under way. `schedule(time_s, call, argument)` is the simulation's."""

    def __init__(self, schedule: Callable) -> None:
        self._schedule = schedule
        self._users: dict[Resource, dict[_Transfer, None]] = defaultdict(dict)
        self._shares: dict[Resource, tuple[float, float]] = {}
        self._under_way: dict[object, list[_Transfer]] = defaultdict(list)
        self._changed: dict[_Transfer, None] = {}

    def begin(
        self,
        request: Hashable,
        cost: RouteCost,
        tokens: int,
        layers: int,
        begins_s: float,
        computed_s: float,
        done: Callable[[Any, float], None],
    ) -> None:
        """A chunk of a request's prompt that begins at begins_s, now or later, and has computed all layers at
        computed_s sends the KV cache of so many tokens; done(request, time_s) is called when all that has
        landed."""
        busy = {resource: seconds * tokens for resource, seconds in cost.busy_s.items()}
        span = computed_s - begins_s
        early = (1 - 1 / layers) / span if span > 0 and layers > 1 else 0.0
        transfer = _Transfer(request, busy, begins_s + cost.latency_s, most=early, done=done)
        self._under_way[request].append(transfer)
        if not busy:
            self._schedule(computed_s + cost.latency_s, self._landed, transfer)
            return
        if early:
            self._schedule(transfer.begun_s, self._start, transfer)
        self._schedule(computed_s + cost.latency_s, self._computed, transfer)

    def cancel(self, request: Hashable, now: float) -> None:
        """Stop whatever is under way of a request."""
        for transfer in self._under_way.pop(request, ()):
            transfer.version = -1
            self._leave(transfer, now)

    def _start(self, now: float, transfer: _Transfer) -> None:
        if transfer.version < 0:
            return
        transfer.at_s = now
        for resource in transfer.busy_s:
            self._users[resource][transfer] = None
        self._share(now, transfer)

    def _computed(self, now: float, transfer: _Transfer) -> None:
        """All layers are computed: the rest goes as fast as it can."""
        if transfer.version < 0:
            return
        early, transfer.most = transfer.most, math.inf
        if early:
            self._share(now, transfer)
        else:
            self._start(now, transfer)

    def _share(self, now: float, changed: _Transfer) -> None:
        """Have rates follow a transfer that began, changed or ended; once for all that happens now, since the
        prompts of a batch do the same at the same time."""
        if not self._changed:
            self._schedule(now, self._share_anew, None)
        self._changed[changed] = None

    def _share_anew(self, now: float, _: None) -> None:
        """Anew the rates of all that share something with one that changed."""
        changed, shares = self._changed, self._shares
        self._changed = {}
        affected: dict[_Transfer, None] = {}
        for resource in dict.fromkeys(resource for transfer in changed for resource in transfer.busy_s):
            users = self._users[resource]
            affected |= users
            if users:
                shares[resource] = _shares(users, resource)
        for transfer in affected:
            rate = transfer.most
            full = rate == math.inf
            for resource, busy_s in transfer.busy_s.items():
                own = shares[resource][full] / busy_s
                if own < rate:
                    rate = own
            if rate == transfer.rate and transfer not in changed:
                continue
            transfer.left -= transfer.rate * (now - transfer.at_s)
            transfer.rate, transfer.at_s = rate, now
            transfer.version += 1
            if full:
                ends_s = now + max(0.0, transfer.left) / rate
                self._schedule(ends_s, self._finish, (transfer, transfer.version))

    def _finish(self, now: float, due: tuple[_Transfer, int]) -> None:
        transfer, version = due
        if version == transfer.version:
            self._landed(now, transfer)

    def _landed(self, now: float, transfer: _Transfer) -> None:
        if transfer.version < 0:
            return
        transfer.left = 0.0
        transfer.version = -1
        others = self._under_way[transfer.request]
        others.remove(transfer)
        if not others:
            del self._under_way[transfer.request]
        self._leave(transfer, now)
        transfer.done(transfer.request, now)

    def _leave(self, transfer: _Transfer, now: float) -> None:
        transfer.left = 0.0
        for resource in transfer.busy_s:
            self._users[resource].pop(transfer, None)
        self._share(now, transfer)


def _shares(users: Collection[_Transfer], resource: Resource) -> tuple[float, float]:
    """Shares of a resource's time: of a transfer that is still being computed, an equal one, of which it
    takes what it needs; of the others, what that leaves, divided."""
    equal = 1 / len(users)
    taken, others = 0.0, 0
    for transfer in users:
        if transfer.most == math.inf:
            others += 1
        else:
            needs = transfer.most * transfer.busy_s[resource]
            taken += needs if needs < equal else equal
    return equal, (1 - taken) / others if 0 < others < len(users) else equal


def binding(costs: Mapping[Any, RouteCost]) -> dict[Any, RouteCost]:
    """The same routes without resources that can never hold anything up: another one is taken by all the
    routes that take it, for as long or longer."""
    takers: dict[Resource, dict[Any, float]] = defaultdict(dict)
    for route, cost in costs.items():
        for resource, seconds in cost.busy_s.items():
            takers[resource][route] = seconds
    kept: list[Resource] = []
    for resource in sorted(takers, key=lambda r: (-len(takers[r]), -sum(takers[r].values()))):
        own = takers[resource]
        if not any(all(takers[o].get(route, 0.0) >= s for route, s in own.items()) for o in kept):
            kept.append(resource)
    return {
        route: replace(cost, busy_s={r: s for r, s in cost.busy_s.items() if r in kept})
        for route, cost in costs.items()
    }
