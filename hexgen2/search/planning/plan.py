"""The best parallel plan of one group: tensor degree per stage, layers per stage, largest batch.

HexGen-2, section 3.3 and Appendix A: prefill and decode replicas are planned separately, since they want
different shapes. A colocated replica runs both phases with the same shape and the same layers per stage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cost_model.hardware import Link
from cost_model.pipeline import (
    Pace,
    PhaseTimes,
    mixed_period_s,
    outgoing_prompts,
    prefill_batches_held,
    prefill_pace,
    prompt_s,
    prompts_held,
    steps_to_fill,
)
from cost_model.queueing import DecodeQueue, PrefillQueue
from hexgen2.region import Point, Region
from hexgen2.replica import EngineSettings
from hexgen2.search.planning.classes import node_classes, widest_span
from hexgen2.search.planning.pipelines import Pipeline, Pipelines, Timing
from hexgen2.search.planning.prefill_front import PrefillFront
from hexgen2.search.planning.shapes import Shapes, StageShape, vllm_runs, with_experts_divided
from hexgen2.search.problem import NodeCounts, Problem
from hexgen2.search.ties import exceeds, greatest, greatest_first

BATCH_SHARES = (1.0, 0.8, 0.6, 0.4, 0.25)
"""The batches tried, as shares of the largest: a smaller one leaves room for layers on faster stages."""
PREFILL_AHEAD = 2.0
"""Replicas that prefill are chosen for that, and taken to be so many times as fast at it as those that
decode. An assumption; benchmarks/search/planned_throughput.py shows what it does to planned requests/s."""
SMALLEST_STEP = 256
"""Tokens of the smallest prefill step tried under a target for the first token."""
SOON = 0.3
"""If a prompt takes less than this part of the target for the first token, no quicker division is tried."""
SHARES = (0.15, 0.3, 0.5, 0.7, 0.85)
"""Shares of mixed steps at which a mixed replica's region is looked at."""
SLOW_PLAN = 3
"""To plan a colocated replica within a target per output token takes as long as so many other plans."""
WORSE = 0.95
"""If layers chosen for a smaller batch serve less than this share of what others do, smaller ones do, too."""
LESS = 1 - 1e-6
"""Rates that differ by less may be ties, and are compared with care (see ties.py)."""
DEFAULT_ENGINE = EngineSettings()
_EXACT = 1 - 1e-9
"""So that a product that should be whole is not rounded up."""


class PlannedStage(NamedTuple):
    """`degree` GPUs of `node` hold `layers` layers; the other degrees are those of TensorGroup."""

    node: int
    degree: int
    layers: int
    attention_dp: int = 1
    expert_parallel: int = 1

    @property
    def shape(self) -> StageShape:
        """The stage without its layers."""
        return StageShape(self.node, self.degree, self.attention_dp, self.expert_parallel)


@dataclass(frozen=True)
class GroupPlan:
    """A group's stages in order, the requests that it holds at once, and its pace (see Pace).

    batch : of a prefill replica, the mean prompts in a step
    capacity_req_s : what the replica serves within the goal's targets, or at full load if there are none
    engine : how its engine fills the steps
    """

    stages: tuple[PlannedStage, ...]
    batch: float
    capacity_req_s: float
    latency_s: float
    token_s: float = 0.0
    engine: EngineSettings = DEFAULT_ENGINE


@dataclass(frozen=True)
class _Division:
    """A division of the layers over the stages, with the batch, the pace, the requests/s within the targets
    and the engine's settings."""

    split: list[int]
    batch: float
    pace: Pace
    req_s: float
    engine: EngineSettings


def _plan_of(stages: tuple[PlannedStage, ...], division: _Division) -> GroupPlan:
    """The plan of these stages with this division."""
    pace = division.pace
    return GroupPlan(stages, division.batch, division.req_s, pace.latency_s, pace.token_s, division.engine)


def _stages(pipeline: Pipeline, split: Sequence[int]) -> tuple[PlannedStage, ...]:
    """The stages of a pipeline with so many layers each."""
    return tuple(
        PlannedStage(node, degree, n, *degrees)
        for (node, degree, *degrees), n in zip(pipeline.shape, split, strict=True)
    )


class Planner:
    """Finds the best plan of each group; remembered by kinds of nodes, counts, and the links in between.

    Parameters
    ----------
    alike : of the same problem with another goal, to save time

    Attributes
    ----------
    classes : classes of interchangeable nodes
    span : the most nodes that a replica spans
    computed : how many plans were made, rather than remembered; one that takes longer counts as several
    """

    def __init__(self, problem: Problem, alike: Planner | None = None) -> None:
        self.problem = problem
        self.classes = node_classes(problem)
        # Tight targets may need many GPUs for few requests. Only the bound by rates covers such replicas.
        self.span = len(problem.node_gpus) if problem.targets.given else widest_span(problem)
        self.computed = 0
        self._pipelines: Pipelines = alike._pipelines if alike else Pipelines(problem)
        self._shapes = Shapes(problem)
        self._memo: dict[tuple, tuple[list[int], GroupPlan | None]] = {}
        # One goal's targets rule out most divisions unseen; those that several goals ask for are kept.
        self._several = alike is not None and problem.targets.ttft_s is not None
        self._fronts: dict[tuple, tuple[list[int], PrefillFront[tuple[Pipeline, _Division]]]] = (
            alike._fronts if alike else {}
        )
        self._made: dict[tuple[str, NodeCounts], list[Pipeline]] = alike._made if alike else {}
        self._planned: dict[tuple[str, NodeCounts], GroupPlan | None] = {}
        self._regions: dict[tuple, Region] = {}
        self._engines: dict[tuple[int, int], EngineSettings] = {}
        self._limits: dict[NodeCounts, Region | None] = {}
        self._limits_by_kind: dict[tuple, Region | None] = {}
        kinds: dict[Link, int] = {}
        self._link_kind = [[kinds.setdefault(link, len(kinds)) for link in row] for row in problem.node_links]
        pairs = itertools.permutations(range(len(problem.node_gpus)), 2)
        self._one_network = len({self._link_kind[a][b] for a, b in pairs}) <= 1

    def plan(self, role: str, counts: NodeCounts) -> GroupPlan | None:
        """The plan with the greatest capacity; None if the model does not fit in the group, the group spans
        too many nodes, or no shape meets the targets."""
        if len(counts) > self.span:
            return None
        key = (role, counts)
        if key not in self._planned:
            self._planned[key] = self._from_memo(role, counts)
        return self._planned[key]

    def _from_memo(self, role: str, counts: NodeCounts) -> GroupPlan | None:
        """The plan of a group: that of a group of the same kinds of nodes and links, if one was made."""
        counts, nodes, alike = self._by_kind(counts)
        key = (role, *alike)
        if key not in self._memo:
            slow = role == "colocated" and self.problem.targets.tpot_s is not None
            self.computed += SLOW_PLAN if slow else 1
            if role == "prefill" and self._several:
                if key not in self._fronts:
                    self._fronts[key] = nodes, self._front(counts)
                made_on, front = self._fronts[key]
                self._memo[key] = made_on, self._best_of(front)
            else:
                self._memo[key] = nodes, self._best(role, counts)
        planned_on, plan = self._memo[key]
        if plan is None or planned_on == nodes:
            return plan
        # Planned for equal nodes: each stage moves to the node that corresponds.
        at = dict(zip(planned_on, nodes, strict=True))
        stages = tuple(s._replace(node=at[s.node]) for s in plan.stages)
        return replace(plan, stages=stages)

    def _by_kind(self, counts: NodeCounts) -> tuple[NodeCounts, list[int], tuple]:
        """The group and its nodes sorted by kind, so that groups of the same kinds share a plan, whichever
        nodes come first; and a key that groups of the same kinds of nodes and links have in common."""
        counts = tuple(sorted(counts, key=lambda part: (self.problem.node_kind[part[0]], -part[1])))
        nodes = [node for node, _ in counts]
        kinds = tuple((self.problem.node_kind[node], count) for node, count in counts)
        pairs = () if self._one_network else itertools.combinations(nodes, 2)
        return counts, nodes, (kinds, tuple(self._link_kind[a][b] for a, b in pairs))

    def _shapes_of(self, role: str, counts: NodeCounts) -> Iterator[list[StageShape]]:
        """The shapes that the engine can run."""
        divided = (with_experts_divided(self.problem, shape) for shape in self._shapes.of(counts))
        shapes = itertools.chain.from_iterable(divided)
        if self.problem.engine == "vllm":
            return (shape for shape in shapes if vllm_runs(role, shape))
        return shapes

    def _pipelines_of(self, role: str, counts: NodeCounts) -> list[Pipeline]:
        """The pipelines of a group in which the model fits, the most promising first."""
        if (role, counts) in self._made:
            return self._made[role, counts]
        pipelines = (self._pipelines.of(role, shape) for shape in self._shapes_of(role, counts))
        found = greatest_first((p for p in pipelines if p), lambda p: p.limit_req_s)
        if self._several and role != "prefill":
            self._made[role, counts] = found
        return found

    def _best(self, role: str, counts: NodeCounts) -> GroupPlan | None:
        """The best plan over all shapes: the most promising first, until no other can be better."""
        best: GroupPlan | None = None
        for pipeline in self._pipelines_of(role, counts):
            if best and not exceeds(pipeline.limit_req_s, best.capacity_req_s):
                break
            plan = self._plan(pipeline, best.capacity_req_s * LESS if best else 0.0)
            if plan and (best is None or exceeds(plan.capacity_req_s, best.capacity_req_s)):
                best = plan
        return best

    def _front(self, counts: NodeCounts) -> PrefillFront[tuple[Pipeline, _Division]]:
        """The divisions of a prefill replica that may be best under some targets, over all shapes."""
        targets, semantics = self.problem.targets, self.problem.pipeline
        smallest = SMALLEST_STEP / self.problem.costs.isl
        front: PrefillFront[tuple[Pipeline, _Division]] = PrefillFront()
        for pipeline in self._pipelines_of("prefill", counts):
            for batch in targets.prefill_batches(pipeline.batch, smallest):
                timing, limits = self._prefill_step(pipeline, batch)
                quick = self._pipelines.split(timing, limits, True)
                if quick is None:
                    continue
                soonest = self._prefill_division(pipeline, timing, quick, batch, None)
                # At most as good as this: no other division is quicker, nor has it a shorter slowest stage
                # than if layers could be cut up.
                most = replace(soonest.pace, capacity_req_s=timing.most_steps_s(sum(quick)) * batch)
                if front.dominates(targets.prefill_queue(most, batch)):
                    continue
                front.offer(targets.prefill_queue(soonest.pace, batch), (pipeline, soonest))
                even = None if semantics != "pipelined" else self._pipelines.split(timing, limits, False)
                if even and even != quick:
                    division = self._prefill_division(pipeline, timing, even, batch, None)
                    front.offer(targets.prefill_queue(division.pace, batch), (pipeline, division))
        return front

    def _best_of(self, front: PrefillFront[tuple[Pipeline, _Division]]) -> GroupPlan | None:
        """The plan of a front that serves most within this goal's targets; None if none meets them."""
        targets = self.problem.targets
        assert targets.ttft_s is not None
        found = front.best(targets.ttft_s, targets.share)
        if found is None:
            return None
        pipeline, division = found
        return _plan_of(_stages(pipeline, division.split), self._rated(division, 0.0))

    def plan_shape(self, role: str, shape: Sequence[tuple[int, ...]], above: float = 0.0) -> GroupPlan | None:
        """The best layers and batch for stages (node, degree, and the degrees of StageShape that are not 1)
        in this order; None if nothing fits, perhaps also if nothing serves more than `above` requests/s."""
        pipeline = self._pipelines.of(role, [StageShape(*stage) for stage in shape])
        return self._plan(pipeline, above) if pipeline else None

    def quickest_s(self, role: str, counts: NodeCounts) -> float:
        """The least seconds to the first token (role "prefill"), or per output token, of a single request
        with a mean prompt; infinity if the model does not fit."""
        semantics, best = self.problem.pipeline, float("inf")
        for pipeline in filter(
            None, (self._pipelines.of(role, shape) for shape in self._shapes_of(role, counts))
        ):
            held = self._batches_held(pipeline) if role == "prefill" else 1
            limits = [m.max_layers(held) for m in pipeline.memory]
            timing = self._pipelines.timing(pipeline, "prefill" if role == "prefill" else "decode", 1)
            splits = (self._pipelines.split(timing, limits, by_sum) for by_sum in (False, True))
            for split in filter(None, splits):
                stage_s = timing.stage_s(split)
                if role == "prefill":
                    best = min(best, prefill_pace(semantics, stage_s, timing.hop_s, 1).latency_s)
                else:
                    best = min(best, self._pipelines.decode_pace(pipeline, split, 1).latency_s)
        return best

    def plan_layers(
        self,
        role: str,
        stages: tuple[PlannedStage, ...],
        batch: int | None = None,
        engine: EngineSettings | None = None,
    ) -> GroupPlan | None:
        """The plan with exactly these stages and layers, for `batch` requests (of a replica that decodes) and
        these engine settings, or those that a plan would have; None if that does not fit or misses the
        targets."""
        pipeline = self._pipelines.of(role, [s.shape for s in stages])
        if pipeline is None:
            return None
        split = [s.layers for s in stages]
        if role == "prefill":
            batches = (engine.step_tokens / self.problem.costs.isl,) if engine else ()
            found = next(self._prefill_divisions(pipeline, split, batches, engine), None)
        else:
            room = min(m.max_batch(n) for m, n in zip(pipeline.memory, split, strict=True))
            largest = min(self.problem.costs.batch_cap, room)
            held = largest if batch is None else batch if batch <= largest else 0
            chunks = self._chunks_of(pipeline) if held >= 1 else ()
            if engine and chunks and chunks[0]:
                chunks = (engine.chunk_tokens / self.problem.costs.isl,)
            divisions = (self._within_targets(pipeline, split, held, chunk, engine) for chunk in chunks)
            found = next(iter(greatest(filter(None, divisions), lambda one: one.req_s)), None)
        return _plan_of(stages, found) if found and found.req_s > 0 else None

    def _plan(self, pipeline: Pipeline, above: float = 0.0) -> GroupPlan | None:
        """The best division of the layers of a pipeline; None if none fits or meets the targets, perhaps also
        if none serves more than `above` requests/s."""
        prefills = pipeline.role == "prefill"
        found = self._prefill_divisions(pipeline, above=above) if prefills else self._decode(pipeline, above)
        best = next(iter(greatest(found, lambda one: one.req_s)), None)
        if best is None or best.req_s <= 0:
            return None
        return _plan_of(_stages(pipeline, best.split), best)

    def _prefill_divisions(
        self,
        pipeline: Pipeline,
        given: list[int] | None = None,
        batches: Sequence[float] = (),
        engine: EngineSettings | None = None,
        above: float = 0.0,
    ) -> Iterator[_Division]:
        """Divisions of a prefill replica for each number of prompts in a step, or those worth trying, with
        the given layers or those that suit the step best, as far as they fit. Those that serve no more than
        others, or than `above` requests/s, have a rate of 0 or are left out: smaller steps have no greater
        capacity, nor has another division."""
        semantics, targets = self.problem.pipeline, self.problem.targets
        first_by_sum = semantics != "pipelined"
        smallest = SMALLEST_STEP / self.problem.costs.isl
        for batch in batches or targets.prefill_batches(pipeline.batch, smallest):
            timing, limits = self._prefill_step(pipeline, batch)
            split = given or self._pipelines.split(timing, limits, first_by_sum)
            soon = False
            if split and all(n <= limit for n, limit in zip(split, limits, strict=True)):
                found = self._prefill_division(pipeline, timing, split, batch, engine)
                if found.pace.capacity_req_s <= above:
                    return
                found = self._rated(found, above)
                above = max(above, found.req_s * LESS)
                soon = targets.ttft_s is None or found.pace.latency_s <= SOON * targets.ttft_s
                yield found
            if given or first_by_sum or soon:
                continue
            quick = self._pipelines.split(timing, limits, True)
            if quick and quick != split:
                found = self._rated(self._prefill_division(pipeline, timing, quick, batch, engine), above)
                above = max(above, found.req_s * LESS)
                yield found

    def _prefill_step(self, pipeline: Pipeline, batch: float) -> tuple[Timing, list[int]]:
        """The times of a step of so many prompts, and the most layers of each stage that fit beside them."""
        held = prompts_held(batch, self._batches_held(pipeline))
        return self._pipelines.timing(pipeline, "prefill", batch), [
            m.max_layers(held) for m in pipeline.memory
        ]

    def _batches_held(self, pipeline: Pipeline) -> int:
        """Steps for whose KV caches each stage of a prefill replica needs memory."""
        return prefill_batches_held(self.problem.pipeline, len(pipeline.shape))

    def _prefill_division(
        self,
        pipeline: Pipeline,
        timing: Timing,
        split: list[int],
        batch: float,
        engine: EngineSettings | None,
    ) -> _Division:
        """A division of a prefill replica, not rated. Without settings, as many steps are in flight as keep
        the slowest stage or hop busy and as there is memory for."""
        semantics, stage_s = self.problem.pipeline, timing.stage_s(split)
        steps = engine.in_flight or len(split) if engine else 1
        if semantics == "pipelined" and not engine:
            room = min(m.max_batch(n) for m, n in zip(pipeline.memory, split, strict=True))
            most = int(room / prompts_held(batch, 1)) - 1
            steps = max(len(split), min(steps_to_fill(stage_s, timing.hop_s), most))
        pace = prefill_pace(semantics, stage_s, timing.hop_s, batch, steps)
        engine = engine or EngineSettings(
            step_tokens=max(1, math.ceil(batch * self.problem.costs.isl * _EXACT)), in_flight=steps
        )
        return _Division(split, batch, pace, 0.0, engine)

    def _rated(self, division: _Division, above: float) -> _Division:
        """A division of a prefill replica with the requests/s that it serves within the targets; 0 if these
        are no more than `above`."""
        req_s = self.problem.targets.prefill_req_s(division.pace, division.batch, above)
        pace = replace(division.pace, latency_s=prompt_s(division.pace, division.batch))
        return replace(division, pace=pace, req_s=req_s)

    def _decode(self, pipeline: Pipeline, above: float) -> list[_Division]:
        """Divisions of a decode or colocated replica; see _prefill_divisions."""
        found = list(self._decode_up_to(pipeline, pipeline.batch, above))
        within = max((one.batch for one in found), default=0)
        if self.problem.targets.tpot_s is not None and 0 < within < pipeline.batch:
            # The targets allow fewer requests than the memory does: divide the layers again for these.
            found += self._decode_up_to(pipeline, within, above)
        return found

    def _decode_up_to(self, pipeline: Pipeline, most: float, above: float) -> Iterator[_Division]:
        """Divisions chosen for at most so many requests, each with the most requests that it has memory
        for."""
        chunks, best_req_s = self._chunks_of(pipeline), 0.0
        for batch in dict.fromkeys(max(1, int(most * share)) for share in BATCH_SHARES):
            limits = [m.max_layers(batch) for m in pipeline.memory]
            splits = dict.fromkeys(
                tuple(split) for chunk in chunks for split in self._splits(pipeline, batch, chunk, limits)
            )
            here_req_s = 0.0
            for split in splits:
                # The layers chosen may leave room for more requests than they were chosen for.
                room = (m.max_batch(n) for m, n in zip(pipeline.memory, split, strict=True))
                largest = min(self.problem.costs.batch_cap, *room)
                for chunk in chunks:
                    found = self._within_targets(pipeline, list(split), largest, chunk, above=above)
                    if found:
                        above = max(above, found.req_s * LESS)
                        here_req_s = max(here_req_s, found.req_s)
                        yield found
            # If memory limits no stage, a smaller batch is no better.
            if all(n < limit for split in splits for n, limit in zip(split, limits, strict=True)):
                break
            if here_req_s < best_req_s * WORSE:
                break
            best_req_s = max(best_req_s, here_req_s)

    def _splits(
        self, pipeline: Pipeline, batch: float, chunk: float, limits: list[int]
    ) -> Iterator[list[int]]:
        """The layers of each stage, at most `limits`, that suit a replica which decodes so many requests."""
        ways: tuple[bool, ...] = (True,) if self.problem.pipeline == "literal" else (False,)
        if pipeline.role == "colocated" and self.problem.pipeline == "paper_optimistic":
            ways = (False, True)  # Its prefills take the sum of the stages, its decode steps the slowest.
        for turn in self._pipelines.turns(pipeline, batch, chunk):
            for by_sum in ways:
                split = self._pipelines.split(turn, limits, by_sum)
                if split:
                    yield split

    def _chunks_of(self, pipeline: Pipeline) -> Sequence[float]:
        """The chunks worth trying in a replica's mixed steps, in prompts; 0 where no step is mixed."""
        return (self._pipelines.chunks if pipeline.role == "colocated" else ()) or (0.0,)

    def _within_targets(
        self,
        pipeline: Pipeline,
        split: list[int],
        most: int,
        chunk: float,
        given: EngineSettings | None = None,
        above: float = 0.0,
    ) -> _Division | None:
        """The division with the most requests, up to `most`, that meet the targets; None if none do. The
        requests/s may be 0 if they are no more than `above`."""
        targets, batch = self.problem.targets, most
        if targets.tpot_s is not None:
            places = self._decode_queue(pipeline, split, most, chunk).places_within(targets.tpot_s, above)
            batch = places // self._pipelines.at_once(split)
        if not batch:
            return None
        pace = self._pipelines.decode_pace(pipeline, split, batch, chunk)
        req_s = 0.0 if targets.given else pace.capacity_req_s
        if targets.given and pace.capacity_req_s > above:
            req_s = targets.decode_req_s(pace, self._decode_queue(pipeline, split, batch, chunk))
        if pipeline.role == "colocated" and targets.ttft_s is not None and req_s > above:
            # Prompts wait for one another, at what both phases leave of the replica's time.
            req_s = min(req_s, targets.prefill_req_s(pace, chunk or 1.0))
        if pipeline.role == "decode" and not targets.given:
            req_s = self._beside_prompts(pipeline, split, batch, pace)
        steps = 1 if self.problem.pipeline == "literal" else len(split)
        engine = given or self._engine(round(chunk * self.problem.costs.isl), steps)
        return _Division(split, batch, pace, req_s, engine)

    def _engine(self, chunk_tokens: int, in_flight: int) -> EngineSettings:
        """The settings of a replica that decodes, with chunks of so many tokens unless they are 0."""
        key = chunk_tokens, in_flight
        if key not in self._engines:
            chunks = {"chunk_tokens": chunk_tokens} if chunk_tokens else {}
            self._engines[key] = EngineSettings(in_flight=in_flight, **chunks)
        return self._engines[key]

    def _beside_prompts(self, pipeline: Pipeline, split: list[int], batch: int, pace: Pace) -> float:
        """Requests/s of a decode replica that runs up to `batch` requests at that pace, and whose memory also
        holds the prompts that are still being computed for it: a request has room on both sides from the
        start, since each layer is sent once it is computed. Which replicas will send to it is not known yet;
        they are taken to be PREFILL_AHEAD times as fast as its own stages."""
        if self.problem.pipeline != "pipelined":
            return pace.capacity_req_s
        room, costs = (
            min(m.max_batch(n) for m, n in zip(pipeline.memory, split, strict=True)),
            self.problem.costs,
        )
        # Admission keeps half of an output's tokens free for each request (see kv_budget.growth_tokens).
        prompts = costs.prefill_batch()
        prefill = self._pipelines.timing(pipeline, "prefill", prompts)
        lead_s = prefill_pace("pipelined", prefill.stage_s(split), prefill.hop_s, prompts).latency_s
        held_s = lead_s / PREFILL_AHEAD * (costs.isl + costs.osl / 2) / (costs.isl + costs.osl)
        fewer = max(1.0, room - pace.capacity_req_s * held_s)
        if fewer >= batch:
            return pace.capacity_req_s
        least_req_s = self._pipelines.decode_pace(pipeline, split, fewer).capacity_req_s
        # Between both, requests/s grow about linearly with the requests that run: room = x + held_s req_s(x).
        slope = (pace.capacity_req_s - least_req_s) / (batch - fewer)
        running = fewer + (room - held_s * least_req_s - fewer) / (1 + held_s * slope)
        return least_req_s + slope * (min(float(batch), running) - fewer)

    def prefill_queue(self, plan: GroupPlan) -> PrefillQueue:
        """How a prefill replica with this plan fares under any load."""
        pipeline, split = self._planned_pipeline("prefill", plan)
        timing = self._pipelines.timing(pipeline, "prefill", plan.batch)
        pace = prefill_pace(
            self.problem.pipeline, timing.stage_s(split), timing.hop_s, plan.batch, plan.engine.in_flight
        )
        return self.problem.targets.prefill_queue(pace, plan.batch)

    def decode_queue(self, plan: GroupPlan) -> DecodeQueue:
        """How a decode replica with this plan fares under any load."""
        pipeline, split = self._planned_pipeline("decode", plan)
        return self._decode_queue(pipeline, split, int(plan.batch))

    def colocated_queues(self, plan: GroupPlan) -> tuple[PrefillQueue, DecodeQueue]:
        """How a colocated replica with this plan fares under any load of its own, where prompts wait at what
        both phases leave of its time at full load."""
        pipeline, split = self._planned_pipeline("colocated", plan)
        chunk = plan.engine.chunk_tokens / self.problem.costs.isl if self._chunks_of(pipeline)[0] else 0.0
        pace = self._pipelines.decode_pace(pipeline, split, plan.batch, chunk)
        first = self.problem.targets.prefill_queue(pace, chunk or 1.0)
        return first, self._decode_queue(pipeline, split, int(plan.batch), chunk)

    def region_limit(self, counts: NodeCounts) -> Region | None:
        """What no plan of a colocated group exceeds, also if it works for others: as if layers could be cut
        up, so that no stage ever waits for another; None if the model does not fit. Much faster than to
        plan."""
        if len(counts) > self.span:
            return None
        if counts not in self._limits:
            like, _, key = self._by_kind(counts)
            if key not in self._limits_by_kind:
                limits = [self._limit_of(pipeline) for pipeline in self._pipelines_of("colocated", like)]
                corners = [corner for limit in limits for corner in limit.corners]
                self._limits_by_kind[key] = Region.around(corners) if corners else None
            self._limits[counts] = self._limits_by_kind[key]
        return self._limits[counts]

    def _limit_of(self, pipeline: Pipeline) -> Region:
        costs, most = self.problem.costs, pipeline.batch / len(pipeline.kinds)
        own, alone = pipeline.limit_req_s, self._pipelines.most_steps_s
        prompts = costs.prefill_batch()
        corners = [
            (own, own),
            (alone(pipeline, prompts, 0.0) * prompts, 0.0),
            (0.0, alone(pipeline, 0.0, most) * most / costs.osl),
        ]
        for chunk in self._pipelines.chunks:
            steps_s = alone(pipeline, chunk, most)
            corners.append((steps_s * chunk, steps_s * most / costs.osl))
        return Region.around(corners)

    def region(self, plan: GroupPlan) -> Region:
        """What a colocated group with this plan can do if it also works for other replicas, in requests/s
        within the targets: its own requests at its capacity, either phase alone, and steps that all have a
        chunk."""
        key = (plan.stages, plan.batch, plan.engine, plan.capacity_req_s)
        if key not in self._regions:
            self._regions[key] = self._region(plan)
        return self._regions[key]

    def _region(self, plan: GroupPlan) -> Region:
        costs, osl = self.problem.costs, self.problem.costs.osl
        pipeline, split = self._planned_pipeline("colocated", plan)
        chunk, stages = plan.engine.chunk_tokens / costs.isl, len(split)
        # Room is kept for prompts that go on elsewhere.
        room = min(m.max_batch(n) for m, n in zip(pipeline.memory, split, strict=True))
        kept = outgoing_prompts(chunk, stages) * costs.isl / (costs.isl + costs.osl)
        batch = min(plan.batch, room - kept)
        if batch < 1:
            return Region.around([(plan.capacity_req_s, plan.capacity_req_s)])
        held = batch / stages

        def times(decodes: float, prompts: float) -> PhaseTimes:
            step = self._pipelines.mixed_step(pipeline, decodes, prompts)
            return PhaseTimes(step.stage_s(split), step.hop_s, prompts)

        def point(decodes: float, share: float) -> Point:
            mixed = times(decodes, chunk)
            rest = self._pipelines.timing(pipeline, "decode", decodes) if decodes else None
            decode = PhaseTimes(rest.stage_s(split), rest.hop_s, decodes) if rest else mixed
            period_s = mixed_period_s(mixed, decode, share)
            return share * chunk / period_s, decodes / (osl * period_s)

        # The engine spreads decodes over all steps: as long as there are any, prompts come in chunks.
        prompts_only, every_step, none = point(0.0, 1.0), point(held, 1.0), point(held, 0.0)
        answers = none[1]
        for p, d in (point(held, share) for share in SHARES):
            if p < every_step[0]:  # Where one step in a pipeline delays all, less than on a line in between.
                answers = min(answers, d + (d - every_step[1]) * p / (every_step[0] - p))
        # Of its own requests alone, the plan knows better how prompts and answers come.
        both = plan.capacity_req_s
        balanced = self._pipelines.decode_pace(pipeline, split, int(plan.batch), chunk).capacity_req_s
        within = min(1.0, both / balanced)
        corners = [(p * within, d * within) for p, d in (prompts_only, every_step, (0.0, answers))]
        found = Region.around([(both, both), *corners])
        return found if found.balanced <= both * (1 + 1e-9) else found.times(both / found.balanced)

    def _planned_pipeline(self, role: str, plan: GroupPlan) -> tuple[Pipeline, list[int]]:
        """The pipeline of a plan, and the layers of its stages."""
        pipeline = self._pipelines.of(role, [s.shape for s in plan.stages])
        assert pipeline is not None, "a plan fits in its own stages"
        return pipeline, [s.layers for s in plan.stages]

    def _decode_queue(
        self, pipeline: Pipeline, split: list[int], batch: int, chunk: float = 0.0
    ) -> DecodeQueue:
        """How a decode or colocated replica with these layers and this batch fares under any load."""
        at_once = self._pipelines.at_once(split)

        def tpot_s(requests: float) -> float:
            pace = self._pipelines.decode_pace(pipeline, split, requests / at_once, chunk)
            return pace.token_s if pipeline.role == "colocated" else pace.latency_s

        return DecodeQueue(batch * at_once, tpot_s, self.problem.costs.osl, self.problem.costs.tiled)
