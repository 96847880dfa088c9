"""Groups of nodes that share replicas, and how uniform each group is."""

from __future__ import annotations

from dataclasses import dataclass

from hexgen2.devices import accelerators_of, gpus_by_node, is_cpu, node_spec, nodes_in_use
from hexgen2.placement import Placement


@dataclass(frozen=True)
class Node:
    """What the pod of a node needs. `devices` is the number of devices that the pod must see for the
    placement's indices to be valid in it: the highest index in use, plus one."""

    name: str
    accelerator: str
    cpu: bool
    devices: int
    memory_gib: float
    region: str | None

    @property
    def needs(self) -> tuple[object, ...]:
        """Nodes with equal needs can share a pod template."""
        return self.accelerator, self.devices, self.region


@dataclass(frozen=True)
class Group:
    """Nodes connected by replicas, so that losing one affects the others. The first is the leader; if just
    one node differs from the others, it is that one."""

    nodes: tuple[Node, ...]
    replicas: tuple[str, ...]

    @property
    def uniform(self) -> bool:
        """Whether all nodes except the leader can share one pod template."""
        return len({node.needs for node in self.nodes[1:]}) <= 1


def groups_of(placement: Placement) -> list[Group]:
    """The nodes in use, grouped so that no replica spans two groups, in the order of the cluster."""
    together = {name: {name} for name in nodes_in_use(placement)}
    for replica in placement.replicas:
        joined = set().union(*(together[name] for name in gpus_by_node(replica.gpus)))
        for name in joined:
            together[name] = joined
    nodes = {node.name: node for node in _nodes(placement)}
    groups, seen = [], set()
    for name in nodes:
        if name in seen:
            continue
        seen |= together[name]
        members = _odd_one_first([node for node in nodes.values() if node.name in together[name]])
        replicas = [each.id for each in placement.replicas if gpus_by_node(each.gpus).keys() & together[name]]
        groups.append(Group(tuple(members), tuple(replicas)))
    return groups


def _nodes(placement: Placement) -> list[Node]:
    cpu_nodes = {
        name
        for replica in placement.replicas
        if is_cpu(placement, replica.gpus[0])
        for name in gpus_by_node(replica.gpus)
    }
    found = []
    for name, indices in nodes_in_use(placement).items():
        kind, _ = accelerators_of(placement, name)
        entry = placement.cluster.accelerators[kind]
        region = node_spec(placement, name).region
        found.append(Node(name, kind, name in cpu_nodes, max(indices) + 1, entry.memory_gib, region))
    return found


def _odd_one_first(nodes: list[Node]) -> list[Node]:
    for odd in nodes:
        if len({node.needs for node in nodes if node is not odd}) <= 1:
            return [odd, *(node for node in nodes if node is not odd)]
    return nodes
