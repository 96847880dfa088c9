"""What a placement of ranges of layers is without some of its replicas."""

from __future__ import annotations

import math
from collections.abc import Collection

from hexgen2.cluster import Cluster
from hexgen2.placement import Placement, Route, Throughput
from runtime.routing.paths.range_graph import COORDINATOR, RangeGraph, link_req_s


class RangePlan:
    """Computes the flow of a placement without some of its replicas, as its paths follow it.

    Parameters
    ----------
    placement : with ranges of layers; checked (see hexgen2.checks)
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def placement(self, lost: Collection[str]) -> Placement:
        """The placement without the lost replicas, with the flow over the others; it passes the same checks.
        Latency and bound stay as planned, and the bound holds for fewer replicas too."""
        if not lost:
            return self._placement
        before = self._placement
        flow = RangeGraph.of(before, lost).flow
        entering = math.fsum(req_s for (source, _), req_s in flow.items() if source == COORDINATOR)
        replicas = []
        for replica in before.replicas:
            if replica.id not in lost:
                through = math.fsum(req_s for (_, to), req_s in flow.items() if to == replica.id)
                used = min(1.0, through / replica.capacity_req_s)
                replicas.append(replica.model_copy(update={"utilisation": used}))
        gone = {gpu for name in lost for gpu in before.replica(name).gpus} | set(before.lost)
        tokens = before.workload.isl + before.workload.osl
        changed = {
            "lost": [gpu for gpu in Cluster.from_spec(before.cluster).gpu_ids if gpu in gone],
            "replicas": replicas,
            "routes": [self._route(*pair, req_s) for pair, req_s in flow.items() if pair[0] != COORDINATOR],
            "throughput": Throughput(
                req_s=entering,
                output_tok_s=entering * before.workload.osl,
                total_tok_s=entering * tokens,
            ),
            "goodput": None,
            "bound": before.bound.model_copy(
                update={"gap": 1 - entering / before.bound.req_s if before.bound.req_s else 0.0}
            ),
            "bottlenecks": [],
        }
        if before.layer_ranges is not None:
            ranges = before.layer_ranges.model_copy(update={"kept_up_req_s": None})
            changed["layer_ranges"] = ranges
        return before.model_copy(update=changed)

    def _route(self, source: str, target: str, req_s: float) -> Route:
        """The route between two replicas with another flow, whether or not the placement has one."""
        for route in self._placement.routes:
            if (route.from_, route.to) == (source, target):
                return route.model_copy(update={"flow_req_s": req_s})
        tokens = self._placement.workload.isl + self._placement.workload.osl
        bytes_ = tokens * self._placement.costs().activation_bytes_per_token
        ends = [self._placement.replica(name).gpus[0] for name in (source, target)]
        return Route.model_validate(
            {
                "from": source,
                "to": target,
                "flow_req_s": req_s,
                "capacity_req_s": link_req_s(self._placement)(source, target),
                "kv_bytes_per_req": bytes_,
                "links": [{"from": ends[0], "to": ends[1], "bytes_per_req": bytes_}],
            }
        )
