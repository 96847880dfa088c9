"""What limits the throughput of a placement, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from cost_model.base import CostModel
from hexgen2.checks import traffic_of
from hexgen2.cluster import Cluster
from hexgen2.network.shared_links import Links
from hexgen2.placement import Replica, Route
from hexgen2.replica import Role

FULL = 1 - 1e-6
"""Whatever is used to this share of its capacity counts as full."""


def bottlenecks_of(
    replicas: Sequence[Replica],
    routes: Sequence[Route],
    idle: Sequence[str],
    cluster: Cluster,
    costs: CostModel,
    links: Links,
) -> list[str]:
    """Every full replica, route and shared link, and the idle GPUs, one line each."""
    found = []
    for role in get_args(Role):
        side = [r for r in replicas if r.role == role]
        if side and all(r.utilisation >= FULL for r in side):
            found.append(f"all {role} replicas are at capacity")
        else:
            found += [f"{r.id} is at capacity" for r in side if r.utilisation >= FULL]
    found += [f"route {r.from_} -> {r.to} is full" for r in routes if r.flow_req_s >= r.capacity_req_s * FULL]
    if links == "shared":
        traffic = traffic_of(cluster, costs, replicas, routes)
        found += [f"{name} is full" for name, _ in traffic.at_least(FULL)]
    if idle:
        found.append(f"{len(idle)} GPUs are idle: " + ", ".join(idle))
    return found
