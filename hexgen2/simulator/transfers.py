"""KV cache transfers from prefill to decode replicas over shared links.

A transfer occupies the network cards, uplinks and links of its route and the ports of its GPUs. Routes that
share one of these have equal shares of its time, unless something else limits them (max-min fairness, as
among TCP connections); each sends what was computed first. A transfer holds what a step computes for one
route. It begins with the step; until that ends, it goes no faster than layers are computed, and other routes
get the rest of its share.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hexgen2.cluster import Cluster
from hexgen2.network.occupancy import KvTransfer, parts_of_gpus
from hexgen2.network.shared_links import Links, SharedLinks
from hexgen2.placement import Route

Resource = Hashable
ROUNDING = 8.0
"""Demands are rounded up to multiples of a power of two over this, by less than a quarter, so that they are
often the same."""
KNOWN_RATES = 20_000
"""Sets of demands whose rates are kept."""
FULL = 1 + 1e-9
"""Shares of a resource's time may add up to this, by rounding."""


@dataclass(frozen=True, eq=False)
class RouteCost:
    """What a token that moves costs on a route: the seconds for which its KV cache occupies each resource,
    and its bytes; latency_s is the delay of the first byte."""

    busy_s: Mapping[Resource, float]
    bytes_per_token: float
    latency_s: float


def route_cost(route: Route, cluster: Cluster, shared: SharedLinks, links: Links, moved: float) -> RouteCost:
    """The cost of a placement's route, whose bytes are for so many tokens that move.

    With links "pairwise", each route has the links between its nodes to itself.
    """
    kv = KvTransfer.of(parts_of_gpus(cluster, route.parts))
    per_token: dict[Resource, float] = {
        resource
        if links == "shared" or isinstance(resource, tuple)
        else (route.from_, route.to, resource): busy_s / moved
        for resource, busy_s in kv.busy_s(shared, links=links).items()
    }
    return RouteCost(per_token, route.kv_bytes_per_req / moved, kv.latency_s)


@dataclass(eq=False, slots=True)
class _Transfer:
    """The KV caches of one step on one route: `left` of its tokens are to be sent.

    Attributes
    ----------
    most : tokens/s at which the step computes them; infinite once everything is computed
    rate : tokens/s at which they are sent
    """

    waiting: dict[Any, None]
    left: float
    most: float
    done: Callable[[Any, float], None] = field(repr=False)
    rate: float = 0.0


@dataclass(eq=False, slots=True)
class _Resource:
    """A card, uplink, link or port, and the paths of routes that send over it.

    Attributes
    ----------
    wanted : the share of its time that their demands take; it limits them only if that is more than all
    rising, free : while rates are computed: the number of routes that have none yet, and the share of the
        time that the others leave
    """

    users: dict[_Path, None] = field(default_factory=dict)
    wanted: float = 0.0
    rising: int = 0
    free: float = 1.0


@dataclass(eq=False, slots=True)
class _Path:
    """What routes have in common that occupy the same resources for as long: as many as there are pairs of
    nodes, while each pair may have many routes.

    Attributes
    ----------
    uses : each resource, and the seconds that a token takes there
    alone : tokens/s of a route while no other one sends
    senders : the routes that have a demand, by their demand
    """

    uses: list[tuple[_Resource, float]]
    alone: float
    senders: dict[float, dict[_Route, None]] = field(default_factory=dict)

    @property
    def crowded(self) -> bool:
        """Whether a resource may limit its routes."""
        return any([resource.wanted > FULL for resource, _ in self.uses])


Demand = tuple[_Path, float]
"""The demand of routes of a path, in tokens/s."""


@dataclass(eq=False, slots=True)
class _Route:
    """What is in transfer on one route.

    Attributes
    ----------
    computed : sent one after the other, before what is being computed
    computing : in the order in which they began
    demand : tokens/s that it could send at most while no other route sends
    rate : tokens/s that the links let it send, since at_s
    version : counts changes, so that outdated events are ignored
    """

    path: _Path
    computed: deque[_Transfer] = field(default_factory=deque)
    computing: dict[_Transfer, None] = field(default_factory=dict)
    demand: float = 0.0
    rate: float = 0.0
    at_s: float = 0.0
    version: int = 0

    def advance(self, now: float) -> None:
        """Send until now."""
        span_s = now - self.at_s
        if span_s > 0 and self.rate > 0:
            if self.computed:
                self.computed[0].left -= self.rate * span_s
            else:
                for transfer in self.computing:
                    transfer.left -= transfer.rate * span_s
        self.at_s = now

    def wants(self) -> float:
        """Its demand by now, rounded up."""
        alone = self.path.alone
        if self.computed:
            return alone
        total = 0.0
        for transfer in self.computing:
            total += transfer.most
        if total >= alone:
            return alone
        part, scale = math.frexp(total)
        return min(alone, math.ldexp(math.ceil(part * ROUNDING), scale) / ROUNDING)

    def send(self, rate: float) -> None:
        """Go on at that rate: first come, first served among those that are being computed."""
        self.rate = rate
        if not self.computed:
            for transfer in self.computing:
                transfer.rate = min(transfer.most, rate)
                rate -= transfer.rate


class Transfers:
    """All transfers in flight; `schedule(time_s, call, argument)` is the simulation's.

    Attributes
    ----------
    changed : routes on which something began, was computed or ended since the last `settle`. The simulation
        calls `settle` once after all events at the same time
    """

    def __init__(self, schedule: Callable) -> None:
        self._schedule = schedule
        self._resources: dict[Resource, _Resource] = defaultdict(_Resource)
        self._paths: dict[frozenset[tuple[Resource, float]], _Path] = {}
        self._routes: dict[RouteCost, _Route] = {}
        self._in_flight: dict[_Transfer, None] = {}
        self._known_rates: dict[frozenset[tuple[Demand, int]], dict[Demand, float]] = {}
        self.changed: dict[_Route, None] = {}

    def begin(
        self,
        requests: Iterable[Any],
        cost: RouteCost,
        tokens: float,
        layers: int,
        begins_s: float,
        computed_s: float,
        done: Callable[[Any, float], None],
    ) -> None:
        """Begin to send the KV caches that a step computes for a route.

        Parameters
        ----------
        requests : whose prompts they are, each once
        tokens : of all of them that move, as a mean over the layers
        begins_s, computed_s : when the step begins (now or later) and has computed all layers
        done : called with (request, time_s) for each request when everything has arrived
        """
        route = self._routes.get(cost) or self._add(cost)
        span_s = computed_s - begins_s
        early = (1 - 1 / layers) * tokens / span_s if span_s > 0 and layers > 1 else 0.0
        transfer = _Transfer(dict.fromkeys(requests), tokens, early, done)
        self._in_flight[transfer] = None
        if not route.path.uses:
            self._schedule(computed_s + cost.latency_s, self._land, transfer)
            return
        if early:
            self._schedule(begins_s + cost.latency_s, self._start, (route, transfer))
        self._schedule(computed_s + cost.latency_s, self._computed, (route, transfer))

    def _add(self, cost: RouteCost) -> _Route:
        names = frozenset(cost.busy_s.items())
        path = self._paths.get(names)
        if path is None:
            uses = [(self._resources[name], seconds) for name, seconds in cost.busy_s.items()]
            alone = min((1 / seconds for _, seconds in uses), default=math.inf)
            path = self._paths[names] = _Path(uses, alone)
        route = self._routes[cost] = _Route(path)
        return route

    def cancel(self, request: Any) -> None:
        """Stop all transfers of a request. Those of other requests in the same steps go on."""
        for transfer in self._in_flight:
            transfer.waiting.pop(request, None)

    def _start(self, now: float, who: tuple[_Route, _Transfer]) -> None:
        route, transfer = who
        if transfer.waiting:
            route.advance(now)
            route.computing[transfer] = None
            self.changed[route] = None

    def _computed(self, now: float, who: tuple[_Route, _Transfer]) -> None:
        """All layers are computed: the rest is sent as fast as the links allow."""
        route, transfer = who
        route.advance(now)
        route.computing.pop(transfer, None)
        if transfer.waiting:
            route.computed.append(transfer)
        else:
            del self._in_flight[transfer]
        self.changed[route] = None

    def settle(self, now: float) -> None:
        """Update the rates of all routes whose demands, or shares of links, may have changed."""
        changed, self.changed = self.changed, {}
        affected: dict[_Path, None] = {}
        for route in changed:
            demand = route.wants()
            if demand != route.demand:
                affected[route.path] = None
                for resource in _demand(route, demand):
                    affected.update(resource.users)
        rates = self._shared_rates(affected) if affected else {}
        for route in changed:
            if (route.path, route.demand) not in rates:
                self._send(route, route.rate, now)
        for (path, demand), rate in rates.items():
            for route in path.senders[demand]:
                if rate != route.rate or route in changed:
                    self._send(route, rate, now)

    def _shared_rates(self, affected: Iterable[_Path]) -> dict[Demand, float]:
        """The rates of the routes of these paths, and of those that share crowded resources with them."""
        rates: dict[Demand, float] = {}
        known: set[_Path] = set()
        for path in affected:
            if path in known:
                continue
            if not path.crowded:
                for demand in path.senders:
                    rates[path, demand] = demand
                continue
            crowd = _crowd(path)
            known.update(crowd)
            counts = {(one, demand): len(own) for one in crowd for demand, own in one.senders.items()}
            rates.update(self._rates_of(counts))
        return rates

    def _rates_of(self, counts: dict[Demand, int]) -> dict[Demand, float]:
        """The rates of a crowd; the same demands come again and again."""
        key = frozenset(counts.items())
        found = self._known_rates.get(key)
        if found is None:
            if len(self._known_rates) >= KNOWN_RATES:
                self._known_rates.clear()
            found = self._known_rates[key] = _rates(counts)
        return found

    def _send(self, route: _Route, rate: float, now: float) -> None:
        route.advance(now)
        route.send(rate)
        route.version += 1
        if route.computed:
            ends_s = now + max(0.0, route.computed[0].left) / rate
            self._schedule(ends_s, self._finish, (route, route.version))

    def _finish(self, now: float, due: tuple[_Route, int]) -> None:
        route, version = due
        if version == route.version:
            route.advance(now)
            transfer = route.computed.popleft()
            route.version += 1
            self.changed[route] = None
            self._land(now, transfer)

    def _land(self, now: float, transfer: _Transfer) -> None:
        del self._in_flight[transfer]
        for request in transfer.waiting:
            transfer.done(request, now)


def _demand(route: _Route, demand: float) -> list[_Resource]:
    """Change the demand of a route; returns those of its resources that were or are crowded."""
    crowded: list[_Resource] = []
    path, before = route.path, route.demand
    if before:
        del path.senders[before][route]
        if not path.senders[before]:
            del path.senders[before]
    if demand:
        path.senders.setdefault(demand, {})[route] = None
    for resource, seconds in path.uses:
        wanted = resource.wanted
        if path.senders:
            resource.users[path] = None
        else:
            del resource.users[path]
        resource.wanted = wanted + (demand - before) * seconds if resource.users else 0.0
        if wanted > FULL or resource.wanted > FULL:
            crowded.append(resource)
    route.demand = demand
    return crowded


def _crowd(path: _Path) -> list[_Path]:
    """The paths that share crowded resources with this one, also by way of others, and itself."""
    seen = {path: None}
    reached = [path]
    while reached:
        for resource, _ in reached.pop().uses:
            if resource.wanted > FULL:
                for other in resource.users:
                    if other not in seen:
                        seen[other] = None
                        reached.append(other)
    return list(seen)


def _rates(crowd: Mapping[Demand, int]) -> dict[Demand, float]:
    """The rates of the routes of a crowd, in tokens/s, where so many have each demand. None is below what
    equal shares of the time of each of its crowded resources allow, or its demand; what a route leaves of its
    shares, others get, so that each has its demand or a resource that is full."""
    uses: dict[_Path, list[tuple[_Resource, float]]] = {}
    for path, _ in crowd:
        if path not in uses:
            uses[path] = [use for use in path.uses if use[0].wanted > FULL]
            for resource, _ in uses[path]:
                resource.rising, resource.free = 0, 1.0
    for (path, _), count in crowd.items():
        for resource, _ in uses[path]:
            resource.rising += count
    rates: dict[Demand, float] = {}
    rising = dict.fromkeys(crowd)
    equal: dict[_Path, float] = {}
    changed: Iterable[_Path] = uses
    while True:
        for path in changed:
            shares = [resource.free / (resource.rising * seconds) for resource, seconds in uses[path]]
            equal[path] = min(shares)
        # Those that need no more than equal shares first, then those with the largest part of their needs:
        # the shares of all others only grow by that.
        settled = [each for each in rising if equal[each[0]] >= each[1]]
        settled = settled or [max(rising, key=lambda each: equal[each[0]] / each[1])]
        touched: dict[_Resource, None] = {}
        for each in settled:
            path, demand = each
            count, rate = crowd[each], min(demand, equal[path])
            rates[each] = rate
            _take(uses[path], count * rate)
            for resource, _ in uses[path]:
                resource.rising -= count
                touched[resource] = None
            del rising[each]
        if not rising:
            break
        left = {path for path, _ in rising}
        changed = {path for resource in touched for path in resource.users if path in left}
    for each in reversed(rates):  # What is left goes to those with the smallest part.
        (path, demand), count = each, crowd[each]
        if rates[each] < demand:
            spare = min([resource.free / (count * seconds) for resource, seconds in uses[path]])
            more = min(spare, demand - rates[each])
            rates[each] += more
            _take(uses[path], count * more)
    return rates


def _take(uses: list[tuple[_Resource, float]], rate: float) -> None:
    """Send that many tokens/s over these resources."""
    for resource, seconds in uses:
        free = resource.free - rate * seconds
        resource.free = free if free > 0 else 0.0


def binding(costs: Mapping[Any, RouteCost]) -> dict[Any, RouteCost]:
    """The same costs without the resources that can never be a bottleneck: those whose routes all occupy some
    other resource for as long or longer."""
    takers: dict[Resource, dict[Any, float]] = defaultdict(dict)
    for route, cost in costs.items():
        for resource, seconds in cost.busy_s.items():
            takers[resource][route] = seconds
    kept: list[Resource] = []
    for resource in sorted(takers, key=lambda r: (-len(takers[r]), -math.fsum(takers[r].values()))):
        own = takers[resource]
        if not any(all(takers[o].get(route, 0.0) >= s for route, s in own.items()) for o in kept):
            kept.append(resource)
    return {
        route: replace(cost, busy_s={r: s for r, s in cost.busy_s.items() if r in kept})
        for route, cost in costs.items()
    }
