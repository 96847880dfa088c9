"""A path for each request through replicas that hold ranges of layers, and an account of their KV caches
(Helix, section 5)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass

from hexgen2.layer_ranges import range_of
from hexgen2.placement import Placement
from runtime.routing.paths.next_hop import make_next_hop
from runtime.routing.paths.range_graph import COORDINATOR, Hop, RangeGraph, RangePath
from runtime.routing.windowed_room import WindowedRoom

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
    block_tokens : KV caches are kept in blocks of so many tokens, in all layers of a replica; None: they are
        counted in tokens, in the layers that a request computes
    windowed : by replica, what its layers with a window hold, if that is apart: a request then takes the
        share of the replica's room that it takes of either kind of layers, whichever is larger

    Attributes
    ----------
    on : by replica, its requests and what it computes of each
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
        block_tokens: int | None = None,
        windowed: Mapping[str, WindowedRoom] | None = None,
    ) -> None:
        self._placement, self._high_water = placement, high_water
        self.room = dict(layer_tokens(placement) if room is None else room)
        self.expected_osl = placement.workload.osl if expected_osl is None else expected_osl
        self.graph, self._lost = RangeGraph.of(placement), set[str]()
        self._block_tokens, self._windowed = block_tokens, windowed or {}
        self._layers = {replica.id: replica.stages[0].layer_count for replica in placement.replicas}
        self._requests: dict[Hashable, _Request] = {}
        self.on = {name: dict[Hashable, Hop]() for name in self.room}
        self._expected = dict.fromkeys(self.room, 0.0)
        self._policy = make_next_hop(
            scheduler, self.graph, seed, queued or (lambda replica: len(self.on[replica]))
        )

    def fits(self, tokens: float, graph: RangeGraph | None = None) -> bool:
        """Whether any path could hold a request of that many tokens, if it were alone.

        Parameters
        ----------
        graph : of other replicas than those that are left now
        """
        graph, may = graph or self.graph, self._policy.may
        onward = graph.onward(
            lambda at, hop: may(graph, at, hop) and self._taken(hop, tokens) <= self.room[hop.replica]
        )
        return bool(onward[COORDINATOR])

    def longest(self, graph: RangeGraph | None = None) -> int:
        """Tokens of the longest request that fits; 0 if no path is left."""
        least, most = 0, math.ceil(max(self.room.values())) + 1
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if self.fits(middle, graph) else (least, middle)
        return least

    def pick(self, tokens: float, most: float, output: float | None = None) -> RangePath | None:
        """The path of the next request; None if there is no room for it now.

        Parameters
        ----------
        tokens, most : that it has, and may have in the end
        output : tokens that it is expected to get; None: expected_osl
        """
        expected = tokens + (self.expected_osl if output is None else output)

        def has_room(at: str, hop: Hop) -> bool:
            name = hop.replica
            if not self._policy.may(self.graph, at, hop) or self._taken(hop, most) > self.room[name]:
                return False
            wanted = self._expected[name] + self._taken(hop, expected)
            return not self.on[name] or wanted <= self._high_water * self.room[name]

        onward = self.graph.onward(has_room)
        path, at = list[Hop](), COORDINATOR
        while not path or path[-1].end < self.graph.layers:
            if not onward[at]:
                return None
            path.append(self._policy.choose(at, onward[at]))
            at = path[-1].replica
        return tuple(path)

    def start(self, request: Hashable, path: RangePath, tokens: float, output: float | None = None) -> None:
        """A request that has so many tokens, and is expected to get so many more (see `pick`), goes over a
        path."""
        expected = tokens + (self.expected_osl if output is None else output)
        self._requests[request] = each = _Request(path, expected, tokens)
        for hop in path:
            self.on[hop.replica][request] = hop
            self._expected[hop.replica] += self._taken(hop, each.expected)

    def grow(self, request: Hashable) -> str | None:
        """A request has one more token; returns a replica that can't hold its KV cache, if there is one."""
        each = self._requests[request]
        each.tokens += 1
        if each.tokens > each.expected:
            before, each.expected = each.expected, each.expected + 1
            for hop in each.path:
                self._expected[hop.replica] += self._taken(hop, each.expected) - self._taken(hop, before)
        return self.overfull(request)

    def overfull(self, request: Hashable) -> str | None:
        """A replica of a request's path whose requests need more KV cache than it has, if there is one."""
        full = None
        for hop in self._requests[request].path:
            name = hop.replica
            if self._expected[name] > self.room[name] and self._used(name) > self.room[name]:
                full = name
        return full

    def _taken(self, hop: Hop, tokens: float) -> float:
        """What so many tokens take of a replica's room."""
        if self._block_tokens is None:
            taken = tokens * hop.layers
        else:
            taken = math.ceil(tokens / self._block_tokens) * self._block_tokens * self._layers[hop.replica]
        if windowed := self._windowed.get(hop.replica):
            share = windowed.held(math.ceil(tokens)) / windowed.beside_prompts
            return max(taken, share * self.room[hop.replica])
        return taken

    def _used(self, replica: str) -> float:
        """Tokens x layers that a replica holds now."""
        held = self.on[replica].items()
        return sum(self._taken(hop, self._requests[each].tokens) for each, hop in held)

    def end(self, request: Hashable) -> None:
        """A request has ended or left its path."""
        for hop in self._requests[request].path:
            self.release(request, hop.replica)

    def release(self, request: Hashable, replica: str) -> None:
        """A replica of a request's path holds nothing of it any more; nothing if that is known."""
        hop = self.on[replica].pop(request, None)
        if hop is None:
            return
        each = self._requests[request]
        if self.on[replica]:
            self._expected[replica] -= self._taken(hop, each.expected)
        else:  # What rounding has left.
            self._expected[replica] = 0.0
        if not any(request in self.on[other.replica] for other in each.path):
            del self._requests[request]

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
        self._follow()
        return list(self.on[replica])

    def regain(self, replica: str) -> None:
        """A lost replica serves again: paths use it, and the flow is solved with it."""
        self._lost.discard(replica)
        self._follow()

    def _follow(self) -> None:
        self.graph = self.without(self._lost)
        self._policy.follow(self.graph)

    def without(self, lost: Collection[str]) -> RangeGraph:
        """The graph of the placement without some replicas."""
        return RangeGraph.of(self._placement, lost)

    @property
    def lost(self) -> Collection[str]:
        """The replicas that are lost."""
        return self._lost
