"""KV caches on their way from prefill to decode replicas, over links that they share.

A transfer takes the network cards, uplinks and links of its route and the ports of its GPUs; each of these
serves all its transfers side by side, in equal shares of its time. Every chunk of a prompt is a transfer. It
begins with the step that computes it: until that ends it goes no faster than layers are computed, and leaves
the rest of its shares to the others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hexgen2.cluster import Cluster
from hexgen2.network.occupancy import KvTransfer, parts_of_gpus
from hexgen2.network.shared_links import Links, SharedLinks
from hexgen2.placement import Route

Resource = Hashable


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
    kv = KvTransfer.of(parts_of_gpus(cluster, route.parts))
    per_token: dict[Resource, float] = {
        resource
        if links == "shared" or isinstance(resource, tuple)
        else (route.from_, route.to, resource): busy_s / isl
        for resource, busy_s in kv.busy_s(shared, links=links).items()
    }
    return RouteCost(per_token, route.kv_bytes_per_req / isl, kv.latency_s)


@dataclass(eq=False, slots=True)
class _Shared:
    """A resource and its users: transfers that are still being computed, with the share of its time that each
    needs, and those that are computed.

    The former take what they need, `pressed` ones among them no more than an equal share; the latter divide
    what that leaves.
    """

    computing: dict[_Transfer, float] = field(default_factory=dict)
    computed: dict[_Transfer, None] = field(default_factory=dict)
    pressed: list[_Transfer] = field(default_factory=list)
    equal: float = 1.0
    rest: float = 1.0

    def divide(self) -> None:
        """Find the shares anew, after users have changed."""
        computing, computed = self.computing, self.computed
        equal = 1 / max(1, len(computing) + len(computed))
        taken, pressed = 0.0, []
        for transfer, needs in computing.items():
            if needs < equal:
                taken += needs
            else:
                taken += equal
                pressed.append(transfer)
        self.equal, self.pressed = equal, pressed
        self.rest = (1 - taken) / len(computed) if computing and computed else equal


@dataclass(eq=False, slots=True)
class _Transfer:
    """`uses` has the resources with the seconds for which all of it occupies each; `most` of it may be sent
    per second, infinitely much once it is computed; `left` of it is, as of at_s."""

    request: object
    uses: list[tuple[_Shared, float]]
    begun_s: float
    left: float = 1.0
    rate: float = 0.0
    most: float = 0.0
    at_s: float = 0.0
    version: int = 0
    done: Callable[[Any, float], None] = field(repr=False, kw_only=True)

    def occupy(self) -> None:
        """Be among the users of each resource, as what it is now."""
        most = self.most
        for shared, busy_s in self.uses:
            if most < math.inf:
                shared.computing[self] = most * busy_s
            else:
                shared.computing.pop(self, None)
                shared.computed[self] = None

    def leave(self) -> None:
        """Be no more among the users."""
        for shared, _ in self.uses:
            shared.computing.pop(self, None)
            shared.computed.pop(self, None)


class Transfers:
    """All transfers under way. `schedule(time_s, call, argument)` is the simulation's.

    Attributes
    ----------
    changed : transfers that began, changed or ended since rates were settled; the simulation calls `settle`
        once all that happens at a time has happened: the prompts of a batch do the same at the same time
    """

    def __init__(self, schedule: Callable) -> None:
        self._schedule = schedule
        self._shared: dict[Resource, _Shared] = defaultdict(_Shared)
        self._under_way: dict[object, list[_Transfer]] = defaultdict(list)
        self.changed: dict[_Transfer, None] = {}

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
        uses = [(self._shared[resource], seconds * tokens) for resource, seconds in cost.busy_s.items()]
        span = computed_s - begins_s
        early = (1 - 1 / layers) / span if span > 0 and layers > 1 else 0.0
        transfer = _Transfer(request, uses, begins_s + cost.latency_s, most=early, done=done)
        self._under_way[request].append(transfer)
        if not uses:
            self._schedule(computed_s + cost.latency_s, self._landed, transfer)
            return
        if early:
            self._schedule(transfer.begun_s, self._start, transfer)
        self._schedule(computed_s + cost.latency_s, self._computed, transfer)

    def cancel(self, request: Hashable) -> None:
        """Stop whatever is under way of a request."""
        for transfer in self._under_way.pop(request, ()):
            self._leave(transfer)

    def _start(self, now: float, transfer: _Transfer) -> None:
        if transfer.version < 0:
            return
        transfer.at_s = now
        transfer.occupy()
        self.changed[transfer] = None

    def _computed(self, now: float, transfer: _Transfer) -> None:
        """All layers are computed: the rest goes as fast as it can."""
        if transfer.version < 0:
            return
        early, transfer.most = transfer.most, math.inf
        if early:
            transfer.occupy()
            self.changed[transfer] = None
        else:
            self._start(now, transfer)

    def settle(self, now: float) -> None:
        """Anew the rates of all whose shares may be others: the rate of one that is being computed is what it
        needs, unless it is pressed."""
        changed, self.changed = self.changed, {}
        affected: dict[_Transfer, None] = {}
        for shared in {shared: None for transfer in changed for shared, _ in transfer.uses}:
            rest, pressed = shared.rest, shared.pressed
            shared.divide()
            if shared.rest != rest:
                affected |= shared.computed
            if pressed or shared.pressed:
                affected |= dict.fromkeys(pressed + shared.pressed)
        affected |= changed
        for transfer in affected:
            if transfer.version < 0:
                continue
            rate = transfer.most
            full = rate == math.inf
            for shared, busy_s in transfer.uses:
                own = (shared.rest if full else shared.equal) / busy_s
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
        others = self._under_way[transfer.request]
        others.remove(transfer)
        if not others:
            del self._under_way[transfer.request]
        self._leave(transfer)
        transfer.done(transfer.request, now)

    def _leave(self, transfer: _Transfer) -> None:
        transfer.version = -1
        transfer.leave()
        self.changed[transfer] = None


def binding(costs: Mapping[Any, RouteCost]) -> dict[Any, RouteCost]:
    """The same routes without resources that can never hold anything up: another one is taken by all the
    routes that take it, for as long or longer."""
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
