"""The best parallel plan of one group: tensor degree per stage, layers per stage, largest batch.

HexGen-2, section 3.3 and Appendix A: prefill and decode plans are chosen apart, since they want
different shapes. A colocated replica runs both phases on one shape and one split of the layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cost_model.base import PREFILL_BATCHES_HELD, Phase, StageMemory, TensorGroup
from cost_model.hardware import Link
from cost_model.pipeline import (
    Pace,
    PhaseTimes,
    colocated_pace,
    decode_pace,
    micro_batch,
    prefill_pace,
    under_way,
)
from cost_model.queueing import DecodeQueue, PrefillQueue
from hexgen2.search.layers import balance_layers, fastest_layers
from hexgen2.search.problem import Blocks, Problem
from hexgen2.search.shapes import Shapes

BATCH_SHARES = (1.0, 0.8, 0.6, 0.4, 0.25)
"""Shares of the largest batch tried: a smaller one leaves room for layers on the faster stages."""


@dataclass(frozen=True)
class PlannedStage:
    """`degree` GPUs of `node` hold `layers` layers."""

    node: int
    degree: int
    layers: int


@dataclass(frozen=True)
class GroupPlan:
    """Stages in order, requests held at once, and the pace that follows (see Pace).

    capacity_req_s is what the replica serves within the goal's targets; without any, at full load.
    """

    stages: tuple[PlannedStage, ...]
    batch: int
    capacity_req_s: float
    latency_s: float
    token_s: float = 0.0


@dataclass(frozen=True)
class _Division:
    """Layers of each stage, requests held at once, the pace, and the requests/s within the targets."""

    split: list[int]
    batch: int
    pace: Pace
    req_s: float


def _plan_of(stages: tuple[PlannedStage, ...], division: _Division) -> GroupPlan:
    pace = division.pace
    return GroupPlan(stages, division.batch, division.req_s, pace.latency_s, pace.token_s)


@dataclass(frozen=True, eq=False)
class _StageKind:
    """A tensor group and everything about it that does not depend on the batch."""

    group: TensorGroup
    memory: dict[tuple[Phase, bool, bool], StageMemory]
    layer_s: dict[tuple[Phase, float], float]


@dataclass(frozen=True, eq=False)
class _Pipeline:
    """Stages in order, the largest batch that fits (for prefill: the one to run), and an upper limit on
    the capacity of any split of the layers."""

    role: str
    shape: tuple[tuple[int, int], ...]
    kinds: list[_StageKind]
    hops: list[Link]
    memory: list[StageMemory]
    batch: int
    limit_req_s: float


def _fits(memory: list[StageMemory], batch: int, layers: int) -> bool:
    """True if all layers fit beside `batch` requests with at least one in each stage."""
    limits = [m.max_layers(batch) for m in memory]
    return min(limits) >= 1 and sum(limits) >= layers


class Planner:
    """Best plans, memoised by what they depend on: kinds of nodes, counts, and the links between."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.computed = 0
        self._prefill_batches = dict.fromkeys((problem.costs.prefill_batch(), 1))
        self._shapes = Shapes(problem)
        self._memo: dict[tuple, tuple[list[int], GroupPlan | None]] = {}
        self._planned: dict[tuple[str, Blocks], GroupPlan | None] = {}
        self._stage_kinds: dict[tuple[int, int], _StageKind] = {}
        kinds: dict[Link, int] = {}
        self._link_kind = [[kinds.setdefault(link, len(kinds)) for link in row] for row in problem.node_links]
        pairs = itertools.permutations(range(len(problem.node_gpus)), 2)
        self._one_network = len({self._link_kind[a][b] for a, b in pairs}) <= 1

    def plan(self, role: str, blocks: Blocks) -> GroupPlan | None:
        """The plan of greatest capacity, or None if the model does not fit in the group or no shape meets the
        targets."""
        key = (role, blocks)
        if key not in self._planned:
            self._planned[key] = self._from_memo(role, blocks)
        return self._planned[key]

    def _from_memo(self, role: str, blocks: Blocks) -> GroupPlan | None:
        nodes = [node for node, _ in blocks]
        kinds = tuple((self.problem.node_kind[node], count) for node, count in blocks)
        pairs = () if self._one_network else itertools.combinations(nodes, 2)
        between = tuple(self._link_kind[a][b] for a, b in pairs)
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
        return replace(plan, stages=stages)

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
        """The best of all shapes, the most promising first, until no other can be better."""
        pipelines = [p for p in (self._pipeline(role, shape) for shape in self._shapes.of(blocks)) if p]
        best: GroupPlan | None = None
        for pipeline in sorted(pipelines, key=lambda p: -p.limit_req_s):
            if best and pipeline.limit_req_s <= best.capacity_req_s * (1 + 1e-12):
                break
            plan = self._plan(pipeline)
            if plan and (best is None or plan.capacity_req_s > best.capacity_req_s * (1 + 1e-12)):
                best = plan
        return best

    def plan_shape(self, role: str, shape: Sequence[tuple[int, int]]) -> GroupPlan | None:
        """The best layers and batch for stages (node, degree) in this order, or None if none fits."""
        pipeline = self._pipeline(role, shape)
        return self._plan(pipeline) if pipeline else None

    def quickest_s(self, role: str, blocks: Blocks) -> float:
        """Seconds to the first token, or per output token, of one request alone, at best; infinite if the
        model does not fit. A prompt takes as long as the mean one."""
        semantics, best = self.problem.pipeline, float("inf")
        for pipeline in filter(None, (self._pipeline(role, shape) for shape in self._shapes.of(blocks))):
            held = PREFILL_BATCHES_HELD if role == "prefill" else 1
            limits = [m.max_layers(held) for m in pipeline.memory]
            timing = self._timing(pipeline, "prefill" if role == "prefill" else "decode", 1)
            for split in filter(None, (self._split(timing, limits, by_sum) for by_sum in (False, True))):
                stage_s = timing.stage_s(split)
                if role == "prefill":
                    best = min(best, prefill_pace(semantics, stage_s, timing.hop_s, 1).latency_s)
                else:
                    best = min(best, self._decode_pace(pipeline, split, 1).latency_s)
        return best

    def plan_layers(
        self, role: str, stages: tuple[PlannedStage, ...], batch: int | None = None
    ) -> GroupPlan | None:
        """The plan that keeps these stages, layers included, for `batch` requests or for as many as a plan
        would take; None if that does not fit or misses the targets."""
        pipeline = self._pipeline(role, [(s.node, s.degree) for s in stages])
        if pipeline is None:
            return None
        split = [s.layers for s in stages]
        room = min(m.max_batch(n) for m, n in zip(pipeline.memory, split, strict=True))
        if role == "prefill":
            choices = [batch] if batch else list(self._prefill_batches)
            held = next((b for b in choices if b * PREFILL_BATCHES_HELD <= room), 0)
        else:
            largest = min(self.problem.costs.batch_cap, room)
            held = largest if batch is None else batch if batch <= largest else 0
        if held < 1:
            return None
        if role == "prefill":
            timing = self._timing(pipeline, "prefill", held)
            found: _Division | None = self._prefill_within_targets(timing, split, held)
        else:
            found = next(self._within_targets(pipeline, split, held), None)
        return _plan_of(stages, found) if found and found.req_s > 0 else None

    def _pipeline(self, role: str, shape: Sequence[tuple[int, int]]) -> _Pipeline | None:
        """What the shape says before any layer is placed, or None if the model cannot fit."""
        problem, costs = self.problem, self.problem.costs
        layers, last = problem.model.layers, len(shape) - 1
        if len(shape) > layers:
            return None
        phase: Phase = "prefill" if role == "prefill" else "decode"
        kinds = [self._stage_kind(node, degree) for node, degree in shape]
        hops = [problem.node_links[a][b] for (a, _), (b, _) in itertools.pairwise(shape)]
        memory = [kind.memory[phase, j == 0, j == last] for j, kind in enumerate(kinds)]
        if phase == "prefill":
            batch = next(
                (b for b in self._prefill_batches if _fits(memory, b * PREFILL_BATCHES_HELD, layers)), 0
            )
            running, outputs = float(batch), 1.0
        else:
            batch = self._largest_batch(memory)
            running, outputs = micro_batch(problem.pipeline, batch, len(kinds)), costs.osl
        if batch < 1:
            return None
        pipeline = _Pipeline(role, tuple(shape), kinds, hops, memory, batch, 0.0)
        # All L layers pass every request, so L requests/s is at most the sum of the stages' layers/s.
        timing = self._timing(pipeline, phase, running) if role == "prefill" else self._turn(pipeline, batch)
        rate = sum(running / layer_s for layer_s in timing.layer_s)
        return replace(pipeline, limit_req_s=rate / (layers * outputs))

    def _plan(self, pipeline: _Pipeline) -> GroupPlan | None:
        found = self._prefill(pipeline) if pipeline.role == "prefill" else self._decode(pipeline)
        best = max(found, key=lambda one: one.req_s, default=None)
        if best is None or best.req_s <= 0:
            return None
        stages = tuple(
            PlannedStage(node, degree, n)
            for (node, degree), n in zip(pipeline.shape, best.split, strict=True)
        )
        return _plan_of(stages, best)

    def _prefill(self, pipeline: _Pipeline) -> Iterator[_Division]:
        semantics, targets = self.problem.pipeline, self.problem.targets
        ways = {semantics != "pipelined"} | ({True} if targets.ttft_s is not None else set())
        for batch in targets.prefill_batches(pipeline.batch):
            limits = [m.max_layers(PREFILL_BATCHES_HELD * batch) for m in pipeline.memory]
            timing = self._timing(pipeline, "prefill", batch)
            for split in (self._split(timing, limits, by_sum) for by_sum in sorted(ways)):
                if split is not None:
                    yield self._prefill_within_targets(timing, split, batch)

    def _prefill_within_targets(self, timing: _Timing, split: list[int], batch: int) -> _Division:
        pace = prefill_pace(self.problem.pipeline, timing.stage_s(split), timing.hop_s, batch)
        return _Division(split, batch, pace, self.problem.targets.prefill_req_s(pace, batch))

    def _decode(self, pipeline: _Pipeline) -> list[_Division]:
        """Divisions of a replica that decodes, and prefills too if it is colocated."""
        found = list(self._decode_up_to(pipeline, pipeline.batch))
        within = max((one.batch for one in found), default=0)
        if self.problem.targets.tpot_s is not None and 0 < within < pipeline.batch:
            # The targets leave fewer requests than the memory: the layers are divided anew for those.
            found += self._decode_up_to(pipeline, within)
        return found

    def _decode_up_to(self, pipeline: _Pipeline, most: int) -> Iterator[_Division]:
        """Divisions of the layers for at most so many requests, each with the most that then fit."""
        ways: tuple[bool, ...] = (True,) if self.problem.pipeline == "literal" else (False,)
        if pipeline.role == "colocated" and self.problem.pipeline == "paper_optimistic":
            ways = (False, True)  # Its prefills go by the sum of the stages, its decode steps by the slowest.
        for batch in dict.fromkeys(max(1, int(most * share)) for share in BATCH_SHARES):
            limits = [m.max_layers(batch) for m in pipeline.memory]
            turn = self._turn(pipeline, batch)
            splits = [s for s in (self._split(turn, limits, by_sum) for by_sum in ways) if s]
            for split in splits:
                # The layers chosen may leave room for more requests than they were chosen for.
                room = (m.max_batch(n) for m, n in zip(pipeline.memory, split, strict=True))
                yield from self._within_targets(pipeline, split, min(self.problem.costs.batch_cap, *room))
            # Where memory binds no stage, a smaller batch changes nothing for the better.
            if all(n < limit for split in splits for n, limit in zip(split, limits, strict=True)):
                break

    def _within_targets(self, pipeline: _Pipeline, split: list[int], most: int) -> Iterator[_Division]:
        targets = self.problem.targets
        places = self._decode_queue(pipeline, split, most).places_within(targets.tpot_s)
        batch = places // self._at_once(split)
        if batch:
            pace = self._decode_pace(pipeline, split, batch)
            req_s = targets.decode_req_s(pace, self._decode_queue(pipeline, split, batch))
            yield _Division(split, batch, pace, req_s)

    def prefill_queue(self, plan: GroupPlan) -> PrefillQueue:
        """How a prefill replica with this plan fares under any load."""
        pipeline, split = self._planned_pipeline("prefill", plan)
        timing = self._timing(pipeline, "prefill", plan.batch)
        found = self._prefill_within_targets(timing, split, plan.batch)
        return self.problem.targets.prefill_queue(found.pace, plan.batch)

    def decode_queue(self, plan: GroupPlan) -> DecodeQueue:
        """How a decode replica with this plan fares under any load."""
        pipeline, split = self._planned_pipeline("decode", plan)
        return self._decode_queue(pipeline, split, plan.batch)

    def _planned_pipeline(self, role: str, plan: GroupPlan) -> tuple[_Pipeline, list[int]]:
        pipeline = self._pipeline(role, [(s.node, s.degree) for s in plan.stages])
        assert pipeline is not None, "a plan fits in its own stages"
        return pipeline, [s.layers for s in plan.stages]

    def _decode_queue(self, pipeline: _Pipeline, split: list[int], batch: int) -> DecodeQueue:
        at_once = self._at_once(split)
        return DecodeQueue(
            batch * at_once,
            lambda requests: self._decode_pace(pipeline, split, requests / at_once).latency_s,
            self.problem.costs.osl,
        )

    def _at_once(self, split: list[int]) -> int:
        """Requests under way for each one in the batch."""
        return int(under_way(self.problem.pipeline, 1, len(split)))

    def _decode_pace(self, pipeline: _Pipeline, split: list[int], batch: float) -> Pace:
        semantics, osl = self.problem.pipeline, self.problem.costs.osl
        decode = self._decode_timing(pipeline, batch)
        if pipeline.role == "decode":
            return decode_pace(semantics, decode.stage_s(split), decode.hop_s, batch, osl)
        prompts = self._prompts(batch)
        prefill = self._timing(pipeline, "prefill", prompts)
        return colocated_pace(
            semantics,
            PhaseTimes(prefill.stage_s(split), prefill.hop_s, prompts),
            PhaseTimes(decode.stage_s(split), decode.hop_s, batch),
            osl,
        )

    def _turn(self, pipeline: _Pipeline, batch: int) -> _Timing:
        """What the split of the layers balances: a decode step, and in a colocated replica the prefills
        that fall to one: a micro-batch ends micro / osl requests per step, and as many begin."""
        decode = self._decode_timing(pipeline, batch)
        if pipeline.role == "decode":
            return decode
        prompts = self._prompts(batch)
        micro = micro_batch(self.problem.pipeline, batch, len(pipeline.kinds))
        return decode.plus(
            self._timing(pipeline, "prefill", prompts), micro / (self.problem.costs.osl * prompts)
        )

    def _decode_timing(self, pipeline: _Pipeline, batch: float) -> _Timing:
        return self._timing(
            pipeline, "decode", micro_batch(self.problem.pipeline, batch, len(pipeline.kinds))
        )

    def _prompts(self, batch: float) -> int:
        """Prompts per prefill step of a colocated replica that holds `batch` requests."""
        return int(min(batch, self.problem.costs.prefill_batch()))

    def _largest_batch(self, memory: list[StageMemory]) -> int:
        """Most requests for which the layers still fit, at most the cap; 0 if not even one."""
        layers = self.problem.model.layers
        low, high = 0, self.problem.costs.batch_cap
        if _fits(memory, high, layers):
            return high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if _fits(memory, middle, layers) else (low, middle)
        return low

    def _timing(self, pipeline: _Pipeline, phase: Phase, batch: float) -> _Timing:
        costs, kinds = self.problem.costs, pipeline.kinds
        key = (phase, batch)
        layer_s = []
        for kind in kinds:
            if key not in kind.layer_s:
                kind.layer_s[key] = costs.layer_s(phase, kind.group, batch)
            layer_s.append(kind.layer_s[key])
        last = len(kinds) - 1
        edge_s = [costs.edge_s(phase, kind.group, batch, j == last) for j, kind in enumerate(kinds)]
        return _Timing(layer_s, edge_s, [costs.boundary_s(phase, hop, batch) for hop in pipeline.hops])

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

    def plus(self, other: _Timing, weight: float) -> _Timing:
        """This and `weight` times the other, stage by stage and hop by hop."""
        pairs = ((self.layer_s, other.layer_s), (self.edge_s, other.edge_s), (self.hop_s, other.hop_s))
        return _Timing(*([a + weight * b for a, b in zip(*pair, strict=True)] for pair in pairs))
