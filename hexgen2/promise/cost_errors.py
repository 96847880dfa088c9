"""How far off the figures behind a placement may be, and draws of what they might be instead.

Every error is a mean relative error. Of step times, it is the one that the cost model states for the type of
GPU (docs/accuracy.md); of links, it is stated here, and assumed. A perturbation multiplies the seconds of
each type of GPU and phase, and the bandwidth of each link, by a lognormal factor of median 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from cluster_specs.schema import InterconnectSpec
from cost_model.base import CostModel
from cost_model.hardware import interconnect_link
from cost_model.perturbed import PerturbedCosts, PhaseFactors
from cost_model.portable import exp
from hexgen2.cluster import Cluster, between_nodes
from hexgen2.robustness import CostError

LOG_SD = 1.2533141373155003
"""sqrt(pi / 2): the standard deviation of a normal variable, over the mean of its absolute value."""
COMMON = 0.5
"""The share of the variance of a GPU type's error that both phases have in common."""
INSIDE, INSIDE_ASSUMED, MEASURED, BETWEEN = 0.2, 0.35, 0.1, 0.25
"""Mean relative errors of bandwidths."""
ASSUMPTIONS = (
    "the whole error of a GPU type is common to all stages on such GPUs, whatever their shape; GPU types are "
    "off independently of each other",
    "prefill and decode have half the variance of a GPU type's error in common (their errors on 18 pairs of "
    "models and GPUs correlate by 0.1 where the model is new, by 0.6 where the GPU is)",
    "each link between two nodes is off independently, a network card as much as its node's fastest links "
    "are on average; within nodes, interconnects of one kind are off together",
    "memory, latencies of links and lengths of requests are as given",
)
_STREAM = 15_485_863
"""Far from the seeds of trials and of searches."""

Key = tuple[str, ...]


@dataclass(frozen=True)
class CostErrors:
    """Mean relative errors of the figures of one cluster under one cost model.

    Attributes
    ----------
    gpus : by accelerator, of the seconds of steps
    interconnects : by kind (see kind_of), of the bandwidth within nodes
    network : of the bandwidth of links between nodes, network cards and uplinks
    stated : the same in words
    """

    gpus: Mapping[str, float]
    interconnects: Mapping[str, float]
    network: float
    stated: tuple[CostError, ...] = ()

    @classmethod
    def of(cls, costs: CostModel, cluster: Cluster) -> CostErrors:
        """What is stated of these costs on this cluster, and assumed of its links."""
        gpus, interconnects, stated = {}, {}, []
        for card in cluster.types:
            gpus[card.name] = costs.error(card)
            known = "" if costs.measured(card) else "; not measured on this GPU"
            stated.append(_error(f"steps on {card.name}", gpus[card.name], f"cost model {costs.name}{known}"))
        matrix = cluster.spec.network.measured is not None
        for node in range(len(cluster.node_names)):
            kind = kind_of(cluster, node)
            if kind in interconnects or np.count_nonzero(cluster.node_of == node) < 2:
                continue
            assumed = _is_assumed(cluster, node)
            error = MEASURED if matrix else INSIDE_ASSUMED if assumed else INSIDE
            why = (
                "assumed, for a measured matrix"
                if matrix
                else "assumed: this interconnect was not measured"
                if assumed
                else "the largest of all-reduces on measured GPUs (docs/accuracy.md)"
            )
            interconnects[kind] = error
            stated.append(_error(f"bandwidth of {kind}", error, why))
        network = MEASURED if matrix else BETWEEN
        if len(cluster.node_names) > 1:
            why = "assumed, for a measured matrix" if matrix else "assumed, for figures that nobody measured"
            stated.append(_error("bandwidth of each link between nodes", network, why))
        return cls(gpus, interconnects, network, tuple(stated))

    def times(self, factor: float) -> CostErrors:
        """The same errors, all multiplied."""
        return CostErrors(
            {name: error * factor for name, error in self.gpus.items()},
            {kind: error * factor for kind, error in self.interconnects.items()},
            self.network * factor,
            tuple(one.model_copy(update={"error": one.error * factor}) for one in self.stated),
        )

    def draws(self, cluster: Cluster, seed: int, count: int) -> list[Perturbation]:
        """Perturbations at random, in pairs that are opposite to each other, so that they balance."""
        keys = sorted(_keys(self, cluster))
        rng = np.random.default_rng([_STREAM, seed])
        # Rounded, since the last bits of the C library's functions differ from machine to machine.
        normal = np.round(rng.standard_normal(((count + 1) // 2, len(keys))), 9)
        both = np.stack([normal, -normal], axis=1).reshape(-1, len(keys))[:count]
        return [
            Perturbation(self, dict(zip(keys, (float(z) for z in row), strict=True))) for row in both.tolist()
        ]

    def slower(self, cluster: Cluster, deviations: float) -> Perturbation:
        """All GPUs and links slower by so many standard deviations."""
        shared = {"gpu": deviations / (math.sqrt(COMMON) + math.sqrt(1 - COMMON))}
        return Perturbation(self, {key: shared.get(key[0], -deviations) for key in _keys(self, cluster)})


@dataclass(frozen=True)
class Perturbation:
    """One draw: how many standard deviations each figure is off (0 where it is missing)."""

    errors: CostErrors
    normal: Mapping[Key, float]

    def gpu_factors(self) -> dict[str, PhaseFactors]:
        """What multiplies the seconds of each accelerator."""
        factors = {}
        for name, error in self.errors.gpus.items():
            common = math.sqrt(COMMON) * self._z("gpu", name)
            own = (math.sqrt(1 - COMMON) * self._z("gpu", name, phase) for phase in ("prefill", "decode"))
            factors[name] = PhaseFactors(*(exp(LOG_SD * error * (common + z)) for z in own))
        return factors

    def costs(self, nominal: CostModel) -> CostModel:
        """The perturbed cost model."""
        return PerturbedCosts(nominal, self.gpu_factors())

    def cluster(self, nominal: Cluster) -> Cluster:
        """The cluster with perturbed bandwidths."""
        logs = self._link_logs(nominal)
        factors = np.array([[exp(log) for log in row] for row in logs.tolist()])
        fastest = between_nodes(nominal.bandwidth_bytes_s, nominal.node_of, np.maximum)
        np.fill_diagonal(fastest, 0.0)
        cards = [self._card_factor(nominal, node, fastest, logs) for node in range(len(logs))]
        uplinks = tuple(
            replace(u, bandwidth_bytes_s=u.bandwidth_bytes_s * exp(self._network_log("uplink", u.name)))
            for u in nominal.uplinks
        )
        return replace(
            nominal,
            bandwidth_bytes_s=nominal.bandwidth_bytes_s * factors[np.ix_(nominal.node_of, nominal.node_of)],
            card_bytes_s=nominal.card_bytes_s * np.array(cards),
            uplinks=uplinks,
        )

    def _link_logs(self, cluster: Cluster) -> np.ndarray:
        """[N, N] logarithms of the factors of links between nodes and, on the diagonal, within them."""
        names = cluster.node_names
        logs = np.zeros((len(names), len(names)))
        for a, name in enumerate(names):
            kind = kind_of(cluster, a)
            logs[a, a] = LOG_SD * self.errors.interconnects.get(kind, 0.0) * self._z("inside", kind)
            for b in range(a):
                logs[a, b] = logs[b, a] = self._network_log("link", *sorted((name, names[b])))
        return logs

    def _card_factor(self, cluster: Cluster, node: int, fastest: np.ndarray, logs: np.ndarray) -> float:
        """That of the node's network card: its own if its speed is given, else that of the links that it was
        taken from."""
        if cluster.spec.nodes[node].network_gbit_s is not None:
            return exp(self._network_log("card", cluster.node_names[node]))
        from_links = logs[node][(fastest[node] == fastest[node].max()) & (fastest[node] > 0)].tolist()
        return exp(math.fsum(from_links) / len(from_links)) if from_links else 1.0

    def _network_log(self, *key: str) -> float:
        return LOG_SD * self.errors.network * self._z(*key)

    def _z(self, *key: str) -> float:
        return self.normal.get(key, 0.0)


def kind_of(cluster: Cluster, node: int) -> str:
    """The kind of a node's interconnect in words: equal for nodes whose interconnects are off together."""
    spec, card = cluster.spec.nodes[node], cluster.accelerators[int(np.argmax(cluster.node_of == node))]
    given = isinstance(spec.interconnect, InterconnectSpec)
    return f"the interconnect of {spec.name}" if given else f"{spec.interconnect} between {card.name}"


def _is_assumed(cluster: Cluster, node: int) -> bool:
    """Whether the cluster lists the bandwidth of a node's interconnect as assumed."""
    spec, card = cluster.spec.nodes[node], cluster.accelerators[int(np.argmax(cluster.node_of == node))]
    if isinstance(spec.interconnect, InterconnectSpec):
        return False
    return interconnect_link(spec.interconnect, card)[1] is not None


def _keys(errors: CostErrors, cluster: Cluster) -> Iterator[Key]:
    """Everything that is off on its own."""
    for name in errors.gpus:
        yield from (("gpu", name), ("gpu", name, "prefill"), ("gpu", name, "decode"))
    yield from (("inside", kind) for kind in errors.interconnects)
    names = sorted(cluster.node_names)
    yield from (("link", a, b) for k, a in enumerate(names) for b in names[k + 1 :])
    yield from (("card", node) for node in names)
    yield from (("uplink", uplink.name) for uplink in cluster.uplinks)


def _error(of: str, error: float, source: str) -> CostError:
    return CostError(of=of, error=error, source=source)
