"""The question a strategy answers: this cluster, this model, this workload, priced by this cost model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cluster_specs.loader import load_cluster
from cluster_specs.offers import with_offers
from cluster_specs.schema import ClusterSpec
from cost_model.architecture import ModelArchitecture
from cost_model.base import CostModel
from cost_model.dtypes import check_kernels, in_formats
from cost_model.errors import InputError
from cost_model.hardware import Accelerator, Link
from cost_model.models import find_model
from cost_model.pipeline import PipelineSemantics
from cost_model.registry import CostSource, find_cost_model
from hexgen2.cluster import Cluster, between_nodes
from hexgen2.goal import Goal
from hexgen2.network.shared_links import Links, SharedLinks
from hexgen2.search.layer_ranges.nodes import RangeNodes
from hexgen2.search.planning.targets import Targets
from hexgen2.workload.classes import load_workload
from hexgen2.workload.lengths import Workload

Engine = Literal["any", "vllm"]
Phases = Literal["flexible", "disaggregated", "colocated"]
ROLES: dict[Phases, tuple[str, ...]] = {
    "flexible": ("prefill", "decode", "colocated"),
    "disaggregated": ("prefill", "decode"),
    "colocated": ("colocated",),
}
"""The roles that groups may have."""


@dataclass(frozen=True)
class Problem:
    """Inputs of a search, and the cluster seen node by node.

    GPUs of one node are of one type and take each other's place, so a search counts GPUs per node and
    names them only in the placement. Where a measured matrix differs inside a node, the slowest pair
    stands for all: a capacity is never overstated. Under links "pairwise" every KV route has the links
    between its nodes to itself, as in the paper.

    `engine` is what the placement is for: under "vllm" plans are limited to those that it runs.

    `lost` are ids of GPUs that are out of service: no group has them, but they keep their place in the
    cluster, so that ids and links stay as they are.

    `phases` says which roles groups may have (see ROLES).

    `range_nodes` are given where tokens/s by layers held are measured instead of predicted, and
    `partial_inference` says whether requests may skip layers of a node, and `latency_aware` whether the flow
    counts only as far as KV caches allow; these concern ranges of layers only (hexgen2/search/layer_ranges).
    """

    spec: ClusterSpec
    cluster: Cluster
    model: ModelArchitecture
    workload: Workload
    costs: CostModel
    pipeline: PipelineSemantics = "pipelined"
    goal: Goal = field(default_factory=Goal)
    lost: frozenset[str] = frozenset()
    links: Links = "shared"
    engine: Engine = "any"
    phases: Phases = "disaggregated"
    range_nodes: RangeNodes | None = None
    partial_inference: bool = True
    latency_aware: bool = False

    def only(self, free: Mapping[int, int]) -> Problem:
        """The same problem with so many GPUs of each of these nodes alone; all others count as lost. What
        nodes and links are is not computed again."""
        names = self.cluster.gpu_ids
        kept = {names[g] for node, count in free.items() for g in self.node_gpus[node][:count]}
        smaller = replace(self, lost=frozenset(names) - kept)
        vars(smaller).update({name: getattr(self, name) for name in _WHATEVER_IS_LOST})
        return smaller

    @property
    def mixes(self) -> bool:
        """Whether a colocated group may also work for others (a mixed replica)."""
        return self.phases == "flexible" and self.pipeline == "pipelined"

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that groups may have."""
        return ROLES[self.phases]

    @cached_property
    def usable(self) -> np.ndarray:
        """Indices of the GPUs that are not lost, rising."""
        return np.array(
            [g for g, name in enumerate(self.cluster.gpu_ids) if name not in self.lost], dtype=int
        )

    @cached_property
    def targets(self) -> Targets:
        """What the goal asks of every replica's latency: nothing where the objective is throughput."""
        return Targets.of(Goal() if self.goal.objective == "throughput" else self.goal, self.costs)

    @cached_property
    def node_gpus(self) -> tuple[tuple[int, ...], ...]:
        """Indices of each node's usable GPUs; a node may have none."""
        owners = self.cluster.node_of[self.usable]
        nodes = len(self.cluster.node_names)
        return tuple(tuple(int(g) for g in self.usable[owners == n]) for n in range(nodes))

    @cached_property
    def _node_members(self) -> tuple[np.ndarray, ...]:
        """All GPU indices of each node, lost or not: its devices and links are what they were."""
        nodes = len(self.cluster.node_names)
        return tuple(np.flatnonzero(self.cluster.node_of == n) for n in range(nodes))

    @cached_property
    def node_accelerator(self) -> tuple[Accelerator, ...]:
        """Device type of each node."""
        return tuple(self.cluster.accelerators[gpus[0]] for gpus in self._node_members)

    @cached_property
    def node_price(self) -> tuple[float, ...]:
        """US dollars per GPU and hour of each node."""
        return tuple(float(self.cluster.price_per_hour[gpus[0]]) for gpus in self._node_members)

    @cached_property
    def node_links(self) -> tuple[tuple[Link, ...], ...]:
        """Slowest link between (or, on the diagonal, inside) each pair of nodes."""
        cluster, count = self.cluster, len(self.node_gpus)
        bandwidth = between_nodes(cluster.bandwidth_bytes_s, cluster.node_of, np.minimum)
        latency = between_nodes(cluster.latency_s, cluster.node_of, np.maximum)
        for n, gpus in enumerate(self._node_members):
            pairs = np.ix_(gpus, gpus)
            bandwidth[n, n] = cluster.bandwidth_bytes_s[pairs].min()
            latency[n, n] = cluster.latency_s[pairs].max()
        fabric = np.where(np.eye(count, dtype=bool), cluster.fabrics, "")
        links: dict[tuple, Link] = {}
        keys = zip(*(of.ravel().tolist() for of in (bandwidth, latency, fabric)), strict=True)
        flat = [links.setdefault(key, Link(*key)) for key in keys]
        return tuple(tuple(flat[a * count : (a + 1) * count]) for a in range(count))

    @cached_property
    def link_kinds(self) -> tuple[np.ndarray, list[Link]]:
        """[N, N] which of the different links, each of them once, is between (or inside) two nodes."""
        kinds: dict[Link, int] = {}
        which = [[kinds.setdefault(link, len(kinds)) for link in row] for row in self.node_links]
        return np.array(which, dtype=int), list(kinds)

    @cached_property
    def shared_links(self) -> SharedLinks:
        """What traffic between nodes shares: links, network cards and uplinks."""
        return SharedLinks(self.cluster)

    @cached_property
    def node_kind(self) -> tuple[int, ...]:
        """Nodes with equal devices and equal links inside share a kind: equal group plans."""
        kinds: dict[tuple[Accelerator, Link], int] = {}
        keys = [(self.node_accelerator[n], self.node_links[n][n]) for n in range(len(self.node_gpus))]
        return tuple(kinds.setdefault(key, len(kinds)) for key in keys)


_WHATEVER_IS_LOST = (
    "targets",
    "_node_members",
    "node_accelerator",
    "node_price",
    "node_links",
    "link_kinds",
    "node_kind",
    "shared_links",
)
"""The cached properties of a problem that do not depend on which GPUs are lost."""

NodeCounts = tuple[tuple[int, int], ...]
"""How many GPUs of which nodes: (node, count) pairs in rising node order."""


@dataclass(frozen=True)
class Group:
    """GPUs that form one replica, and its role."""

    role: str
    counts: NodeCounts

    @property
    def size(self) -> int:
        return sum(count for _, count in self.counts)


@dataclass(frozen=True)
class Solution:
    """A partition of (some of) the GPUs into groups with roles; GPUs in no group stay idle."""

    groups: tuple[Group, ...] = field(default=())

    @cached_property
    def key(self) -> tuple:
        """Equal for solutions that differ in the order of their groups only."""
        return tuple(sorted((g.role, g.counts) for g in self.groups))


def counts_of(counts: dict[int, int]) -> NodeCounts:
    """The GPUs per node of a node -> count mapping, without nodes that have none."""
    return tuple(sorted((node, count) for node, count in counts.items() if count > 0))


def make_problem(
    cluster: str | Path | ClusterSpec,
    model: str | Path | ModelArchitecture,
    workload: str | Path | Workload | None,
    isl: float | None = None,
    osl: float | None = None,
    cost_model: str | Path | CostSource | None = None,
    pipeline: str = "pipelined",
    goal: Goal | None = None,
    links: str = "shared",
    engine: Engine = "any",
    phases: Phases = "disaggregated",
    weights: str | None = None,
    kv: str | None = None,
) -> Problem:
    """A problem from names, files or objects; `weights` and `kv` are formats instead of the model's own.

    Raises
    ------
    InputError : any of them is wrong
    """
    goal = goal or Goal()
    spec = load_cluster(cluster)
    if goal.rents:
        spec = with_offers(spec)
    elif not spec.nodes:
        raise InputError(
            spec.name if isinstance(cluster, ClusterSpec) else str(cluster),
            "nodes",
            "is empty, there are only offers",
            "say what to spend with --budget",
        )
    architecture = in_formats(find_model(model), weights, kv)
    load = load_workload(workload, isl, osl)
    costs = find_cost_model(cost_model).costs(architecture, load.lengths)
    arrays = Cluster.from_spec(spec)
    check_kernels(arrays.accelerators, architecture.weight_type, "--weights" if weights else "--model")
    options: dict[str, Any] = {"pipeline": pipeline, "goal": goal, "links": links, "engine": engine}
    options["phases"] = phases
    return Problem(spec, arrays, architecture, load, costs, **options)
