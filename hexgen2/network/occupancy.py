"""What a request occupies between GPUs: which links, network cards, uplinks and ports, and for how long.

How traffic shares bandwidth is decided here. The search asks for stages whose GPUs have no names yet; the
checks, the flow after a loss and the simulator ask for the GPUs of a placement. The bound's program states
the same limits as rows (search/bounds/configuration_lp.py).

Between two nodes, traffic takes every resource on its way (see SharedLinks), each for the time that this one
would need alone. Inside a node, each GPU sends through one port of its own and receives through another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol

from cost_model.hardware import Link
from hexgen2.cluster import Cluster
from hexgen2.network.kv_parts import GpuPart, copies, layer_overlaps
from hexgen2.network.shared_links import Links, SharedLinks

Port = tuple[Literal["send", "receive"], int]
"""A port of a GPU, by its index in the cluster; or of each GPU of a stage, by the stage's position."""
Resource = int | Port
"""A resource of SharedLinks by its index, or a port."""
Sent = tuple[int, int, float]
"""(from node, to node, bytes)."""


class StageOnNode(Protocol):
    """A pipeline stage whose GPUs have no names yet: `degree` GPUs of a node."""

    @property
    def node(self) -> int: ...

    @property
    def degree(self) -> int: ...

    @property
    def layers(self) -> int: ...

    @property
    def attention_dp(self) -> int: ...


class KvPart(NamedTuple):
    """A part of a request's KV cache: `bytes` from `senders` GPUs of one node to `receivers` GPUs of another
    or the same, which divide it equally. Ports are numbered by GPU or by stage (see Port)."""

    send_port: int
    receive_port: int
    source: int
    target: int
    bytes: float
    bandwidth_bytes_s: float
    latency_s: float
    senders: int = 1
    receivers: int = 1


def parts_of_stages(
    prefill: Sequence[StageOnNode],
    decode: Sequence[StageOnNode],
    layer_bytes: float,
    node_links: Sequence[Sequence[Link]],
    to_every_rank: bool = False,
) -> Iterator[KvPart]:
    """The parts between each two stages that have layers in common.

    Parameters
    ----------
    layer_bytes : KV cache of one request in one layer
    node_links : [nodes][nodes] the slowest link between, or inside, nodes
    to_every_rank : as of gpu_parts
    """
    for i, j, layers in layer_overlaps([s.layers for s in prefill], [s.layers for s in decode]):
        source, senders = prefill[i].node, prefill[i].degree
        target, receivers = decode[j].node, decode[j].degree
        link = node_links[source][target]
        bytes_ = layers * layer_bytes * copies(receivers // decode[j].attention_dp, to_every_rank)
        yield KvPart(i, j, source, target, bytes_, link.bandwidth_bytes_s, link.latency_s, senders, receivers)


def parts_of_gpus(cluster: Cluster, parts: Iterable[GpuPart]) -> Iterator[KvPart]:
    """The same between each two GPUs of a cluster; KeyError for a GPU that it lacks."""
    for sender, receiver, bytes_ in parts:
        a, b = cluster.index(sender), cluster.index(receiver)
        bandwidth, latency = float(cluster.bandwidth_bytes_s[a, b]), float(cluster.latency_s[a, b])
        yield KvPart(a, b, int(cluster.node_of[a]), int(cluster.node_of[b]), bytes_, bandwidth, latency)


class KvTransfer(NamedTuple):
    """One request's KV cache on its way from a prefill to a decode replica, all parts at once.

    Attributes
    ----------
    latency_s : before the first byte, of the slowest part
    ports_s : seconds for which each port sends or receives inside its node
    sent : what goes from node to node
    """

    latency_s: float
    ports_s: dict[Port, float]
    sent: list[Sent]

    @classmethod
    def of(cls, parts: Iterable[KvPart]) -> KvTransfer:
        """The transfer of these parts."""
        slowest_s, sent = 0.0, list[Sent]()
        ports_s: dict[Port, float] = defaultdict(float)
        for a, b, source, target, bytes_, bandwidth, latency_s, senders, receivers in parts:
            if latency_s > slowest_s:
                slowest_s = latency_s
            if source == target:
                ports_s["send", a] += bytes_ / bandwidth / senders
                ports_s["receive", b] += bytes_ / bandwidth / receivers
            else:
                sent.append((source, target, bytes_))
        return cls(slowest_s, ports_s, sent)

    def alone_s(self, shared: SharedLinks) -> float:
        """Seconds until all of it has moved, with nothing else on the way: the slowest port, or link between
        two nodes, sets the pace (HexGen-2, section 3.3)."""
        links = occupied_s(shared, self.sent, "pairwise")
        return self.latency_s + max([*self.ports_s.values(), *links.values()], default=0.0)

    def busy_s(
        self, shared: SharedLinks, hops: Iterable[Sent] = (), links: Links = "shared"
    ) -> dict[Resource, float]:
        """Seconds for which it occupies each resource, together with what else its request sends."""
        busy_s = occupied_s(shared, [*self.sent, *hops], links)
        busy_s.update(self.ports_s.items())
        return busy_s


def activations(nodes: Sequence[int], bytes_: float) -> list[Sent]:
    """What a pipeline whose stages are on these nodes sends from stage to stage, in one direction."""
    return [(a, b, bytes_) for a, b in pairwise(nodes) if a != b]


def summed(sent: Iterable[Sent]) -> list[Sent]:
    """The same traffic with one entry for each pair of nodes."""
    bytes_between: dict[tuple[int, int], float] = {}
    for a, b, bytes_ in sent:
        bytes_between[a, b] = bytes_between.get((a, b), 0.0) + bytes_
    return [(a, b, bytes_) for (a, b), bytes_ in bytes_between.items()]


def occupied_s(shared: SharedLinks, sent: Iterable[Sent], links: Links = "shared") -> dict[Resource, float]:
    """Seconds for which traffic between nodes occupies each resource of SharedLinks. With links "pairwise"
    cards and uplinks do not count."""
    busy_s: dict[Resource, float] = {}
    capacity, crossed = shared.capacities_bytes_s, None if links == "shared" else 1
    for a, b, bytes_ in sent:
        for resource in shared.resources_between(a, b)[:crossed]:
            busy_s[resource] = busy_s.get(resource, 0.0) + bytes_ / capacity[resource]
    return busy_s
