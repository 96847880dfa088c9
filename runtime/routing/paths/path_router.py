"""A path for each request through replicas that hold ranges of layers, and an account of their KV caches
(Helix, section 5)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass

from hexgen2.layer_ranges import range_of
from hexgen2.placement import Placement
from runtime.routing.paths.next_hop import make_next_hop
from runtime.routing.paths.range_graph import COORDINATOR, Hop, RangeGraph, RangePath

HIGH_WATER = 0.9
"""Share of a replica's KV cache that requests may be expected to take, for a new one to go there."""


def layer_tokens(placement: Placement) -> dict[str, float]:
    """How many tokens of KV cache each replica holds, counted once for every layer."""
    tokens = placement.workload.isl + placement.workload.osl
    return {
        replica.id: replica.max_batch * tokens * (range_of(replica)[1] - range_of(replica)[0])
        for replica in placement.replicas
    }


@dataclass(slots=True)
class _Request:
    path: RangePath
    expected: float
    tokens: float


class PathRouter:
    """Paths through the replicas of a placement.

    A replica is left out while the requests on it are expected to fill more than `high_water` of its KV cache
    (those that are longer than expected count as they are); one request alone may use all of it.

    Parameters
    ----------
    placement : with ranges of layers
    scheduler : one of those in hexgen2/schedulers.py
    room : tokens x layers of KV cache by replica; None: see layer_tokens
    expected_osl : tokens of an answer, as expected; None: the placement's mean
    queued : requests that have not left a replica; None: those that it holds
    """

    def __init__(
        self,
        placement: Placement,
        scheduler: str = "flow",
        seed: int = 0,
        room: Mapping[str, float] | None = None,
        high_water: float = HIGH_WATER,
        expected_osl: float | None = None,
        queued: Callable[[str], int] | None = None,
    ) -> None:
        self._placement, self._high_water = placement, high_water
        self.room = dict(layer_tokens(placement) if room is None else room)
        self.expected_osl = placement.workload.osl if expected_osl is None else expected_osl
        self.graph, self._lost = RangeGraph.of(placement), set[str]()
        self._requests: dict[Hashable, _Request] = {}
        self.on = {name: dict[Hashable, int]() for name in self.room}
        """By replica, the layers that it computes of each of its requests."""
        self._expected = dict.fromkeys(self.room, 0.0)
        self._policy = make_next_hop(
            scheduler, self.graph, seed, queued or (lambda replica: len(self.on[replica]))
        )

    def fits(self, tokens: float) -> bool:
        """Whether any path could hold a request of that many tokens, if it were alone."""
        may = self._policy.may
        onward = self.graph.onward(
            lambda at, hop: may(at, hop) and tokens * hop.layers <= self.room[hop.replica]
        )
        return bool(onward[COORDINATOR])

    def pick(self, tokens: float, most: float) -> RangePath | None:
        """The path of the next request, which has so many tokens and may have `most` in the end; None if
        there is no room for it now."""
        expected, may = tokens + self.expected_osl, self._policy.may

        def has_room(at: str, hop: Hop) -> bool:
            name, needed = hop.replica, expected * hop.layers
            if not may(at, hop) or most * hop.layers > self.room[name]:
                return False
            return not self.on[name] or self._expected[name] + needed <= self._high_water * self.room[name]

        onward = self.graph.onward(has_room)
        path, at = list[Hop](), COORDINATOR
        while not path or path[-1].end < self.graph.layers:
            if not onward[at]:
                return None
            path.append(self._policy.choose(at, onward[at]))
            at = path[-1].replica
        return tuple(path)

    def start(self, request: Hashable, path: RangePath, tokens: float) -> None:
        """A request that has so many tokens goes over a path."""
        self._requests[request] = each = _Request(path, tokens + self.expected_osl, tokens)
        for hop in path:
            self.on[hop.replica][request] = hop.layers
            self._expected[hop.replica] += each.expected * hop.layers

    def grow(self, request: Hashable) -> str | None:
        """A request has one more token; returns a replica that can't hold its KV cache, if there is one."""
        each = self._requests[request]
        each.tokens += 1
        if each.tokens <= each.expected:  # It is counted already.
            return None
        each.expected += 1
        full = None
        for hop in each.path:
            name = hop.replica
            self._expected[name] += hop.layers
            if self._expected[name] > self.room[name] and self._used(name) > self.room[name]:
                full = name
        return full

    def _used(self, replica: str) -> float:
        """Tokens x layers that a replica holds now."""
        return sum(self._requests[each].tokens * layers for each, layers in self.on[replica].items())

    def end(self, request: Hashable) -> None:
        """A request has ended or left its path."""
        each = self._requests.pop(request)
        for hop in each.path:
            name = hop.replica
            del self.on[name][request]
            if self.on[name]:
                self._expected[name] -= each.expected * hop.layers
            else:  # What rounding has left.
                self._expected[name] = 0.0

    def latest_on(self, replica: str) -> Hashable:
        """The request that was sent to a replica last."""
        return next(reversed(self.on[replica]))

    @property
    def learns(self) -> bool:
        """Whether it makes use of `answered`."""
        return self._policy.learns

    def answered(self, at: str, to: str, seconds: float) -> None:
        """A step of a request took so long from leaving `at` until it had passed `to`."""
        self._policy.answered(at, to, seconds)

    def lose(self, replica: str) -> list[Hashable]:
        """A replica is lost: paths avoid it from now on, and the flow is solved over what is left. Returns
        its requests, which the caller has to end."""
        self._lost.add(replica)
        self.graph = RangeGraph.of(self._placement, self._lost)
        self._policy.follow(self.graph)
        return list(self.on[replica])

    @property
    def lost(self) -> Collection[str]:
        """The replicas that are lost."""
        return self._lost
