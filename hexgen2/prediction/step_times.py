"""The times of the steps of one replica, by the cost model.

A step passes through the pipeline stages one after the other, and up to one step per stage (a micro-batch) is
in flight. Decode steps go round in turns. A turn takes as long as one micro-batch through all stages, or as
all micro-batches on the busiest stage or hop, whichever is longer (the job and machine circuits of a cyclic
flow shop; see Baccelli and others, Synchronization and Linearity, 1992, section 2.3).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np

from cost_model.base import CostModel, Work
from cost_model.hardware import Link
from cost_model.pipeline import PipelineSemantics
from hexgen2.cluster import Cluster
from hexgen2.placement import Replica

Line = tuple[float, float]
"""Seconds of a turn as a linear function of the total context tokens: (constant, slope)."""

_FAR = 1e6
_KEPT_STEPS = 1 << 13


class StepTimes:
    """The step times of one replica.

    Parameters
    ----------
    semantics : how the times of pipeline stages combine (see cost_model/pipeline.py)

    Attributes
    ----------
    in_flight : steps that run at the same time
    """

    def __init__(
        self, replica: Replica, cluster: Cluster, costs: CostModel, semantics: PipelineSemantics
    ) -> None:
        members = [np.array([cluster.index(gpu) for gpu in stage.gpus]) for stage in replica.stages]
        self.layers = [stage.layer_count for stage in replica.stages]
        self.groups = [
            stage.tensor_group(cluster.types[int(cluster.type_of[own[0]])], _slowest(cluster, own, own))
            for stage, own in zip(replica.stages, members, strict=True)
        ]
        # Equal tensor-parallel groups take equal times per layer: each kind is timed once.
        self._kinds = list(dict.fromkeys(self.groups))
        self._kind_of = [self._kinds.index(group) for group in self.groups]
        self.hops = [_slowest(cluster, a, b) for a, b in itertools.pairwise(members)]
        self.costs, self.semantics, self.stages = costs, semantics, len(members)
        self.in_flight = replica.engine.steps_in_flight(semantics, self.stages)
        decodes = 1 if semantics == "literal" else self.stages
        self._micro_batches = replica.engine.in_flight or decodes
        self._edges_s: dict[float, list[float]] = {}
        self._turns: dict[int, tuple[Line, ...]] = {}
        # Many steps are equal but for their context: requests of a workload have few lengths, and chunks of
        # long prompts one size.
        self._without_context = lru_cache(_KEPT_STEPS)(self._step)
        self._context_of = lru_cache(_KEPT_STEPS)(self._context_s)

    def step(self, work: Work) -> tuple[Sequence[float], Sequence[float]]:
        """Seconds of each stage and of each hop."""
        stage_s, hop_s = self._without_context(work._replace(context=0.0))
        if work.context:
            context_s = self._context_of(work.decodes) if self.costs.tiled else self._alike_context_s
            stage_s = [a + b * work.context for a, b in zip(stage_s, context_s, strict=True)]
        return stage_s, hop_s

    def _step(self, work: Work) -> tuple[Sequence[float], Sequence[float]]:
        costs, last = self.costs, self.stages - 1
        layer_s = [costs.layer_work_s(group, work) for group in self._kinds]
        edges_s = self._edges_s.get(work.sampled)
        if edges_s is None:
            edges_s = self._edges_s[work.sampled] = [
                costs.edge_work_s(group, work.sampled, j == last) for j, group in enumerate(self.groups)
            ]
        stage_s = [
            layers * layer_s[kind] + edge_s
            for layers, kind, edge_s in zip(self.layers, self._kind_of, edges_s, strict=True)
        ]
        return stage_s, [self.costs.hop_work_s(hop, work.tokens) for hop in self.hops]

    def turn_s(self, works: Sequence[Work]) -> float:
        """Seconds until each of these micro-batches (at most `in_flight`) has passed through all stages."""
        if len(works) == 1:
            stage_s, hop_s = self.step(works[0])
            return math.fsum((*stage_s, *hop_s))
        steps = [self.step(work) for work in works]
        walk = max(math.fsum((*stage_s, *hop_s)) for stage_s, hop_s in steps)
        parts = ([*stage_s, *hop_s] for stage_s, hop_s in steps)
        return max(walk, *map(math.fsum, zip(*parts, strict=True)))

    def decode_turn(self, requests: int) -> tuple[Line, ...]:
        """Seconds until each of `requests` requests has one more token: the maximum of these lines.

        Only the total context matters, since the micro-batches are of one size.
        """
        found = self._turns.get(requests)
        if found is None:
            found = self._turns[requests] = self._decode_turn(requests)
        return found

    def _decode_turn(self, requests: int) -> tuple[Line, ...]:
        turns = min(self._micro_batches, requests)
        size = requests / turns
        stage_s, hop_s = self.step(Work(0.0, 0.0, size, 0.0, size))
        context_s = self._context_of(size) if self.costs.tiled else self._alike_context_s
        walk = math.fsum((*stage_s, *hop_s)), math.fsum(context_s) / turns
        stages = ((turns * a, b) for a, b in zip(stage_s, context_s, strict=True))
        return _upper([walk, *stages, *((turns * a, 0.0) for a in hop_s)])

    @cached_property
    def _alike_context_s(self) -> list[float]:
        """Seconds per context token in each stage where the number of decodes makes no difference."""
        return self._context_s(1.0)

    def _context_s(self, decodes: float) -> list[float]:
        """Seconds per context token in each stage, in steps of so many decodes: reading and attending are
        proportional to the context."""
        none, far = (self._step(Work(0.0, 0.0, decodes, context, decodes))[0] for context in (0.0, _FAR))
        return [(b - a) / _FAR for a, b in zip(none, far, strict=True)]


def _slowest(cluster: Cluster, left: np.ndarray, right: np.ndarray) -> Link:
    """The slowest link between two sets of devices."""
    pairs, nodes = np.ix_(left, right), {*cluster.node_of[left].tolist(), *cluster.node_of[right].tolist()}
    bandwidth, latency = cluster.bandwidth_bytes_s[pairs].min(), cluster.latency_s[pairs].max()
    return Link(float(bandwidth), float(latency), cluster.fabrics[nodes.pop()] if len(nodes) == 1 else "")


def _upper(lines: list[Line]) -> tuple[Line, ...]:
    """The lines that may be the maximum somewhere from 0 on, highest value at 0 first."""
    kept: list[Line] = []
    for line in sorted(set(lines), reverse=True):
        if not kept or line[1] > max(slope for _, slope in kept):
            kept.append(line)
    return tuple(kept)
