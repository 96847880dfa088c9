"""Renting: offers become nodes of a cluster, of which a part is rented."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cluster_specs.loader import CARD_ASSUMPTION, MAX_GPUS, accelerator_of, parse_accelerators
from cluster_specs.schema import ClusterSpec, InterconnectSpec, NodeSpec, OfferSpec
from cost_model.errors import InputError
from cost_model.hardware import interconnect_link


def with_offers(spec: ClusterSpec) -> ClusterSpec:
    """A resolved spec with its offers turned into nodes.

    An offer of max_count GPUs in nodes of gpus_per_node gives full nodes, and one for the rest. They are
    joined to all others by network.default, which is added to the assumptions.

    Raises
    ------
    InputError : more GPUs in all than a cluster may have
    """
    if not spec.offers:
        return spec
    nodes = list(spec.nodes)
    taken = {node.name for node in nodes}
    total = sum(_count(spec, node) for node in nodes)
    for index, offer in enumerate(spec.offers):
        total += offer.max_count
        if total > MAX_GPUS:
            problem = f"more than {MAX_GPUS} devices in all"
            raise InputError(spec.name, f"offers[{index}].max_count", problem, "offer fewer")
        nodes += _offered_nodes(offer, taken)
    network = spec.network
    if isinstance(network.measured, list):
        extended = _extended(spec, network.measured, nodes)
        network = network.model_copy(update={"measured": extended})
    default = network.default
    note = (
        "GPUs of an offer come in nodes of up to gpus_per_node; what joins these nodes to all others is "
        f"taken as network.default, {default.bandwidth_gbit_s:g} Gbit/s and {default.latency_us:g} us"
    )
    assumptions = [*spec.assumptions, note]
    if any(node.network_gbit_s is None for node in nodes) and CARD_ASSUMPTION not in assumptions:
        assumptions.append(CARD_ASSUMPTION)
    update = {"nodes": nodes, "offers": [], "network": network, "assumptions": assumptions}
    return spec.model_copy(update=update)


def rented_part(spec: ClusterSpec, counts: Sequence[int]) -> ClusterSpec:
    """The spec with the first counts[n] GPUs of node n; nodes without any are left out, with their links."""
    kept = [(node, count) for node, count in zip(spec.nodes, counts, strict=True) if count]
    names = {node.name for node, _ in kept}
    nodes = [
        node.model_copy(update={"accelerators": f"{node.accelerators.rsplit(':', 1)[0]}:{count}"})
        for node, count in kept
    ]
    links = [link for link in spec.network.links if {link.from_, link.to} <= names]
    shared = ((uplink, [name for name in uplink.nodes if name in names]) for uplink in spec.network.uplinks)
    uplinks = [uplink.model_copy(update={"nodes": inside}) for uplink, inside in shared if inside]
    network = spec.network.model_copy(update={"links": links, "uplinks": uplinks})
    if isinstance(network.measured, list):
        rows = _first_of_each(spec, counts)
        measured = [[network.measured[i][j] for j in rows] for i in rows]
        network = network.model_copy(update={"measured": measured})
    cards = {node.accelerators.rsplit(":", 1)[0] for node in nodes}
    accelerators = {name: entry for name, entry in spec.accelerators.items() if name in cards}
    return spec.model_copy(
        update={"nodes": nodes, "network": network, "accelerators": accelerators, "offers": []}
    )


def _offered_nodes(offer: OfferSpec, taken: set[str]) -> list[NodeSpec]:
    """Nodes of the offer under names that nobody has yet; adds them to `taken`."""
    sizes = [offer.gpus_per_node] * (offer.max_count // offer.gpus_per_node)
    rest = offer.max_count % offer.gpus_per_node
    stem = re.sub(r"[/\s]+", "-", offer.accelerators.lower())
    nodes, number = [], 0
    for size in [*sizes, rest] if rest else sizes:
        number += 1
        while f"{stem}-offer-{number}" in taken:
            number += 1
        name = f"{stem}-offer-{number}"
        taken.add(name)
        nodes.append(
            NodeSpec(
                name=name,
                accelerators=f"{offer.accelerators}:{size}",
                interconnect=offer.interconnect,
                network_gbit_s=offer.network_gbit_s,
                price_per_gpu_hour=offer.price_per_gpu_hour,
            )
        )
    return nodes


def _count(spec: ClusterSpec, node: NodeSpec) -> int:
    """Devices in a node."""
    return parse_accelerators(node.accelerators, spec.name, "nodes")[1]


def _first_of_each(spec: ClusterSpec, counts: Sequence[int]) -> list[int]:
    """Positions of the first counts[n] devices of each node n."""
    positions: list[int] = []
    start = 0
    for node, count in zip(spec.nodes, counts, strict=True):
        positions += range(start, start + count)
        start += _count(spec, node)
    return positions


def _extended(spec: ClusterSpec, measured: list[list[float]], nodes: list[NodeSpec]) -> list[list[float]]:
    """The measured matrix in Gbit/s, with rows for the offered nodes, which were not measured."""
    node_of = [n for n, node in enumerate(nodes) for _ in range(_count(spec, node))]
    inside = [_interconnect_gbit_s(spec, node) for node in nodes]
    known, default = len(measured), spec.network.default.bandwidth_gbit_s

    def gbit_s(i: int, j: int) -> float:
        if i == j:
            return 0.0
        if i < known and j < known:
            return measured[i][j]
        return inside[node_of[i]] if node_of[i] == node_of[j] else default

    size = range(len(node_of))
    return [[gbit_s(i, j) for j in size] for i in size]


def _interconnect_gbit_s(spec: ClusterSpec, node: NodeSpec) -> float:
    """Bandwidth between two devices of a node."""
    if isinstance(node.interconnect, InterconnectSpec):
        return node.interconnect.bandwidth_gbyte_s * 8
    card, _ = parse_accelerators(node.accelerators, spec.name, "nodes")
    return interconnect_link(node.interconnect, accelerator_of(spec, card))[0].bandwidth_bytes_s * 8e-9
