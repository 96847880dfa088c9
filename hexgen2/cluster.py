"""The cluster as arrays: which device is where, and what lies between each two of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from cluster_specs.loader import accelerator_of, parse_accelerators
from cluster_specs.schema import ClusterSpec, InterconnectClass, InterconnectSpec
from cost_model.hardware import Accelerator, Link, interconnect_link

_GBIT_S = 1e9 / 8  # bytes/s


@dataclass(frozen=True, eq=False)
class Cluster:
    """Devices in the order of the spec, n of them, and the links between them.

    Attributes
    ----------
    gpu_ids : "node/index" of each device
    node_of : [n] index of each device's node in `node_names`
    types : the distinct accelerators, fastest first, then by name
    type_of : [n] index of each device's accelerator in `types`
    bandwidth_bytes_s, latency_s : [n, n] of the link from row to column; inf and 0 on the diagonal
    network_bandwidth_bytes_s, network_latency_s : [nodes, nodes]; inf and 0 on the diagonal; where the
        bandwidth was measured, that of the fastest pair of devices
    price_per_hour : [n] US dollars
    memory_bytes : [n]
    interconnects : what joins the devices of each node
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
    network_bandwidth_bytes_s: np.ndarray
    network_latency_s: np.ndarray
    price_per_hour: np.ndarray
    memory_bytes: np.ndarray
    interconnects: tuple[InterconnectClass | InterconnectSpec, ...]
    assumptions: tuple[str, ...]
    spec: ClusterSpec = field(repr=False)

    @classmethod
    def from_spec(cls, spec: ClusterSpec) -> Cluster:
        """Build from a resolved spec. A measured matrix wins over links, links over the default."""
        cards, counts = [], []
        for node in spec.nodes:
            card_name, count = parse_accelerators(node.accelerators, spec.name, "nodes")
            cards.append(accelerator_of(spec, card_name))
            counts.append(count)
        node_of = np.repeat(np.arange(len(spec.nodes)), counts)
        types = tuple(sorted(set(cards), key=lambda card: (-card.flops_s, card.name)))
        type_of = np.array([types.index(card) for card in cards])[node_of]

        network_bandwidth, network_latency = _network(spec)
        bandwidth = network_bandwidth[np.ix_(node_of, node_of)]
        latency = network_latency[np.ix_(node_of, node_of)]
        assumptions = list(spec.assumptions)
        for index, node in enumerate(spec.nodes):
            link, assumption = _inside(node.interconnect, cards[index])
            here = np.flatnonzero(node_of == index)
            bandwidth[np.ix_(here, here)] = link.bandwidth_bytes_s
            latency[np.ix_(here, here)] = link.latency_s
            if assumption and len(here) > 1 and assumption not in assumptions:
                assumptions.append(assumption)
        if spec.network.measured is not None:
            bandwidth = np.array(spec.network.measured, dtype=float) * _GBIT_S
            network_bandwidth = _fastest_pair(bandwidth, node_of)
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
            network_bandwidth_bytes_s=network_bandwidth,
            network_latency_s=network_latency,
            price_per_hour=np.array(prices)[node_of],
            memory_bytes=np.array([card.memory_bytes for card in cards])[node_of],
            interconnects=tuple(node.interconnect for node in spec.nodes),
            assumptions=tuple(assumptions),
            spec=spec,
        )
        for array in vars(cluster).values():
            if isinstance(array, np.ndarray):
                array.flags.writeable = False
        return cluster

    def __len__(self) -> int:
        return len(self.gpu_ids)

    @property
    def accelerators(self) -> tuple[Accelerator, ...]:
        """The accelerator of each device."""
        return tuple(self.types[t] for t in self.type_of)

    @cached_property
    def _index_of(self) -> dict[str, int]:
        return {gpu_id: index for index, gpu_id in enumerate(self.gpu_ids)}

    def index(self, gpu_id: str) -> int:
        """The position of a device; KeyError if there is none of that id."""
        return self._index_of[gpu_id]

    def indices(self, gpu_ids: Iterable[str]) -> list[int]:
        """The positions of devices; KeyError if there is none of some id."""
        return [self._index_of[gpu_id] for gpu_id in gpu_ids]

    def link(self, i: int, j: int) -> Link:
        """From device i to device j."""
        return Link(float(self.bandwidth_bytes_s[i, j]), float(self.latency_s[i, j]))

    @property
    def total_price_per_hour(self) -> float:
        """US dollars per hour for all devices."""
        return float(self.price_per_hour.sum())


def _inside(interconnect: InterconnectClass | InterconnectSpec, card: Accelerator) -> tuple[Link, str | None]:
    if isinstance(interconnect, InterconnectSpec):
        return Link(interconnect.bandwidth_gbyte_s * 1e9, interconnect.latency_us * 1e-6), None
    return interconnect_link(interconnect, card)


def _network(spec: ClusterSpec) -> tuple[np.ndarray, np.ndarray]:
    """[nodes, nodes] bandwidth in bytes/s and latency in seconds, from links and the default."""
    names = {node.name: index for index, node in enumerate(spec.nodes)}
    size, default = len(names), spec.network.default
    bandwidth = np.full((size, size), default.bandwidth_gbit_s * _GBIT_S)
    latency = np.full((size, size), default.latency_us * 1e-6)
    for link in spec.network.links:
        i, j = names[link.from_], names[link.to]
        bandwidth[i, j] = bandwidth[j, i] = link.bandwidth_gbit_s * _GBIT_S
        latency[i, j] = latency[j, i] = link.latency_us * 1e-6
    np.fill_diagonal(bandwidth, np.inf)
    np.fill_diagonal(latency, 0.0)
    return bandwidth, latency


def _fastest_pair(bandwidth: np.ndarray, node_of: np.ndarray) -> np.ndarray:
    """[nodes, nodes] from [n, n]: the best bandwidth between a device of one and one of the other."""
    starts = np.flatnonzero(np.diff(node_of, prepend=-1))
    fastest = np.maximum.reduceat(np.maximum.reduceat(bandwidth, starts, axis=0), starts, axis=1)
    np.fill_diagonal(fastest, np.inf)
    return fastest
