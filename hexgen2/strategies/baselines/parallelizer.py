"""Hetis's Parallelizer: which GPUs hold weights, and how (Hetis, SC 2025, section 4.1).

GPUs of every type are dealt evenly to instances. In an instance each type is a unified pipeline stage; types
leave it, slowest first, as long as the dense modules without them take at most DELTA longer. Then the tensor
and pipeline degrees inside each type are tried. GPUs that hold no weights become attention workers.

Dense costs are seconds per request of the slowest stage: of its prompt and of its part of the decode steps,
without decode attention, by the cost model.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from cost_model.attention import DenseCosts
from cost_model.base import StageMemory, TensorGroup, Work
from cost_model.hardware import NO_LINK, Accelerator, Link
from hexgen2.search.planning.layers import balance_layers
from hexgen2.search.problem import NodeCounts, Problem, counts_of
from hexgen2.search.ties import exceeds

DELTA = 0.05
"""A type leaves if the dense cost grows by at most this share (section 4.1)."""
MOST_SHAPES = 128
"""Up to so many combinations of tensor degrees all are tried; beyond, one type's degree changes at a time."""


@dataclass(frozen=True)
class Pool:
    """An instance's GPUs of one type."""

    accelerator: Accelerator
    gpus: tuple[int, ...]
    counts: NodeCounts

    def __len__(self) -> int:
        return len(self.gpus)


Instance = tuple[Pool, ...]
"""The pools of one serving instance, fastest type first."""


@dataclass(frozen=True)
class PlannedStage:
    """A stage: its GPUs (indices), their node and link, and its layers."""

    gpus: tuple[int, ...]
    group: TensorGroup
    node: int
    layers: int


Shaped = tuple[tuple[PlannedStage, ...], float]
"""Stages, and the dense seconds per request of the slowest."""


@dataclass(frozen=True)
class PrimaryPlan:
    """The primary workers of an instance in stages, and the GPUs that hold no weights."""

    stages: tuple[PlannedStage, ...]
    others: tuple[int, ...]
    dense_s: float


def dealt(problem: Problem, instances: int) -> list[Instance]:
    """The GPUs of each type dealt evenly, in the order of the nodes, to so many instances: each has as many,
    or one more."""
    types: dict[Accelerator, list[int]] = {}
    for node, own_gpus in enumerate(problem.node_gpus):
        types.setdefault(problem.node_accelerator[node], []).extend(own_gpus)
    fastest = sorted(types.items(), key=lambda item: (-item[0].flops_s, item[0].name))
    found = []
    for i in range(instances):
        pools = []
        for accelerator, gpus in fastest:
            count = len(gpus)
            own = tuple(gpus[i * count // instances : (i + 1) * count // instances])
            if own:
                counts = Counter(int(problem.cluster.node_of[gpu]) for gpu in own)
                pools.append(Pool(accelerator, own, counts_of(counts)))
        found.append(tuple(pools))
    return found


class Parallelizer:
    """Plans the instances of one problem; what instances of the same shape have in common is remembered."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.costs = problem, DenseCosts(problem.costs)
        self.evaluations = 0
        self._request_layer_s = cache(self._request_layer_s)  # type: ignore[method-assign]
        self._edge_s = cache(self._edge_s)  # type: ignore[method-assign]
        self._memory = cache(self.costs.stage_memory)

    def instance_counts(self) -> list[int]:
        """The numbers of instances to try: those that divide some type's GPUs evenly, as far as memory holds
        so many copies of the weights."""
        sizes: Counter[Accelerator] = Counter()
        for node, gpus in enumerate(self.problem.node_gpus):
            sizes[self.problem.node_accelerator[node]] += len(gpus)
        room = math.fsum(n * self._alone(card).limit for card, n in sizes.items())
        most = int(room // (self.problem.model.layers * self._weights()))
        return [k for k in range(1, most + 1) if any(n and n % k == 0 for n in sizes.values())]

    def plan(self, instance: Instance) -> PrimaryPlan | None:
        """The primary workers of an instance; None if the model does not fit in it."""
        requests = self._requests(instance)
        if requests <= 0:
            return None
        kept = len(instance)
        while kept > 1:
            limit_s = (1 + DELTA) * self.unified_s(instance[:kept], requests)
            if exceeds(self.unified_s(instance[: kept - 1], requests), limit_s):
                break
            kept -= 1
        # The weights may need more types; or these have no room for a KV cache beside them, and fewer have.
        for count in (*range(kept, len(instance) + 1), *range(kept - 1, 0, -1)):
            spare = count < len(instance) and self.may_offload
            found = self._best_shape(instance[:count], requests, spare)
            if found is not None:
                stages, dense_s = found
                others = tuple(gpu for pool in instance[count:] for gpu in pool.gpus)
                return PrimaryPlan(stages, others, dense_s)
        return None

    @property
    def may_offload(self) -> bool:
        """Whether decode attention has heads that can be divided."""
        return self.problem.model.latent is None

    def unified_s(self, pools: Sequence[Pool], requests: float) -> float:
        """Dense seconds per request of the slowest of the unified stages, whose layers are divided so that
        all take as long: without communication, and as if n GPUs were n times as fast."""
        batch = requests / len(pools)
        rates = (len(p) / self._request_layer_s(self._single(p.accelerator), batch) for p in pools)
        return self.problem.model.layers / math.fsum(rates)

    def _best_shape(self, pools: Sequence[Pool], requests: float, spare: bool) -> Shaped | None:
        """The stages of least dense cost over the tensor degrees of each type; None if the weights fit in
        none.

        Parameters
        ----------
        spare : whether attention workers may hold all of the KV cache
        """
        choices = [list(self._divided(pool)) for pool in pools]

        def value(combination: Sequence[int]) -> Shaped | None:
            shape = itertools.chain.from_iterable(c[i] for c, i in zip(choices, combination, strict=True))
            return self._balanced(list(shape), requests, spare)

        if math.prod(map(len, choices)) <= MOST_SHAPES:
            best = None
            for combination in itertools.product(*(range(len(c)) for c in choices)):
                best = _better(best, value(combination))
            return best
        starts = [[0] * len(choices), [len(c) - 1 for c in choices]]
        return functools.reduce(_better, (self._descent(choices, value, start) for start in starts))

    @staticmethod
    def _descent(
        choices: Sequence[Sequence[Any]], value: Callable[[Sequence[int]], Shaped | None], at: list[int]
    ) -> Shaped | None:
        """The best shape from this start by changing the degree of one type at a time."""
        best, improved = value(at), True
        while improved:
            improved = False
            for i, own in enumerate(choices):
                for other in range(len(own)):
                    tried = [*at[:i], other, *at[i + 1 :]]
                    found = value(tried) if other != at[i] else None
                    if found is not best and _better(best, found) is found and found is not None:
                        at, best, improved = tried, found, True
        return best

    def _divided(self, pool: Pool) -> Iterator[list[tuple[int, tuple[int, ...]]]]:
        """The ways to divide a pool into equal tensor-parallel groups inside nodes, largest first: the node
        and GPUs of each."""
        by_node = [
            (node, [g for g in pool.gpus if self.problem.cluster.node_of[g] == node])
            for node, _ in pool.counts
        ]
        widest = min(count for _, count in pool.counts)
        for degree in reversed(self.problem.model.tensor_degrees(widest)):
            if all(count % degree == 0 for _, count in pool.counts):
                yield [
                    (node, tuple(gpus[i : i + degree]))
                    for node, gpus in by_node
                    for i in range(0, len(gpus), degree)
                ]

    def _balanced(
        self, shape: Sequence[tuple[int, tuple[int, ...]]], requests: float, spare: bool
    ) -> Shaped | None:
        """The layers of these stages that make the slowest fastest, and its dense seconds per request."""
        self.evaluations += 1
        problem, last = self.problem, len(shape) - 1
        batch = requests / len(shape)
        groups = [
            TensorGroup(
                problem.node_accelerator[node],
                len(gpus),
                problem.node_links[node][node] if len(gpus) > 1 else NO_LINK,
            )
            for node, gpus in shape
        ]
        layer_s = [self._request_layer_s(group, batch) for group in groups]
        edge_s = [self._edge_s(group, batch, j == last) for j, group in enumerate(groups)]
        limits = [
            self._memory("decode", group, j == 0, j == last).max_layers(0 if spare else 1)
            for j, group in enumerate(groups)
        ]
        split = balance_layers(problem.model.layers, layer_s, edge_s, limits)
        if split is None:
            return None
        nodes = [node for node, _ in shape]
        hops = (self._hop_s(problem.node_links[a][b], batch) for a, b in itertools.pairwise(nodes))
        stages_s = (a * n + e for a, n, e in zip(layer_s, split, edge_s, strict=True))
        planned = tuple(
            PlannedStage(gpus, group, node, layers)
            for (node, gpus), group, layers in zip(shape, groups, split, strict=True)
        )
        return planned, max(*stages_s, *hops, 0.0)

    def _request_layer_s(self, group: TensorGroup, batch: float) -> float:
        """Dense seconds of one layer for a request: its part of a prefill step, and of its decode steps in a
        batch of so many."""
        costs, batch = self.costs, max(1.0, batch)
        prompts = costs.prefill_batch()
        decode_s = costs.layer_work_s(group, Work(0.0, 0.0, batch, 0.0, batch))
        return costs.layer_s("prefill", group, prompts) / prompts + costs.osl * decode_s / batch

    def _edge_s(self, group: TensorGroup, batch: float, last: bool) -> float:
        """Seconds of a stage outside its layers for a request."""
        costs, batch = self.costs, max(1.0, batch)
        prompts = costs.prefill_batch()
        first_s = costs.edge_work_s(group, max(1.0, prompts), last) / prompts
        return first_s + costs.osl * costs.edge_work_s(group, batch, last) / batch

    def _hop_s(self, link: Link, batch: float) -> float:
        """Seconds of a hop for a request."""
        costs, batch = self.costs, max(1.0, batch)
        prompts = costs.prefill_batch()
        first_s = costs.hop_s("prefill", link, prompts) / prompts
        return first_s + costs.osl * costs.hop_s("decode", link, batch) / batch

    def _requests(self, instance: Instance) -> float:
        """Requests under way that the memory of an instance holds beside one copy of the weights, at most the
        batch cap."""
        layers = self.problem.model.layers
        room = math.fsum(len(p) * self._alone(p.accelerator).limit for p in instance)
        each = layers * self._alone(instance[0].accelerator).per_layer_request
        return min(float(self.costs.batch_cap), (room - layers * self._weights()) / each)

    def _weights(self) -> float:
        """Bytes of a layer's weights."""
        return self._alone(self.problem.node_accelerator[0]).per_layer

    def _alone(self, accelerator: Accelerator) -> StageMemory:
        return self._memory("decode", self._single(accelerator), True, True)

    @staticmethod
    def _single(accelerator: Accelerator) -> TensorGroup:
        return TensorGroup(accelerator, 1, NO_LINK)


def _better(one: Shaped | None, other: Shaped | None) -> Shaped | None:
    """The shape of less dense cost, the first if they tie."""
    if one is None or (other is not None and exceeds(one[1], other[1])):
        return other
    return one
