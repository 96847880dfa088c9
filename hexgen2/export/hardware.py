"""Where the GPUs of a placement are: nodes, indices, and what kind of device they are."""

from __future__ import annotations

import re
from collections.abc import Iterable

from cluster_specs.loader import parse_accelerators
from cluster_specs.schema import NodeSpec
from hexgen2.placement import Placement, Replica


def split(gpu: str) -> tuple[str, int]:
    """A GPU id "node/index" as (node, index)."""
    node, _, index = gpu.rpartition("/")
    return node, int(index)


def node_spec(placement: Placement, name: str) -> NodeSpec:
    """The node of that name; the placement has been verified, so there is one."""
    return next(node for node in placement.cluster.nodes if node.name == name)


def accelerator(placement: Placement, node: str) -> str:
    """The name of a node's accelerators."""
    return parse_accelerators(node_spec(placement, node).accelerators, "placement", node)[0]


def on_cpu(placement: Placement, replica: Replica) -> bool:
    """Whether a replica's devices are CPUs that stand in for GPUs."""
    entry = placement.cluster.accelerators.get(accelerator(placement, split(replica.gpus[0])[0]))
    return entry is not None and entry.kind == "cpu"


def gpus_by_node(gpus: list[str]) -> dict[str, list[int]]:
    """Indices by node, in the order in which they are named."""
    nodes: dict[str, list[int]] = {}
    for gpu in gpus:
        node, index = split(gpu)
        nodes.setdefault(node, []).append(index)
    return nodes


def nodes_in_use(placement: Placement) -> dict[str, list[int]]:
    """Indices of the GPUs that serve, by node, in the order of the cluster."""
    used = gpus_by_node([gpu for replica in placement.replicas for gpu in replica.gpus])
    return {node.name: sorted(used[node.name]) for node in placement.cluster.nodes if node.name in used}


def safe_names(names: Iterable[str], limit: int = 40) -> dict[str, str]:
    """A DNS label for each name (RFC 1123: a-z, 0-9 and "-", first and last alphanumeric), all different."""
    labels: dict[str, str] = {}
    for name in dict.fromkeys(names):
        label = re.sub("[^a-z0-9]+", "-", name.lower())[:limit].strip("-") or "x"
        number, taken = 2, set(labels.values())
        unique = label
        while unique in taken:
            unique, number = f"{label}-{number}", number + 1
        labels[name] = unique
    return labels
