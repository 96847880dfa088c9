"""What traffic between nodes shares: links, network cards and uplinks, with a capacity per direction.

A max flow that only knows links (HexGen-2, section 3.3) lets all links of a node run at full speed at once,
although they all pass the node's network card."""

from __future__ import annotations

from typing import Literal

import numpy as np

from hexgen2.cluster import Cluster, between_nodes

Links = Literal["shared", "pairwise"]
"""Whether traffic shares what it crosses, or every KV route has its links to itself, as in the paper."""


class SharedLinks:
    """The resources of a cluster, R of them, in this order: the link of each ordered pair of N nodes
    (N x N, those on the diagonal unlimited), each node's card out, each card in, each uplink out, each
    uplink in.

    Attributes
    ----------
    nodes : N
    capacity_bytes_s : [R]; of a link, that of the slowest pair of devices at its ends
    capacities_bytes_s : the same as a list, whose elements are read faster
    """

    def __init__(self, cluster: Cluster) -> None:
        self.nodes = len(cluster.node_names)
        self._node_names = cluster.node_names
        self._between: dict[tuple[int, int], tuple[int, ...]] = {}
        self._uplink_names = tuple(uplink.name for uplink in cluster.uplinks)
        self._inside = np.array(
            [np.isin(np.arange(self.nodes), uplink.nodes) for uplink in cluster.uplinks], dtype=bool
        ).reshape(-1, self.nodes)
        links = between_nodes(cluster.bandwidth_bytes_s, cluster.node_of, np.minimum)
        uplinks = [uplink.bandwidth_bytes_s for uplink in cluster.uplinks]
        self.capacity_bytes_s = np.concatenate(
            [links.ravel(), cluster.card_bytes_s, cluster.card_bytes_s, uplinks, uplinks]
        )
        self.capacities_bytes_s: list[float] = self.capacity_bytes_s.tolist()

    @property
    def count(self) -> int:
        """R."""
        return len(self.capacity_bytes_s)

    def resources_between(self, a: int, b: int) -> tuple[int, ...]:
        """The indices of the resources that traffic from node a to node b takes, the link first; none inside
        a node."""
        if (a, b) not in self._between:
            self._between[a, b] = self._resources(a, b) if a != b else ()
        return self._between[a, b]

    def _resources(self, a: int, b: int) -> tuple[int, ...]:
        """The link, both network cards, and the uplinks that are left and entered."""
        cards, uplinks = self.nodes**2, self.nodes**2 + 2 * self.nodes
        left, entered = self._inside[:, a] & ~self._inside[:, b], self._inside[:, b] & ~self._inside[:, a]
        return (
            a * self.nodes + b,
            cards + a,
            cards + self.nodes + b,
            *(uplinks + int(k) for k in np.flatnonzero(left)),
            *(uplinks + len(self._inside) + int(k) for k in np.flatnonzero(entered)),
        )

    def name(self, resource: int) -> str:
        """The resource in words: "the link from a to b", "the network card of a (out)", "uplink west
        (in)"."""
        n, uplinks = self.nodes, len(self._uplink_names)
        if resource < n * n:
            return f"the link from {self._node_names[resource // n]} to {self._node_names[resource % n]}"
        resource -= n * n
        if resource < 2 * n:
            return f"the network card of {self._node_names[resource % n]} ({'out' if resource < n else 'in'})"
        resource -= 2 * n
        return f"uplink {self._uplink_names[resource % uplinks]} ({'out' if resource < uplinks else 'in'})"
