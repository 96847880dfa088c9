"""The best parallel plan of one group: tensor degree per stage, layers per stage, largest batch.

HexGen-2, section 3.3 and Appendix A: prefill and decode replicas are planned separately, since they want
different shapes. A colocated replica runs both phases with the same shape and the same layers per stage.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cost_model.pipeline import prefill_pace
from cost_model.queueing import DecodeQueue, PrefillQueue
from hexgen2.region import Point, Region
from hexgen2.replica import EngineSettings
from hexgen2.search.planning.chunks import FEW_GPUS, chunks_worth_trying
from hexgen2.search.planning.classes import node_classes, widest_span
from hexgen2.search.planning.contenders import ContenderSearch, PlanLimit
from hexgen2.search.planning.divisions import LESS, SMALLEST_STEP, Division, Divisions
from hexgen2.search.planning.outlooks import AT_ONCE, Outlooks
from hexgen2.search.planning.pipelines import Pipeline, Pipelines
from hexgen2.search.planning.prefill_front import PrefillFront
from hexgen2.search.planning.regions import Outline, outline_of
from hexgen2.search.planning.shapes import Shapes, StageShape
from hexgen2.search.planning.waiting_prompts import waiting_s
from hexgen2.search.problem import NodeCounts, Problem
from hexgen2.search.ties import exceeds, first_greatest, greatest

SLOW_PLAN = 3
"""To plan a colocated replica within a target per output token takes as long as so many other plans."""
DEFAULT_ENGINE = EngineSettings()


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

    @property
    def key(self) -> tuple:
        """What a colocated group with this plan can do depends on this alone."""
        return self.stages, self.batch, self.engine, self.capacity_req_s


@dataclass(frozen=True)
class Mixtures:
    """A plan of a colocated group, the first, and those with other sizes of chunks that do more for other
    replicas, each with what it can do; and a region that has all of these."""

    plans: tuple[GroupPlan, ...]
    regions: tuple[Region, ...]
    widest: Region

    @classmethod
    def of(cls, plans: Sequence[GroupPlan], regions: Sequence[Region]) -> Mixtures:
        """Those of the plans that do something which none of the others does."""
        widest = Region.around([corner for region in regions for corner in region.corners])
        corners = set(widest.corners)
        kept = [k for k, region in enumerate(regions) if not k or not corners.isdisjoint(region.corners)]
        return cls(tuple(plans[k] for k in kept), tuple(regions[k] for k in kept), widest)

    def nearest(self, point: Point) -> int:
        """The number of the plan for which so many prompts/s and answers/s are least work; the first of
        those that are equal."""
        return first_greatest(range(len(self.plans)), [-region.busy(*point) for region in self.regions])


def _plan_of(stages: tuple[PlannedStage, ...], division: Division) -> GroupPlan:
    """The plan of these stages with this division."""
    pace = division.pace
    return GroupPlan(stages, division.batch, division.req_s, pace.latency_s, pace.token_s, division.engine)


def _stages(pipeline: Pipeline, split: Sequence[int]) -> tuple[PlannedStage, ...]:
    """The stages of a pipeline with so many layers each."""
    return tuple(
        PlannedStage(node, degree, n, *degrees)
        for (node, degree, *degrees), n in zip(pipeline.shape, split, strict=True)
    )


def _with_few_chunks(problem: Problem) -> Pipelines:
    """Pipelines of a problem, with the sizes of chunks that are worth trying."""
    pipelines = Pipelines(problem)
    if pipelines.chunks and "colocated" in problem.roles:
        chosen = chunks_worth_trying(problem, ContenderSearch(pipelines, problem), Shapes(problem))
        every = pipelines.chunks
        pipelines.chunks = tuple(every[k] for k in chosen)
        if not problem.targets.given:
            # The largest suits replicas that mostly compute prompts for others.
            more = every[1::2] if len(problem.usable) <= FEW_GPUS else every[-1:]
            pipelines.chunks_for_others = tuple(sorted({*pipelines.chunks, *more}))
    return pipelines


class Planner:
    """Finds the best plan of each group; remembered by kinds of nodes, counts, and the links in between.

    Parameters
    ----------
    alike : of the same problem with another goal, to save time
    shapes : that groups may have; all if None

    Attributes
    ----------
    classes : classes of interchangeable nodes
    span : the most nodes that a replica spans
    computed : how many kinds of groups were planned, also if `counting_anew` remembers the plan; one that
        takes longer counts as several
    """

    def __init__(self, problem: Problem, alike: Planner | None = None, shapes: Shapes | None = None) -> None:
        self.problem = problem
        self.classes = node_classes(problem)
        # Tight targets may need many GPUs for few requests. Only the bound by rates covers such replicas.
        self.span = len(problem.node_gpus) if problem.targets.given else widest_span(problem)
        self.computed = 0
        self._counted: set[tuple] = set()
        self._shapes = shapes or Shapes(problem)
        same_chunks = alike is not None and alike.problem.targets.given == problem.targets.given
        self._pipelines: Pipelines = alike._pipelines if alike and same_chunks else _with_few_chunks(problem)
        self._divisions = Divisions(self._pipelines, problem)
        self._contenders = ContenderSearch(self._pipelines, problem)
        self._sorted: dict[NodeCounts, tuple[NodeCounts, list[int], tuple]] = {}
        self._memo: dict[tuple, tuple[list[int], GroupPlan | None]] = {}
        # One goal's targets rule out most divisions unseen; those that several goals ask for are kept.
        self._several = alike is not None and problem.targets.ttft_s is not None
        self._fronts: dict[tuple, tuple[list[int], PrefillFront[tuple[Pipeline, Division]]]] = (
            alike._fronts if alike else {}
        )
        self._planned: dict[tuple[str, NodeCounts], GroupPlan | None] = {}
        self._regions: dict[tuple, Region] = {}
        self._outlines: dict[tuple, tuple[Outline | None, float]] = {}
        self._beside: dict[tuple, float] = {}
        self._mixtures: dict[tuple, Mixtures] = {}
        self._of_chunks: dict[tuple, list[GroupPlan]] = {}
        self._limits: dict[tuple[str, NodeCounts], PlanLimit | None] = {}
        self._outlooks: Outlooks = Outlooks(
            self._pipelines, self._shapes, self._contenders, alike._outlooks if alike else None
        )
        self._link_kind = problem.link_kinds[0].tolist()
        pairs = itertools.permutations(range(len(problem.node_gpus)), 2)
        self._one_network = len({self._link_kind[a][b] for a, b in pairs}) <= 1

    def counting_anew(self) -> Planner:
        """One that knows the same plans, and shares what it learns, but counts from 0 what it is asked for:
        its count does not depend on what others have asked before, or ask elsewhere at the same time."""
        other = copy.copy(self)
        other.computed, other._counted, other._planned = 0, set(), {}
        return other

    def plan(self, role: str, counts: NodeCounts) -> GroupPlan | None:
        """The plan with the greatest capacity; None if the model does not fit in the group, the group spans
        too many nodes, or no shape meets the targets."""
        if len(counts) > self.span:
            return None
        key = (role, counts)
        if key not in self._planned:
            self._planned[key] = self._from_memo(role, counts)
        return self._planned[key]

    def knows(self, role: str, counts: NodeCounts) -> bool:
        """Whether the plan of a group is there without planning."""
        return (role, counts) in self._planned or (role, *self._by_kind(counts)[2]) in self._memo

    def _from_memo(self, role: str, counts: NodeCounts) -> GroupPlan | None:
        """The plan of a group: that of a group of the same kinds of nodes and links, if one was made."""
        counts, nodes, alike = self._by_kind(counts)
        key = (role, *alike)
        if key not in self._counted:
            self._counted.add(key)
            slow = role == "colocated" and self.problem.targets.tpot_s is not None
            self.computed += SLOW_PLAN if slow else 1
        if key not in self._memo:
            found = self._outlooks.of(role, alike, (counts, nodes))
            if role == "prefill" and self._several:
                # Other targets may have asked first, for the same kinds of nodes elsewhere.
                if key not in self._fronts:
                    self._fronts[key] = found.nodes, self._front(found)
                planned_on, front = self._fronts[key]
                self._memo[key] = planned_on, self._best_of(front)
            else:
                self._memo[key] = found.nodes, self._best(found)
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
        if counts not in self._sorted:
            self._sorted[counts] = self._sorted_by_kind(counts)
        return self._sorted[counts]

    def _sorted_by_kind(self, counts: NodeCounts) -> tuple[NodeCounts, list[int], tuple]:
        counts = tuple(sorted(counts, key=lambda part: (self.problem.node_kind[part[0]], -part[1])))
        nodes = [node for node, _ in counts]
        kinds = tuple((self.problem.node_kind[node], count) for node, count in counts)
        pairs = () if self._one_network else itertools.combinations(nodes, 2)
        return counts, nodes, (kinds, tuple(self._link_kind[a][b] for a, b in pairs))

    def _best(self, pipelines: Iterable[Pipeline]) -> GroupPlan | None:
        """The best plan over all shapes, the most promising first, until no other can be better."""
        best: GroupPlan | None = None
        for pipeline in pipelines:
            if best and not exceeds(pipeline.limit_req_s, best.capacity_req_s):
                break
            plan = self._plan(pipeline, best.capacity_req_s * LESS if best else 0.0)
            if plan and (best is None or exceeds(plan.capacity_req_s, best.capacity_req_s)):
                best = plan
        return best

    def _front(self, pipelines: Iterable[Pipeline]) -> PrefillFront[tuple[Pipeline, Division]]:
        """The divisions of a prefill replica that may be best under some targets, over all shapes."""
        targets, semantics = self.problem.targets, self.problem.pipeline
        smallest = SMALLEST_STEP / self.problem.costs.isl
        front: PrefillFront[tuple[Pipeline, Division]] = PrefillFront()
        for pipeline in pipelines:
            for batch in targets.prefill_batches(pipeline.batch, smallest):
                timing, limits = self._divisions.prefill_step(pipeline, batch)
                quick = self._pipelines.split(timing, limits, True)
                if quick is None:
                    continue
                soonest = self._divisions.prefill_division(pipeline, timing, quick, batch, None)
                # At most as good as this: no other division is quicker, nor has it a shorter slowest stage
                # than if layers could be cut up.
                most = replace(soonest.pace, capacity_req_s=timing.most_steps_s(sum(quick)) * batch)
                if front.dominates(targets.prefill_queue(most, batch)):
                    continue
                front.offer(targets.prefill_queue(soonest.pace, batch), (pipeline, soonest))
                even = None if semantics != "pipelined" else self._pipelines.split(timing, limits, False)
                if even and even != quick:
                    division = self._divisions.prefill_division(pipeline, timing, even, batch, None)
                    front.offer(targets.prefill_queue(division.pace, batch), (pipeline, division))
        return front

    def _best_of(self, front: PrefillFront[tuple[Pipeline, Division]]) -> GroupPlan | None:
        """The plan of a front that serves most within this goal's targets; None if none meets them."""
        targets = self.problem.targets
        assert targets.ttft_s is not None
        found = front.best(targets.ttft_s, targets.share)
        if found is None:
            return None
        pipeline, division = found
        return _plan_of(_stages(pipeline, division.split), self._divisions.rated(division, 0.0))

    def plan_shape(self, role: str, shape: Sequence[tuple[int, ...]]) -> GroupPlan | None:
        """The best layers and batch for stages (node, degree, and the degrees of StageShape that are not 1)
        in this order; None if nothing fits."""
        return self.plan_shapes(role, [[StageShape(*stage) for stage in shape]])[0]

    def plan_shapes(
        self, role: str, shapes: Sequence[Sequence[StageShape]], above: float = 0.0
    ) -> list[GroupPlan | None]:
        """The best layers and batch for each of these shapes; None if nothing fits, perhaps also if nothing
        serves more than `above` requests/s."""
        groups = []
        for shape in shapes:
            nodes = list(dict.fromkeys(stage.node for stage in shape))
            groups.append((nodes, [[stage._replace(node=nodes.index(stage.node)) for stage in shape]]))
        found = self._contenders.of(role, self._contenders.rows(groups))
        plans: list[GroupPlan | None] = [None] * len(shapes)
        for row, number in enumerate(found.rows.group.tolist()):
            pipeline = self._pipelines.of(role, found.rows.shape(row), found.of_chunks[row].tolist())
            assert pipeline is not None, "contenders fit"
            plans[number] = self._plan(pipeline, above)
        return plans

    def quickest_s(self, role: str, counts: NodeCounts) -> float:
        """The least seconds to the first token (role "prefill"), or per output token, of a single request
        with a mean prompt; infinity if the model does not fit."""
        semantics, best = self.problem.pipeline, float("inf")
        shapes = self._shapes.of(role, counts)
        for pipeline in filter(None, (self._pipelines.of(role, shape) for shape in shapes)):
            held = self._divisions.batches_held(pipeline) if role == "prefill" else 1
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
            found = next(self._divisions.prefill(pipeline, split, batches, engine), None)
        else:
            room = min(m.max_batch(n) for m, n in zip(pipeline.memory, split, strict=True))
            largest = min(self.problem.costs.batch_cap, room)
            held = largest if batch is None else batch if batch <= largest else 0
            chunks = self._divisions.chunks_of(pipeline) if held >= 1 else ()
            if engine and chunks and chunks[0]:
                chunks = (engine.chunk_tokens / self.problem.costs.isl,)
            divisions = (
                self._divisions.within_targets(pipeline, split, held, chunk, engine) for chunk in chunks
            )
            found = next(iter(greatest(filter(None, divisions), lambda one: one.req_s)), None)
        return _plan_of(stages, found) if found and found.req_s > 0 else None

    def _plan(self, pipeline: Pipeline, above: float = 0.0) -> GroupPlan | None:
        """The best division of the layers of a pipeline; None if none fits or meets the targets, perhaps also
        if none serves more than `above` requests/s."""
        prefills = pipeline.role == "prefill"
        found = (
            self._divisions.prefill(pipeline, above=above)
            if prefills
            else self._divisions.decode(pipeline, above)
        )
        best = next(iter(greatest(found, lambda one: one.req_s)), None)
        if best is None or best.req_s <= 0:
            return None
        return _plan_of(_stages(pipeline, best.split), best)

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
        return self._divisions.decode_queue(pipeline, split, int(plan.batch))

    def colocated_queues(self, plan: GroupPlan) -> tuple[PrefillQueue, DecodeQueue]:
        """How a colocated replica with this plan fares under any load of its own, where prompts wait at what
        both phases leave of its time at full load."""
        pipeline, split = self._planned_pipeline("colocated", plan)
        chunk = (
            plan.engine.chunk_tokens / self.problem.costs.isl
            if self._divisions.chunks_of(pipeline)[0]
            else 0.0
        )
        pace = self._pipelines.decode_pace(pipeline, split, plan.batch, chunk)
        first = self.problem.targets.prefill_queue(pace, chunk or 1.0)
        return first, self._divisions.decode_queue(pipeline, split, int(plan.batch), chunk)

    def limit(self, role: str, counts: NodeCounts) -> PlanLimit | None:
        """What no plan of a group exceeds; None if the model does not fit. Much faster than to plan."""
        if len(counts) > self.span:
            return None
        key = role, counts
        if key not in self._limits:
            like, nodes, alike = self._by_kind(counts)
            self._limits[key] = self._outlooks.of(role, alike, (like, nodes)).limit
        return self._limits[key]

    def look_ahead(
        self,
        roles: Sequence[str],
        groups: Iterable[NodeCounts],
        stop: Callable[[float], bool] = lambda share: False,
        at_once: int = AT_ONCE,
        shared: bool = False,
    ) -> None:
        """Find out what no plan of these groups in these roles exceeds, before `limit` and `plan` ask: many
        together, which is much faster than one after the other.

        Parameters
        ----------
        stop : whether to stop, now that this share of the groups has been looked at
        shared : whether another process looks at half of them, if they are many and a core is free
        """
        left: dict[tuple, tuple[NodeCounts, list[int]]] = {}
        for counts in groups:
            if len(counts) <= self.span and any((role, counts) not in self._limits for role in roles):
                like, nodes, alike = self._by_kind(counts)
                if not all(self._outlooks.knows(role, alike) for role in roles):
                    left.setdefault(alike, (like, nodes))
        self._outlooks.look_ahead(roles, left, stop, at_once, shared)

    def looked_at(self, role: str, counts: NodeCounts) -> bool:
        """Whether `limit` knows a group."""
        if len(counts) > self.span or (role, counts) in self._limits:
            return True
        return self._outlooks.knows(role, self._by_kind(counts)[2])

    def moves_kv(self, plan: GroupPlan) -> bool:
        """Whether a colocated replica with this plan may send KV caches and take them: under vLLM, those of
        one stage may."""
        return self.problem.engine != "vllm" or len(plan.stages) == 1

    def decodes_beside(self, plan: GroupPlan, waits_s: float) -> float:
        """Requests/s of a decode replica for which others compute prompts for so long; at most what it was
        planned with."""
        key = self._alike(plan), waits_s
        if key not in self._beside:
            pipeline, split = self._planned_pipeline("decode", plan)
            pace = self._pipelines.decode_pace(pipeline, split, plan.batch)
            found = self._divisions.beside_prompts(pipeline, split, int(plan.batch), pace, waits_s)
            self._beside[key] = min(plan.capacity_req_s, found)
        return self._beside[key]

    def region(self, plan: GroupPlan, waits_s: float | None = None) -> Region:
        """What a colocated group with this plan can do if it also works for other replicas, in requests/s
        within the targets: its own requests at its capacity, either phase alone, and steps that all have a
        chunk.

        Parameters
        ----------
        waits_s : for so long do requests hold room that wait for the prompts of others; None: as if these
            replicas were like this one, the least that is assumed
        """
        key = self._alike(plan), waits_s
        if key not in self._regions:
            outline, least_s = self._outline(plan)
            own = Region.around([(plan.capacity_req_s, plan.capacity_req_s)])
            self._regions[key] = outline.region(max(least_s, waits_s or 0.0)) if outline else own
        return self._regions[key]

    def _outline(self, plan: GroupPlan) -> tuple[Outline | None, float]:
        """What a colocated group with this plan can do, and the least seconds for which requests hold room
        there that wait for the prompts of others; remembered."""
        key = self._alike(plan)
        if key not in self._outlines:
            pipeline, split = self._planned_pipeline("colocated", plan)
            chunk = plan.engine.chunk_tokens / self.problem.costs.isl
            own = plan.batch, chunk, plan.capacity_req_s
            outline = outline_of(self._pipelines, pipeline, split, *own)
            self._outlines[key] = outline, waiting_s(self._pipelines, pipeline, split)
        return self._outlines[key]

    def _alike(self, plan: GroupPlan) -> tuple:
        """What a plan has in common with those of equal stages on other nodes of the same kinds, with links
        of the same kinds between them."""
        kind = self.problem.node_kind
        stages = tuple((kind[stage.node], *stage[1:]) for stage in plan.stages)
        hops = tuple(self._link_kind[a.node][b.node] for a, b in itertools.pairwise(plan.stages))
        return stages, hops, plan.batch, plan.engine, plan.capacity_req_s

    def mixtures(self, plan: GroupPlan, waits_s: float | None = None) -> Mixtures:
        """What a colocated group with this plan can do for itself and for others (see `region`), with any
        size of chunks."""
        key = plan.key, waits_s
        if key not in self._mixtures:
            plans = self._with_any_chunks(plan)
            self._mixtures[key] = Mixtures.of(plans, [self.region(each, waits_s) for each in plans])
        return self._mixtures[key]

    def _with_any_chunks(self, plan: GroupPlan) -> list[GroupPlan]:
        """This plan, and those with other sizes of chunks; remembered."""
        if plan.key not in self._of_chunks:
            plans, room = [plan], int(plan.batch)
            pipeline, split = self._planned_pipeline("colocated", plan)
            for chunk in self._pipelines.chunks_for_others:
                found = self._divisions.within_targets(pipeline, split, room, chunk)
                if found and found.engine.chunk_tokens != plan.engine.chunk_tokens:
                    plans.append(_plan_of(plan.stages, found))
            self._of_chunks[plan.key] = plans
        return self._of_chunks[plan.key]

    def _planned_pipeline(self, role: str, plan: GroupPlan) -> tuple[Pipeline, list[int]]:
        """The pipeline of a plan, and the layers of its stages."""
        pipeline = self._pipelines.of(role, [s.shape for s in plan.stages])
        assert pipeline is not None, "a plan fits in its own stages"
        return pipeline, [s.layers for s in plan.stages]
