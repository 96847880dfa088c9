"""KV routes: what moves between the stages of two replicas, and how many requests/s that allows.

HexGen-2, section 3.3, connection type (3), and Appendix A: every GPU that holds layer j on the
prefill side sends to the GPUs that hold layer j on the decode side, all at once; the slowest part
sets the pace, and the order of the stages on both sides decides which parts cross which links.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hexgen2.network.kv_parts import layer_overlaps
from hexgen2.search.planning.plan import PlannedStage
from hexgen2.search.problem import Problem


def transfer_s(problem: Problem, prefill: Sequence[PlannedStage], decode: Sequence[PlannedStage]) -> float:
    """Seconds to move one request's KV cache, all parts at once.

    Inside a node each GPU sends and receives through its own port; between two nodes all parts share
    the one link.
    """
    latency, ports, moved = _parts(problem, prefill, decode)
    links = (bytes_ / problem.node_links[a][b].bandwidth_bytes_s for (a, b), bytes_ in moved.items())
    return latency + max(*ports.values(), *links, 0.0)


@dataclass(frozen=True)
class RouteUse:
    """What one request of a route occupies.

    Attributes
    ----------
    transfer_s : seconds until its KV cache has moved, were it alone
    resources : [k] indices: of SharedLinks, R of them; then of the GPUs that send from each of the L
        possible stages of the prefill replica, then of those that receive in each of the decode replica's
    busy_s : [k] seconds for which it occupies each, activations of pipelines included
    """

    transfer_s: float
    resources: np.ndarray
    busy_s: np.ndarray

    @cached_property
    def pairs(self) -> list[tuple[int, float]]:
        """Each resource with its seconds, for sums over the few that there are."""
        return list(zip(self.resources.tolist(), self.busy_s.tolist(), strict=True))


def route_use(problem: Problem, prefill: Sequence[PlannedStage], decode: Sequence[PlannedStage]) -> RouteUse:
    """What one request of the route between two replicas occupies, on its whole way through both."""
    _, ports, moved = _parts(problem, prefill, decode)
    _add_hops(problem, prefill, problem.costs.isl, moved)
    _add_hops(problem, decode, problem.costs.osl, moved)
    return _use(problem, transfer_s(problem, prefill, decode), ports, moved)


def pipeline_use(problem: Problem, stages: Sequence[PlannedStage]) -> RouteUse:
    """What one request occupies that is served by a colocated replica of these stages."""
    moved: dict[tuple[int, int], float] = defaultdict(float)
    _add_hops(problem, stages, problem.costs.isl + problem.costs.osl, moved)
    return _use(problem, 0.0, {}, moved)


def _add_hops(
    problem: Problem, stages: Sequence[PlannedStage], tokens: float, moved: dict[tuple[int, int], float]
) -> None:
    """Add the bytes from node to node that a pipeline sends for so many tokens."""
    for left, right in itertools.pairwise(stages):
        if left.node != right.node:
            moved[left.node, right.node] += tokens * problem.costs.activation_bytes_per_token


def _use(
    problem: Problem,
    transfer_s: float,
    ports: dict[tuple[str, int], float],
    moved: dict[tuple[int, int], float],
) -> RouteUse:
    shared, layers = problem.shared_links, problem.model.layers
    busy: dict[int, float] = defaultdict(float)
    for (a, b), bytes_ in moved.items():
        for resource in shared.resources_between(a, b):
            busy[resource] += bytes_ / float(shared.capacity_bytes_s[resource])
    for (side, stage), seconds in ports.items():
        busy[shared.count + stage + (layers if side == "receive" else 0)] += seconds
    return RouteUse(transfer_s, np.array(list(busy), dtype=np.int64), np.array(list(busy.values())))


def _parts(
    problem: Problem, prefill: Sequence[PlannedStage], decode: Sequence[PlannedStage]
) -> tuple[float, dict[tuple[str, int], float], dict[tuple[int, int], float]]:
    """Of one request's KV cache: the longest latency in seconds, the seconds that each stage's ports send or
    receive inside their node, and the bytes from node to node."""
    per_layer = problem.costs.kv_bytes_per_layer
    ports: dict[tuple[str, int], float] = defaultdict(float)
    moved: dict[tuple[int, int], float] = defaultdict(float)
    latency = 0.0
    for i, j, layers in layer_overlaps([s.layers for s in prefill], [s.layers for s in decode]):
        source, target = prefill[i], decode[j]
        link = problem.node_links[source.node][target.node]
        latency = max(latency, link.latency_s)
        if source.node == target.node:
            seconds = layers * per_layer / link.bandwidth_bytes_s
            ports["send", i] += seconds / source.degree
            ports["receive", j] += seconds / target.degree
        else:
            moved[source.node, target.node] += layers * per_layer
    return latency, ports, moved
