"""KV routes of the flow: what a request occupies between two replicas, by network/occupancy.py.

HexGen-2, section 3.3, connection type (3), and Appendix A: every GPU that holds layer j on the
prefill side sends it to the GPUs that hold layer j on the decode side, all at once. The slowest part
sets the pace, and the order of the stages on both sides decides which parts cross which links.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hexgen2.network.occupancy import (
    KvTransfer,
    Resource,
    Sent,
    activations,
    occupied_s,
    parts_of_stages,
    summed,
)
from hexgen2.search.planning.plan import PlannedStage
from hexgen2.search.problem import Problem


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

    def stretched(self, times: float) -> RouteUse:
        """The same, with all seconds that many times as long."""
        return RouteUse(self.transfer_s * times, self.resources, self.busy_s * times)

    @cached_property
    def pairs(self) -> list[tuple[int, float]]:
        """(resource, seconds) pairs, for sums in plain Python, which are faster for so few."""
        return list(zip(self.resources.tolist(), self.busy_s.tolist(), strict=True))


NO_ROUTE = RouteUse(math.inf, np.zeros(0, dtype=np.int64), np.zeros(0))
"""Of a pair of replicas between which nothing is to be sent."""


def route_use(problem: Problem, prefill: Sequence[PlannedStage], decode: Sequence[PlannedStage]) -> RouteUse:
    """What one request of the route between two replicas occupies, on its whole way through both."""
    costs, shared = problem.costs, problem.shared_links
    layer_bytes, to_every_rank = costs.kv_bytes_per_layer, costs.kv_to_every_rank
    kv = KvTransfer.of(parts_of_stages(prefill, decode, layer_bytes, problem.node_links, to_every_rank))
    kv = kv._replace(sent=summed(kv.sent))
    hops = [*_activations(problem, prefill, costs.isl), *_activations(problem, decode, costs.osl)]
    busy_s = occupied_s(shared, summed([*kv.sent, *hops]) if hops else kv.sent)
    receivers = shared.count + problem.model.layers
    for (side, stage), seconds in kv.ports_s.items():
        busy_s[(shared.count if side == "send" else receivers) + stage] = seconds
    return RouteUse(kv.alone_s(shared), *_arrays(busy_s))


def pipeline_use(problem: Problem, stages: Sequence[PlannedStage]) -> RouteUse:
    """What one request of a colocated replica with these stages occupies."""
    hops = _activations(problem, stages, problem.costs.isl + problem.costs.osl)
    return RouteUse(0.0, *_arrays(occupied_s(problem.shared_links, summed(hops))))


def _activations(problem: Problem, stages: Sequence[PlannedStage], tokens: float) -> list[Sent]:
    """What a pipeline sends from node to node for this many tokens."""
    return activations([stage.node for stage in stages], tokens * problem.costs.activation_bytes_per_token)


def _arrays(busy_s: dict[Resource, float]) -> tuple[np.ndarray, np.ndarray]:
    """Resources and seconds as arrays [k]."""
    return np.array(list(busy_s), dtype=np.int64), np.array(list(busy_s.values()))
