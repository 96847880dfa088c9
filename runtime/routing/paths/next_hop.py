"""Policies that choose at which replica a request goes on, where replicas hold ranges of layers.

"flow" is Helix's (section 5.1); the others are those that it compares with (section 6.7), which do not know
the flow and choose among all replicas that hold the next layer.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import ClassVar

from cost_model.errors import InputError
from hexgen2.schedulers import FLOW, RANDOM, SHORTEST_QUEUE, SWARM
from runtime.routing.paths.range_graph import Hop, RangeGraph
from runtime.routing.router import Route, Router


class NextHop(ABC):
    """Chooses the next replica of a request.

    Parameters
    ----------
    graph : the replicas; follow() replaces it
    seed : of random choices
    queued : how many requests a replica has that have not left it
    """

    learns: ClassVar[bool] = False
    """Whether it makes use of `answered`."""

    def __init__(self, graph: RangeGraph, seed: int, queued: Callable[[str], int]) -> None:
        self._graph, self._rng, self._queued = graph, random.Random(seed), queued

    @staticmethod
    def may(graph: RangeGraph, at: str, hop: Hop) -> bool:
        """Whether a request may take this hop of a graph at all."""
        return True

    @abstractmethod
    def choose(self, at: str, hops: Sequence[Hop]) -> Hop:
        """One of the hops, at least one, for a request that has passed `at` (or COORDINATOR)."""

    def answered(self, at: str, to: str, seconds: float) -> None:  # noqa: B027 - most do not care
        """A request took so long from leaving `at` until it had passed `to`."""

    def follow(self, graph: RangeGraph) -> None:
        """Replicas were lost or are back: this is what there is now."""
        self._graph = graph


class ByFlow(NextHop):
    """Helix: interleaved weighted round-robin at every replica, weighted with the max flow, of which every
    hop has some."""

    def __init__(self, graph: RangeGraph, seed: int, queued: Callable[[str], int]) -> None:
        super().__init__(graph, seed, queued)
        self._routers: dict[str, Router] = {}
        self.follow(graph)

    @staticmethod
    def may(graph: RangeGraph, at: str, hop: Hop) -> bool:
        return (at, hop.replica) in graph.flow

    def choose(self, at: str, hops: Sequence[Hop]) -> Hop:
        by_name = {hop.replica: hop for hop in hops}
        route = self._routers[at].pick(lambda route: route.decode in by_name)
        assert route is not None
        return by_name[route.decode]

    def follow(self, graph: RangeGraph) -> None:
        self._graph = graph
        for at, after in graph.after.items():
            routes = [Route(at, to, graph.flow[at, to]) for to in after if (at, to) in graph.flow]
            known = self._routers.get(at)
            self._routers[at] = Router(routes) if known is None else known.with_routes(routes)


class Random(NextHop):
    """Any of them, all equally likely."""

    def choose(self, at: str, hops: Sequence[Hop]) -> Hop:
        return hops[int(self._rng.random() * len(hops))]


class ShortestQueue(NextHop):
    """The replica with the fewest requests that have not left it."""

    def choose(self, at: str, hops: Sequence[Hop]) -> Hop:
        return min(hops, key=lambda hop: self._queued(hop.replica))


class Swarm(NextHop):
    """Swarm's stochastic wiring (Ryabinin et al., 2023, section 3.2): each replica gets requests in inverse
    proportion to how long it took with its latest ones, as a moving average."""

    learns = True
    SMOOTHING = 0.1
    """Weight of the latest time in the moving average."""

    def __init__(self, graph: RangeGraph, seed: int, queued: Callable[[str], int]) -> None:
        super().__init__(graph, seed, queued)
        # Seconds per request, by pair; and the time that the requests sent so far should have taken.
        self._took_s: dict[tuple[str, str], float] = {}
        self._due: dict[tuple[str, str], float] = defaultdict(float)

    def choose(self, at: str, hops: Sequence[Hop]) -> Hop:
        chosen = min(hops, key=lambda hop: self._due[at, hop.replica])
        pair = at, chosen.replica
        known = [took_s for hop in hops if (took_s := self._took_s.get((at, hop.replica))) is not None]
        took_s = self._took_s.get(pair, sum(known) / len(known) if known else 1.0)
        # One that was masked for long does not get all requests until it has caught up.
        self._due[pair] = max(self._due[pair], min(self._due[at, hop.replica] for hop in hops)) + took_s
        return chosen

    def answered(self, at: str, to: str, seconds: float) -> None:
        before = self._took_s.get((at, to), seconds)
        self._took_s[at, to] = before + self.SMOOTHING * (seconds - before)


_BY_NAME: dict[str, type[NextHop]] = {
    FLOW: ByFlow,
    SWARM: Swarm,
    RANDOM: Random,
    SHORTEST_QUEUE: ShortestQueue,
}


def make_next_hop(name: str, graph: RangeGraph, seed: int, queued: Callable[[str], int]) -> NextHop:
    """The policy of that name.

    Raises
    ------
    InputError : there is none
    """
    if name not in _BY_NAME:
        raise InputError(
            "--scheduler",
            name,
            "does not choose paths through ranges of layers",
            f"use one of {', '.join(_BY_NAME)}",
        )
    return _BY_NAME[name](graph, seed, queued)
