"""The cluster as arrays: where each device is, and the link between any two devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from cluster_specs.loader import accelerator_of, parse_accelerators
from cluster_specs.schema import ClusterSpec, InterconnectClass, InterconnectSpec
from cost_model.hardware import Accelerator, Fabric, Link, interconnect_link

_GBIT_S = 1e9 / 8  # bytes/s


@dataclass(frozen=True)
class Uplink:
    """The uplink that these nodes (indices) share for traffic with all others, in each direction."""

    name: str
    nodes: tuple[int, ...]
    bandwidth_bytes_s: float


@dataclass(frozen=True, eq=False)
class Cluster:
    """The n devices of a cluster, in the order of the spec, and the links between them.

    Attributes
    ----------
    gpu_ids : "node/index" of each device
    node_of : [n] index of each device's node in `node_names`
    types : the distinct accelerators, fastest first, then by name
    type_of : [n] index of each device's accelerator in `types`
    bandwidth_bytes_s, latency_s : [n, n] of the link from row to column; inf and 0 on the diagonal
    card_bytes_s : [nodes] what each node's network card carries in each direction; inf where there is
        one node only and the spec does not say
    uplinks : those that sets of nodes share
    price_per_hour : [n] US dollars
    memory_bytes : [n]
    fabrics : what kind of links joins the devices of each node, for collectives
    assumptions : every figure that is not measured, with its reason
    """

    name: str
    gpu_ids: tuple[str, ...]
    node_names: tuple[str, ...]
    node_of: np.ndarray
    types: tuple[Accelerator, ...]
    type_of: np.ndarray
    bandwidth_bytes_s: np.ndarray
    latency_s: np.ndarray
    card_bytes_s: np.ndarray
    uplinks: tuple[Uplink, ...]
    price_per_hour: np.ndarray
    memory_bytes: np.ndarray
    fabrics: tuple[Fabric, ...]
    assumptions: tuple[str, ...]
    spec: ClusterSpec = field(repr=False)

    @classmethod
    def from_spec(cls, spec: ClusterSpec) -> Cluster:
        """The cluster of a resolved spec. A measured matrix wins over links, and links over the default."""
        cards, counts = [], []
        for node in spec.nodes:
            card_name, count = parse_accelerators(node.accelerators, spec.name, "nodes")
            cards.append(accelerator_of(spec, card_name))
            counts.append(count)
        node_of = np.repeat(np.arange(len(spec.nodes)), np.array(counts, dtype=int))
        types = tuple(sorted(set(cards), key=lambda card: (-card.flops_s, card.name)))
        type_of = np.array([types.index(card) for card in cards], dtype=int)[node_of]

        network_bandwidth, network_latency = _network(spec)
        bandwidth = network_bandwidth[np.ix_(node_of, node_of)]
        latency = network_latency[np.ix_(node_of, node_of)]
        assumptions: list[str] = list(spec.assumptions)
        fabrics: list[Fabric] = []
        for index, node in enumerate(spec.nodes):
            link, assumption = _inside(node.interconnect, cards[index])
            fabrics.append(link.fabric)
            here = np.flatnonzero(node_of == index)
            bandwidth[np.ix_(here, here)] = link.bandwidth_bytes_s
            latency[np.ix_(here, here)] = link.latency_s
            if assumption and len(here) > 1 and assumption not in assumptions:
                assumptions.append(assumption)
        if spec.network.measured is not None:
            bandwidth = np.array(spec.network.measured, dtype=float) * _GBIT_S
            network_bandwidth = between_nodes(bandwidth, node_of, np.maximum)
        np.fill_diagonal(bandwidth, np.inf)
        np.fill_diagonal(latency, 0.0)

        prices = [node.price_per_gpu_hour or 0.0 for node in spec.nodes]
        ids = [
            f"{node.name}/{i}" for node, count in zip(spec.nodes, counts, strict=True) for i in range(count)
        ]
        cluster = cls(
            name=spec.name,
            gpu_ids=tuple(ids),
            node_names=tuple(node.name for node in spec.nodes),
            node_of=node_of,
            types=types,
            type_of=type_of,
            bandwidth_bytes_s=bandwidth,
            latency_s=latency,
            card_bytes_s=_cards(spec, network_bandwidth),
            uplinks=_uplinks(spec),
            price_per_hour=np.array(prices)[node_of],
            memory_bytes=np.array([card.memory_bytes for card in cards])[node_of],
            fabrics=tuple(fabrics),
            assumptions=tuple(assumptions),
            spec=spec,
        )
        for array in vars(cluster).values():
            if isinstance(array, np.ndarray):
                array.flags.writeable = False
        return cluster

    def __len__(self) -> int:
        return len(self.gpu_ids)

    @cached_property
    def accelerators(self) -> tuple[Accelerator, ...]:
        """The accelerator of each device."""
        return tuple(self.types[t] for t in self.type_of)

    @cached_property
    def _index_of(self) -> dict[str, int]:
        return {gpu_id: index for index, gpu_id in enumerate(self.gpu_ids)}

    def index(self, gpu_id: str) -> int:
        """The position of a device; KeyError for an unknown id."""
        return self._index_of[gpu_id]

    def indices(self, gpu_ids: Iterable[str]) -> list[int]:
        """The positions of devices; KeyError for an unknown id."""
        return [self._index_of[gpu_id] for gpu_id in gpu_ids]

    def nodes_of(self, gpu_ids: Iterable[str]) -> list[int]:
        """The index of each device's node; KeyError for an unknown id."""
        return [int(self.node_of[self._index_of[gpu_id]]) for gpu_id in gpu_ids]

    def link(self, i: int, j: int) -> Link:
        """The link from device i to device j."""
        fabric: Fabric = self.fabrics[self.node_of[i]] if self.node_of[i] == self.node_of[j] else ""
        return Link(float(self.bandwidth_bytes_s[i, j]), float(self.latency_s[i, j]), fabric)


def _inside(interconnect: InterconnectClass | InterconnectSpec, card: Accelerator) -> tuple[Link, str | None]:
    """The link between two devices of a node, and what was assumed about it."""
    if isinstance(interconnect, InterconnectSpec):
        return Link(interconnect.bandwidth_gbyte_s * 1e9, interconnect.latency_us * 1e-6), None
    return interconnect_link(interconnect, card)


def _network(spec: ClusterSpec) -> tuple[np.ndarray, np.ndarray]:
    """[nodes, nodes] bandwidth in bytes/s and latency in seconds, from links and the default. No pair is
    faster than the network cards at its ends and the uplinks on its way."""
    names = {node.name: index for index, node in enumerate(spec.nodes)}
    size, default = len(names), spec.network.default
    bandwidth = np.full((size, size), default.bandwidth_gbit_s * _GBIT_S)
    latency = np.full((size, size), default.latency_us * 1e-6)
    for link in spec.network.links:
        i, j = names[link.from_], names[link.to]
        bandwidth[i, j] = bandwidth[j, i] = link.bandwidth_gbit_s * _GBIT_S
        latency[i, j] = latency[j, i] = link.latency_us * 1e-6
    cards = _cards(spec, bandwidth)
    bandwidth = np.minimum(bandwidth, np.minimum.outer(cards, cards))
    for uplink in _uplinks(spec):
        inside = np.isin(np.arange(size), uplink.nodes)
        crosses = inside[:, None] != inside[None, :]
        bandwidth[crosses] = np.minimum(bandwidth[crosses], uplink.bandwidth_bytes_s)
    np.fill_diagonal(bandwidth, np.inf)
    np.fill_diagonal(latency, 0.0)
    return bandwidth, latency


def _cards(spec: ClusterSpec, network_bandwidth: np.ndarray) -> np.ndarray:
    """[nodes] bytes/s of each network card: as the spec says, or else that of the node's fastest link, which
    its card must carry at least."""
    between = np.where(np.eye(len(spec.nodes), dtype=bool), 0.0, network_bandwidth)
    fastest = np.maximum(between.max(axis=0, initial=0.0), between.max(axis=1, initial=0.0))
    given = [np.nan if n.network_gbit_s is None else n.network_gbit_s * _GBIT_S for n in spec.nodes]
    return np.where(np.isnan(given), np.where(fastest > 0, fastest, np.inf), given)


def _uplinks(spec: ClusterSpec) -> tuple[Uplink, ...]:
    """The uplinks, with their nodes as indices and bandwidth in bytes/s."""
    names = {node.name: index for index, node in enumerate(spec.nodes)}
    return tuple(
        Uplink(u.name, tuple(names[n] for n in u.nodes), u.bandwidth_gbit_s * _GBIT_S)
        for u in spec.network.uplinks
    )


def between_nodes(matrix: np.ndarray, node_of: np.ndarray, reduce: np.ufunc) -> np.ndarray:
    """[nodes, nodes] from a matrix [n, n]: the maximum or minimum over all pairs of a device of one node and
    a device of the other; inf on the diagonal."""
    starts = np.flatnonzero(np.diff(node_of, prepend=-1))
    found = reduce.reduceat(reduce.reduceat(matrix, starts, axis=0), starts, axis=1)
    np.fill_diagonal(found, np.inf)
    return found
