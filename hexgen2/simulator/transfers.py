"""KV cache transfers from prefill to decode replicas over shared links.

A transfer occupies the network cards, uplinks and links of its route and the ports of its GPUs. Each of these
resources divides its time equally among its transfers. Every chunk of a prompt is one transfer. It begins
with the step that computes the chunk; until that step ends, it goes no faster than layers are computed, and
the other transfers get the rest of its shares.
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
    """What one prompt token costs on a route: the seconds for which its KV cache occupies each resource, and
    its bytes; latency_s is the delay of the first byte."""

    busy_s: Mapping[Resource, float]
    bytes_per_token: float
    latency_s: float


def route_cost(route: Route, cluster: Cluster, shared: SharedLinks, links: Links, isl: float) -> RouteCost:
    """The cost of a placement's route, whose bytes are for `isl` prompt tokens.

    With links "pairwise", each route has the links between its nodes to itself.
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
    """A resource and the transfers that use it.

    Transfers whose step is still computing take only the share of time that they need, at most an equal
    share; those limited by that are `pressed`. Transfers that are fully computed divide the rest.
    """

    computing: dict[_Transfer, float] = field(default_factory=dict)
    computed: dict[_Transfer, None] = field(default_factory=dict)
    pressed: list[_Transfer] = field(default_factory=list)
    equal: float = 1.0
    rest: float = 1.0

    def divide(self) -> None:
        """Compute the shares again after users have changed."""
        computing, computed = self.computing, self.computed
        if not computing:
            self.pressed = []
            self.equal = self.rest = 1 / len(computed) if computed else 1.0
            return
        equal = 1 / (len(computing) + len(computed))
        taken, pressed = 0.0, []
        for transfer, needs in computing.items():
            if needs < equal:
                taken += needs
            else:
                taken += equal
                pressed.append(transfer)
        self.equal, self.pressed = equal, pressed
        self.rest = (1 - taken) / len(computed) if computed else equal


@dataclass(eq=False, slots=True)
class _Transfer:
    """One transfer.

    Attributes
    ----------
    uses : resources, with the seconds for which the whole transfer occupies each
    left : share that was left to send at at_s
    rate : share sent per second since at_s
    most : upper limit of the rate; infinite once everything is computed
    version : counts rate changes, so that outdated events are ignored; -1 once it has ended
    """

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
        """Register as a user of each resource."""
        most = self.most
        for shared, busy_s in self.uses:
            if most < math.inf:
                shared.computing[self] = most * busy_s
            else:
                shared.computing.pop(self, None)
                shared.computed[self] = None

    def leave(self) -> None:
        """Stop using the resources."""
        for shared, _ in self.uses:
            shared.computing.pop(self, None)
            shared.computed.pop(self, None)


class Transfers:
    """All transfers in flight; `schedule(time_s, call, argument)` is the simulation's.

    Attributes
    ----------
    changed : transfers that began, changed or ended since the last `settle`. The simulation calls `settle`
    once
        after all events at the same time, since the prompts of a batch change together
    """

    def __init__(self, schedule: Callable) -> None:
        self._schedule = schedule
        self._shared: dict[Resource, _Shared] = defaultdict(_Shared)
        self._in_flight: dict[object, list[_Transfer]] = defaultdict(list)
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
        """Begin the transfer of a chunk's KV cache.

        Parameters
        ----------
        tokens : size of the chunk
        begins_s, computed_s : when the step of the chunk begins (now or later) and has computed all layers
        done : called with (request, time_s) when everything has arrived
        """
        uses = [(self._shared[resource], seconds * tokens) for resource, seconds in cost.busy_s.items()]
        span = computed_s - begins_s
        early = (1 - 1 / layers) / span if span > 0 and layers > 1 else 0.0
        transfer = _Transfer(request, uses, begins_s + cost.latency_s, most=early, done=done)
        self._in_flight[request].append(transfer)
        if not uses:
            self._schedule(computed_s + cost.latency_s, self._arrived, transfer)
            return
        if early:
            self._schedule(transfer.begun_s, self._start, transfer)
        self._schedule(computed_s + cost.latency_s, self._computed, transfer)

    def cancel(self, request: Hashable) -> None:
        """Stop all transfers of a request."""
        for transfer in self._in_flight.pop(request, ()):
            self._leave(transfer)

    def _start(self, now: float, transfer: _Transfer) -> None:
        if transfer.version < 0:
            return
        transfer.at_s = now
        transfer.occupy()
        self.changed[transfer] = None

    def _computed(self, now: float, transfer: _Transfer) -> None:
        """All layers are computed: the rest is sent as fast as the links allow."""
        if transfer.version < 0:
            return
        early, transfer.most = transfer.most, math.inf
        if early:
            transfer.occupy()
            self.changed[transfer] = None
        else:
            self._start(now, transfer)

    def settle(self, now: float) -> None:
        """Update the rates of all transfers whose shares may have changed."""
        changed, self.changed = self.changed, {}
        affected: dict[_Transfer, None] = {}
        if len(changed) == 1:
            touched = [shared for transfer in changed for shared, _ in transfer.uses]
        else:
            touched = list({shared: None for transfer in changed for shared, _ in transfer.uses})
        for shared in touched:
            rest, pressed = shared.rest, shared.pressed
            shared.divide()
            if shared.rest != rest and shared.computed:
                affected |= shared.computed
            if pressed or shared.pressed:
                affected |= dict.fromkeys(pressed + shared.pressed)
        affected |= changed
        for transfer in affected:
            if transfer.version < 0:
                continue
            rate = transfer.most
            full = rate == math.inf
            if full:
                for shared, busy_s in transfer.uses:
                    own = shared.rest / busy_s
                    if own < rate:
                        rate = own
            else:
                for shared, busy_s in transfer.uses:
                    own = shared.equal / busy_s
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
            self._arrived(now, transfer)

    def _arrived(self, now: float, transfer: _Transfer) -> None:
        if transfer.version < 0:
            return
        others = self._in_flight[transfer.request]
        others.remove(transfer)
        if not others:
            del self._in_flight[transfer.request]
        self._leave(transfer)
        transfer.done(transfer.request, now)

    def _leave(self, transfer: _Transfer) -> None:
        transfer.version = -1
        transfer.leave()
        self.changed[transfer] = None


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
