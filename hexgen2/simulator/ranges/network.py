"""Activations on their way between replicas: messages wait for each other on links, cards and uplinks."""

from __future__ import annotations

from hexgen2.cluster import Cluster
from hexgen2.network.shared_links import SharedLinks


class Network:
    """First come, first served on everything that a message passes: the link, the network cards at both ends
    and uplinks. Each takes as long as its own bandwidth says, all at the same time.

    Parameters
    ----------
    devices : by replica, the GPU that sends and receives
    """

    def __init__(self, cluster: Cluster, devices: dict[str, int]) -> None:
        self._shared = SharedLinks(cluster)
        self._cluster, self._devices = cluster, devices
        self._free_s = [0.0] * self._shared.count
        self._ways: dict[tuple[str, str], tuple[list[tuple[int, float]], float, float]] = {}

    def _way(self, a: str, b: str) -> tuple[list[tuple[int, float]], float, float]:
        """Resources with bytes/s, bytes/s inside a node, and seconds of latency."""
        if (a, b) not in self._ways:
            cluster, i, j = self._cluster, self._devices[a], self._devices[b]
            capacities = self._shared.capacities_bytes_s
            between = self._shared.resources_between(int(cluster.node_of[i]), int(cluster.node_of[j]))
            inside = float(cluster.bandwidth_bytes_s[i, j])
            self._ways[a, b] = (
                [(resource, capacities[resource]) for resource in between],
                inside,
                float(cluster.latency_s[i, j]),
            )
        return self._ways[a, b]

    def latency_s(self, a: str, b: str) -> float:
        """Seconds that the shortest message takes."""
        return self._way(a, b)[2] if a != b else 0.0

    def arrival_s(self, a: str, b: str, bytes_: float, now: float) -> float:
        """Send a message; returns when all of it has arrived."""
        if a == b:
            return now
        resources, inside, latency_s = self._way(a, b)
        free_s, last = self._free_s, now + bytes_ / inside
        for resource, bytes_s in resources:
            free_s[resource] = ends = max(free_s[resource], now) + bytes_ / bytes_s
            last = max(last, ends)
        return last + latency_s
