"""What a placement sends between nodes and between the GPUs of a node, against what these carry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from cost_model.base import CostModel
from hexgen2.cluster import Cluster
from hexgen2.network.shared_links import SharedLinks
from hexgen2.placement import Replica, Route


@dataclass(frozen=True, eq=False)
class Traffic:
    """Bytes/s between nodes [N, N], and the shares of time for which each GPU [n] sends and receives KV
    caches inside its node."""

    cluster: Cluster
    between: np.ndarray
    sending: np.ndarray
    receiving: np.ndarray

    def at_least(self, share: float) -> Iterator[tuple[str, float]]:
        """Everything used to this share of what it carries or more, in words, with its share; of links, cards
        and uplinks that carry the same traffic the first only."""
        shared, named = SharedLinks(self.cluster), set()
        used = shared.loads(self.between) / shared.capacity_bytes_s
        senders, receivers = np.nonzero(self.between)
        pairs = list(zip(senders.tolist(), receivers.tolist(), strict=True))
        for resource in np.flatnonzero(used >= share).tolist():
            carried = frozenset(pair for pair in pairs if resource in shared.resources_between(*pair))
            if carried not in named:
                named.add(carried)
                yield shared.name(resource), float(used[resource])
        for word, busy in (("out", self.sending), ("in", self.receiving)):
            for gpu in np.flatnonzero(busy >= share):
                yield f"the port of {self.cluster.gpu_ids[gpu]} ({word})", float(busy[gpu])


def traffic_of(
    cluster: Cluster, costs: CostModel, replicas: Iterable[Replica], routes: Iterable[Route]
) -> Traffic:
    """The KV caches of all routes and the activations of all pipelines.

    Raises
    ------
    KeyError : a GPU that the cluster lacks
    """
    nodes, gpus = len(cluster.node_names), len(cluster)
    between, sending, receiving = np.zeros((nodes, nodes)), np.zeros(gpus), np.zeros(gpus)
    for route in routes:
        for link in route.links:
            sender, receiver = cluster.index(link.from_), cluster.index(link.to)
            source, target = cluster.node_of[sender], cluster.node_of[receiver]
            bytes_s = link.bytes_per_req * route.flow_req_s
            if source == target:
                sending[sender] += bytes_s / cluster.bandwidth_bytes_s[sender, receiver]
                receiving[receiver] += bytes_s / cluster.bandwidth_bytes_s[sender, receiver]
            else:
                between[source, target] += bytes_s
    tokens = {"prefill": costs.isl, "decode": costs.osl, "colocated": costs.isl + costs.osl}
    for replica in replicas:
        path = [cluster.node_of[cluster.index(stage.gpus[0])] for stage in replica.stages]
        token_s = replica.utilisation * replica.capacity_req_s * tokens[replica.role]
        for source, target in pairwise(path):
            if source != target:
                between[source, target] += token_s * costs.activation_bytes_per_token
    return Traffic(cluster, between, sending, receiving)
