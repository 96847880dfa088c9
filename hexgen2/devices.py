"""The devices of a placement: which node has them, under which index, and of what kind they are."""

from __future__ import annotations

from collections.abc import Sequence

from cluster_specs.loader import parse_accelerators
from cluster_specs.schema import NodeSpec
from hexgen2.placement import Placement


def split(gpu: str) -> tuple[str, int]:
    """The node and the index in a GPU id, "node/index"."""
    node, _, index = gpu.rpartition("/")
    return node, int(index)


def node_of(gpu: str) -> str:
    """The node in a GPU id."""
    return gpu.rpartition("/")[0]


def node_spec(placement: Placement, name: str) -> NodeSpec:
    """The cluster's description of a node; there is one, since placements are checked before use."""
    return next(node for node in placement.cluster.nodes if node.name == name)


def accelerators_of(placement: Placement, node: str) -> tuple[str, int]:
    """The accelerators of a node: their name, and how many there are."""
    return parse_accelerators(node_spec(placement, node).accelerators, "placement", node)


def is_cpu(placement: Placement, gpu: str) -> bool:
    """Whether the device with this GPU id is a CPU that stands in for a GPU."""
    name, _ = accelerators_of(placement, node_of(gpu))
    entry = placement.cluster.accelerators.get(name)
    return entry is not None and entry.kind == "cpu"


def gpus_by_node(gpus: Sequence[str]) -> dict[str, list[int]]:
    """The indices of some GPUs by node, in the order given."""
    nodes: dict[str, list[int]] = {}
    for gpu in gpus:
        node, index = split(gpu)
        nodes.setdefault(node, []).append(index)
    return nodes


def nodes_in_use(placement: Placement) -> dict[str, list[int]]:
    """The indices of the GPUs that serve, by node, in the order of the cluster."""
    used = gpus_by_node([gpu for replica in placement.replicas for gpu in replica.gpus])
    return {node.name: sorted(used[node.name]) for node in placement.cluster.nodes if node.name in used}
