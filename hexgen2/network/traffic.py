"""How full everything is that carries traffic: links, network cards, uplinks and the ports of GPUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from hexgen2.cluster import Cluster
from hexgen2.network.occupancy import KvTransfer, Port, Resource, Sent, occupied_s
from hexgen2.network.shared_links import SharedLinks


class Traffic:
    """All traffic of a cluster together."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._links = cluster, SharedLinks(cluster)
        self._bytes_s: dict[tuple[int, int], float] = defaultdict(float)
        self._ports: dict[Port, float] = defaultdict(float)

    def add_transfer(self, transfer: KvTransfer, req_s: float) -> None:
        """Add the KV caches of so many requests per second."""
        for port, busy_s in transfer.ports_s.items():
            self._ports[port] += busy_s * req_s
        self.add(transfer.sent, req_s)

    def add(self, sent: Iterable[Sent], times_s: float) -> None:
        """Add this traffic between nodes, so many times per second."""
        if times_s > 0:
            for a, b, bytes_ in sent:
                self._bytes_s[a, b] += bytes_ * times_s

    @property
    def shares(self) -> dict[Resource, float]:
        """The share of time for which each resource is occupied; more than 1 is more than it can carry."""
        sent = ((a, b, bytes_s) for (a, b), bytes_s in self._bytes_s.items())
        shares = occupied_s(self._links, sent)
        shares.update(self._ports.items())
        return shares

    def at_least(self, share: float) -> Iterator[tuple[str, float]]:
        """The name and share of everything that is occupied for this share of the time or more; of links,
        cards and uplinks that carry the same traffic only the first."""
        shares, named = self.shares, set[frozenset[tuple[int, int]]]()
        users: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for pair in self._bytes_s:
            for resource in self._links.resources_between(*pair):
                users[resource].append(pair)
        for resource in sorted(users):
            pairs = frozenset(users[resource])
            if shares[resource] >= share and pairs not in named:
                named.add(pairs)
                yield self._links.name(resource), shares[resource]
        for port in sorted(self._ports, key=lambda port: (port[0] == "receive", port[1])):
            if shares[port] >= share:
                word = "out" if port[0] == "send" else "in"
                yield f"the port of {self._cluster.gpu_ids[port[1]]} ({word})", shares[port]
