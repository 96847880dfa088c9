"""The best parallel plan of one group: tensor degree per stage, layers per stage, largest batch.

HexGen-2, section 3.3 and Appendix A: prefill and decode plans are chosen apart, since they want
different shapes. Tensor-parallel groups stay inside a node; pipelines cross nodes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from cost_model.base import Phase, StageMemory, TensorGroup
from cost_model.hardware import Link
from cost_model.pipeline import Pace, decode_pace, micro_batch, prefill_pace
from hexgen2.search.layers import balance_layers, fastest_layers
from hexgen2.search.problem import Blocks, Problem

MAX_SHAPES = 64
"""Most combinations of tensor degrees tried per group; beyond it every block takes one degree."""

BATCH_SHARES = (1.0, 0.85, 0.7, 0.55, 0.4, 0.25)
"""Shares of the largest batch tried: a smaller one leaves room for layers on the faster stages."""

PREFILL_BATCHES_HELD = 2
"""A prefill replica holds the KV cache of the batch it computes and of the one it sends."""


@dataclass(frozen=True)
class PlannedStage:
    """`degree` GPUs of `node` hold `layers` layers."""

    node: int
    degree: int
    layers: int


@dataclass(frozen=True)
class GroupPlan:
    """Stages in order, requests held at once, and the pace that follows."""

    stages: tuple[PlannedStage, ...]
    batch: int
    capacity_req_s: float
    latency_s: float


@lru_cache(maxsize=4096)
def partitions(count: int, degrees: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """All multisets of `degrees` that sum to `count`, largest degree first."""
    if count == 0:
        return ((),)
    found = []
    for degree in sorted((d for d in degrees if d <= count), reverse=True):
        smaller = tuple(d for d in degrees if d <= degree)
        found += [(degree, *rest) for rest in partitions(count - degree, smaller)]
    return tuple(found)


@dataclass(frozen=True, eq=False)
class _StageKind:
    """A tensor group and everything about it that does not depend on the batch."""

    group: TensorGroup
    memory: dict[tuple[Phase, bool, bool], StageMemory]
    layer_s: dict[tuple[Phase, float], float]


def _even(choices: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Of a block's partitions, those of one degree, or of one degree and its remainder's largest."""
    return tuple(p for p in choices if len(set(p[:-1])) <= 1)


class Planner:
    """Best plans, memoised by what they depend on: kinds of nodes, counts, and the links between."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.computed = 0
        largest = max(len(gpus) for gpus in problem.node_gpus)
        self._degrees = tuple(problem.model.tensor_degrees(largest))
        self._memo: dict[tuple, tuple[list[int], GroupPlan | None]] = {}
        self._planned: dict[tuple[str, Blocks], GroupPlan | None] = {}
        self._stage_kinds: dict[tuple[int, int], _StageKind] = {}
        kinds: dict[Link, int] = {}
        self._link_kind = [[kinds.setdefault(link, len(kinds)) for link in row] for row in problem.node_links]

    def plan(self, role: str, blocks: Blocks) -> GroupPlan | None:
        """The plan of greatest capacity, or None if the model does not fit in the group."""
        key = (role, blocks)
        if key not in self._planned:
            self._planned[key] = self._from_memo(role, blocks)
        return self._planned[key]

    def _from_memo(self, role: str, blocks: Blocks) -> GroupPlan | None:
        nodes = [node for node, _ in blocks]
        kinds = tuple((self.problem.node_kind[node], count) for node, count in blocks)
        between = tuple(self._link_kind[a][b] for a, b in itertools.combinations(nodes, 2))
        key = (role, kinds, between)
        if key not in self._memo:
            self.computed += 1
            self._memo[key] = nodes, self._best(role, blocks)
        planned_on, plan = self._memo[key]
        if plan is None or planned_on == nodes:
            return plan
        # Planned for like nodes: the stages move over, block by block.
        at = dict(zip(planned_on, nodes, strict=True))
        stages = tuple(PlannedStage(at[s.node], s.degree, s.layers) for s in plan.stages)
        return GroupPlan(stages, plan.batch, plan.capacity_req_s, plan.latency_s)

    def _stage_kind(self, node: int, degree: int) -> _StageKind:
        key = (self.problem.node_kind[node], degree)
        if key not in self._stage_kinds:
            group = TensorGroup(
                self.problem.node_accelerator[node], degree, self.problem.node_links[node][node]
            )
            ends = itertools.product(("prefill", "decode"), (True, False), (True, False))
            memory = {end: self.problem.costs.stage_memory(end[0], group, *end[1:]) for end in ends}  # type: ignore[arg-type]
            self._stage_kinds[key] = _StageKind(group, memory, {})  # type: ignore[arg-type]
        return self._stage_kinds[key]

    def _best(self, role: str, blocks: Blocks) -> GroupPlan | None:
        best: GroupPlan | None = None
        for shape in self._shapes(self._along_fast_links(blocks)):
            plan = self.plan_shape(role, shape)
            if plan and (best is None or plan.capacity_req_s > best.capacity_req_s * (1 + 1e-12)):
                best = plan
        return best

    def _along_fast_links(self, blocks: Blocks) -> Blocks:
        """The nodes in the order whose hops take least time (exact up to 6 nodes, else nearest next)."""
        links = self.problem.node_links

        def cost(path: Sequence[tuple[int, int]]) -> float:
            return sum(1 / links[a][b].bandwidth_bytes_s for (a, _), (b, _) in itertools.pairwise(path))

        if len(blocks) <= 2:
            return blocks
        if len(blocks) <= 6:
            return min(itertools.permutations(blocks), key=cost)
        path, rest = [blocks[0]], list(blocks[1:])
        while rest:
            here = path[-1][0]
            path.append(
                rest.pop(rest.index(min(rest, key=lambda b: 1 / links[here][b[0]].bandwidth_bytes_s)))
            )
        return tuple(path)

    def _shapes(self, blocks: Blocks) -> Iterator[list[tuple[int, int]]]:
        """Stage lists (node, degree): every combination of the blocks' partitions, or of their even ones
        where that would be too many."""
        choices = [partitions(count, self._degrees) for _, count in blocks]
        if math.prod(len(c) for c in choices) > MAX_SHAPES:
            choices = [_even(c) for c in choices]
        if math.prod(len(c) for c in choices) > MAX_SHAPES:
            choices = [c if len(c) == 1 else (c[0], c[-1]) for c in choices]
        for combination in itertools.islice(itertools.product(*choices), 4 * MAX_SHAPES):
            yield [
                (node, degree)
                for (node, _), parts in zip(blocks, combination, strict=True)
                for degree in parts
            ]

    def plan_shape(self, role: str, shape: Sequence[tuple[int, int]]) -> GroupPlan | None:
        """The best layers and batch for stages (node, degree) in this order, or None if none fits."""
        problem = self.problem
        if len(shape) > problem.model.layers:
            return None
        kinds = [self._stage_kind(node, degree) for node, degree in shape]
        hops = [problem.node_links[a][b] for (a, _), (b, _) in itertools.pairwise(shape)]
        phase: Phase = "prefill" if role == "prefill" else "decode"
        last = len(kinds) - 1
        memory = [kind.memory[phase, j == 0, j == last] for j, kind in enumerate(kinds)]
        if phase == "prefill":
            found = self._prefill(kinds, hops, memory)
        else:
            found = self._decode(kinds, hops, memory)
        if found is None:
            return None
        split, batch, pace = found
        stages = tuple(PlannedStage(node, degree, n) for (node, degree), n in zip(shape, split, strict=True))
        return GroupPlan(stages, batch, pace.capacity_req_s, pace.latency_s)

    def _prefill(
        self, kinds: list[_StageKind], hops: list[Link], memory: list[StageMemory]
    ) -> tuple[list[int], int, Pace] | None:
        costs, semantics = self.problem.costs, self.problem.pipeline
        batch = costs.prefill_batch()
        for size in (batch, 1) if batch > 1 else (1,):
            limits = [m.max_layers(PREFILL_BATCHES_HELD * size) for m in memory]
            timing = self._timing("prefill", kinds, hops, size)
            split = self._split(timing, limits, by_sum=semantics != "pipelined")
            if split:
                return split, size, prefill_pace(semantics, timing.stage_s(split), timing.hop_s, size)
        return None

    def _decode(
        self, kinds: list[_StageKind], hops: list[Link], memory: list[StageMemory]
    ) -> tuple[list[int], int, Pace] | None:
        costs, semantics = self.problem.costs, self.problem.pipeline
        largest = self._largest_batch(memory)
        best: tuple[list[int], int, Pace] | None = None
        tried = -1
        for share in BATCH_SHARES:
            batch = int(largest * share)
            if batch < 1 or batch == tried:
                break
            tried = batch
            timing = self._timing("decode", kinds, hops, micro_batch(semantics, batch, len(kinds)))
            free = [costs.model.layers] * len(kinds)
            limits = [m.max_layers(batch) for m in memory]
            split = self._split(timing, limits, by_sum=semantics == "literal")
            if split is None:
                continue
            # The layers chosen may leave room for more requests than they were chosen for.
            grown = min(costs.batch_cap, *(m.max_batch(n) for m, n in zip(memory, split, strict=True)))
            unconstrained = split == self._split(timing, free, by_sum=semantics == "literal")
            timing = self._timing("decode", kinds, hops, micro_batch(semantics, grown, len(kinds)))
            pace = decode_pace(semantics, timing.stage_s(split), timing.hop_s, grown, costs.osl)
            if best is None or pace.capacity_req_s > best[2].capacity_req_s:
                best = (split, grown, pace)
            if unconstrained:
                break
        return best

    def _largest_batch(self, memory: list[StageMemory]) -> int:
        """Most requests for which the layers still fit, at most the cap; 0 if not even one."""
        layers = self.problem.model.layers

        def fits(batch: int) -> bool:
            limits = [m.max_layers(batch) for m in memory]
            return min(limits) >= 1 and sum(limits) >= layers

        low, high = 0, self.problem.costs.batch_cap
        if fits(high):
            return high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _timing(self, phase: Phase, kinds: list[_StageKind], hops: list[Link], batch: float) -> _Timing:
        costs, last = self.problem.costs, len(kinds) - 1
        key = (phase, batch)
        layer_s = []
        for kind in kinds:
            if key not in kind.layer_s:
                kind.layer_s[key] = costs.layer_s(phase, kind.group, batch)
            layer_s.append(kind.layer_s[key])
        edge_s = [costs.edge_s(phase, kind.group, batch, j == last) for j, kind in enumerate(kinds)]
        return _Timing(layer_s, edge_s, [costs.boundary_s(phase, hop, batch) for hop in hops])

    def _split(self, timing: _Timing, limits: list[int], by_sum: bool) -> list[int] | None:
        layers = self.problem.model.layers
        if by_sum:
            return fastest_layers(layers, timing.layer_s, limits)
        return balance_layers(layers, timing.layer_s, timing.edge_s, limits)


@dataclass(frozen=True)
class _Timing:
    """Seconds per layer and per stage of each stage, and of each hop between stages."""

    layer_s: list[float]
    edge_s: list[float]
    hop_s: list[float]

    def stage_s(self, split: list[int]) -> list[float]:
        return [a * n + e for a, n, e in zip(self.layer_s, split, self.edge_s, strict=True)]
