"""Pipelines: a group's stages in one order, and their times by the cost model (HexGen-2, Table 1).

The time of a stage is affine in its layers, and its slope depends only on the batch; so slopes are remembered
by kind of stage and batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from cost_model.base import Phase, StageMemory, Work
from cost_model.hardware import Link
from cost_model.pipeline import (
    CHUNKS,
    Pace,
    PhaseTimes,
    colocated_pace,
    decode_pace,
    micro_batch,
    mixed_decodes,
    mixed_pace,
    mixed_steps,
    prefill_batches_held,
    prompts_held,
    under_way,
)
from hexgen2.search.planning.layers import balance_layers, fastest_layers
from hexgen2.search.planning.shapes import StageShape
from hexgen2.search.planning.stage_kinds import StageKind, StageKinds
from hexgen2.search.planning.timing import Timing
from hexgen2.search.problem import Problem


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Stages in order, whose layers are not divided yet.

    Attributes
    ----------
    shape : node and degrees of each stage
    batch : the requests that fit; for prefill, the prompts in a step
    limit_req_s : an upper limit on the capacity, however the layers are divided
    chunk_limits : the same for each size of the chunks in mixed steps, or for replicas without any
    timings, mixed, paces : those that were asked for, by phase and batch; by decodes and chunk; and by
        layers, batch and chunk
    """

    role: str
    shape: tuple[StageShape, ...]
    kinds: list[StageKind]
    hops: list[Link]
    memory: list[StageMemory]
    batch: float
    limit_req_s: float = math.inf
    chunk_limits: tuple[float, ...] = ()
    timings: dict[tuple[Phase, float], Timing] = field(default_factory=dict)
    mixed: dict[tuple[float, float], tuple[Timing, float]] = field(default_factory=dict)
    paces: dict[tuple[tuple[int, ...], float, float], Pace] = field(default_factory=dict)


def _fits(memory: list[StageMemory], batch: float, layers: int) -> bool:
    """True if all layers fit beside `batch` requests with at least one in each stage."""
    limits = [m.max_layers(batch) for m in memory]
    return min(limits) >= 1 and sum(limits) >= layers


class Pipelines:
    """Makes pipelines of one problem, whatever its goal, and times them.

    Attributes
    ----------
    chunks : sizes of chunks that are tried in colocated replicas, in prompts; none without mixed steps
    chunks_for_others : those tried where they also work for others; none: only the size that is best without
    prefill_batches : prompts in a step, of which the first that fits is run
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        full = problem.costs.prefill_batch()
        mixes = problem.pipeline == "pipelined"
        self.chunks = tuple(tokens / problem.costs.isl for tokens in CHUNKS) if mixes else ()
        self.chunks_for_others: tuple[float, ...] = ()
        self.prefill_batches = tuple(dict.fromkeys((full, min(1.0, full))))
        self.stage_kinds = StageKinds(problem)
        self._works: dict[tuple[float, float], Work] = {}

    def of(self, role: str, shape: Sequence[StageShape], limits: Sequence[float] = ()) -> Pipeline | None:
        """The pipeline of this shape; None if the model does not fit.

        Parameters
        ----------
        limits : on its capacity: one, or one for each size of chunk
        """
        problem = self.problem
        layers, last = problem.model.layers, len(shape) - 1
        if len(shape) > layers:
            return None
        phase: Phase = "prefill" if role == "prefill" else "decode"
        kinds = [self.stage_kinds.of(stage) for stage in shape]
        hops = [problem.node_links[a][b] for (a, *_), (b, *_) in itertools.pairwise(shape)]
        memory = [kind.memory[phase, j == 0, j == last] for j, kind in enumerate(kinds)]
        if phase == "prefill":
            steps = prefill_batches_held(problem.pipeline, len(shape))
            fitting = (b for b in self.prefill_batches if _fits(memory, prompts_held(b, steps), layers))
            batch = next(fitting, 0.0)
        else:
            batch = self._largest_batch(memory)
        limit = max(limits, default=math.inf)
        pipeline = Pipeline(role, tuple(shape), kinds, hops, memory, batch, limit, tuple(limits))
        return pipeline if batch else None

    def at_once(self, split: list[int]) -> int:
        """How many batches of requests the pipeline holds at once."""
        return int(under_way(self.problem.pipeline, 1, len(split)))

    def decode_pace(self, pipeline: Pipeline, split: list[int], batch: float, chunk: float = 0.0) -> Pace:
        """The pace with these layers while `batch` requests are held; in a colocated replica, of both phases,
        with chunks of `chunk` prompts in mixed steps."""
        key = (tuple(split), batch, chunk)
        if key not in pipeline.paces:
            pipeline.paces[key] = self._decode_pace(pipeline, split, batch, chunk)
        return pipeline.paces[key]

    def _decode_pace(self, pipeline: Pipeline, split: list[int], batch: float, chunk: float) -> Pace:
        semantics, osl = self.problem.pipeline, self.problem.costs.osl
        if chunk:
            decodes = mixed_decodes(batch, len(split), chunk, osl)
            mixed, prompts = self.mixed(pipeline, decodes, chunk)
            rest = self.timing(pipeline, "decode", decodes)
            both = PhaseTimes(mixed.stage_s(split), mixed.hop_s, prompts)
            return mixed_pace(both, PhaseTimes(rest.stage_s(split), rest.hop_s, batch), decodes, osl, chunk)
        decode = self._decode_timing(pipeline, batch)
        if pipeline.role == "decode":
            return decode_pace(semantics, decode.stage_s(split), decode.hop_s, batch, osl)
        prompts = self.prompts(batch)
        prefill = self.timing(pipeline, "prefill", prompts)
        return colocated_pace(
            semantics,
            PhaseTimes(prefill.stage_s(split), prefill.hop_s, prompts),
            PhaseTimes(decode.stage_s(split), decode.hop_s, batch),
            osl,
        )

    def turns(self, pipeline: Pipeline, batch: float, chunk: float = 0.0) -> list[Timing]:
        """The times that a division of the layers may balance: those of a decode step, and in a colocated
        replica of the prefills between two steps. A micro-batch ends micro / osl requests per step, and as
        many begin. Where they are chunks in mixed steps: the mean step, or the mixed one, for which other
        stages wait."""
        osl = self.problem.costs.osl
        if chunk:
            decodes = mixed_decodes(batch, len(pipeline.kinds), chunk, osl)
            mixed, prompts = self.mixed(pipeline, decodes, chunk)
            rest = self.timing(pipeline, "decode", decodes)
            share = decodes / (osl * prompts)
            mean = rest.times(1 - share).plus(mixed, share)
            return [mean, mixed] if len(pipeline.kinds) > 1 else [mean]
        decode = self._decode_timing(pipeline, batch)
        if pipeline.role == "decode":
            return [decode]
        prompts = self.prompts(batch)
        micro = micro_batch(self.problem.pipeline, batch, len(pipeline.kinds))
        return [decode.plus(self.timing(pipeline, "prefill", prompts), micro / (osl * prompts))]

    def mixed(self, pipeline: Pipeline, decodes: float, chunk: float) -> tuple[Timing, float]:
        """Mean seconds of each stage and hop for a mixed step beside so many decodes, and the prompts in it,
        of which there may be `chunk`; remembered."""
        key = decodes, chunk
        if key not in pipeline.mixed:
            pipeline.mixed[key] = self._mean_mixed(pipeline, decodes, chunk)
        return pipeline.mixed[key]

    def _mean_mixed(self, pipeline: Pipeline, decodes: float, chunk: float) -> tuple[Timing, float]:
        (first, beside, share), *more = mixed_steps(chunk, decodes, self.problem.costs.osl)
        mean, prompts = self.mixed_step(pipeline, beside, first), first
        if share < 1:
            mean, prompts = mean.times(share), share * first
        for other, beside, share in more:
            mean = mean.plus(self.mixed_step(pipeline, beside, other), share)
            prompts += share * other
        return mean, prompts

    def mixed_step(self, pipeline: Pipeline, decodes: float, prompts: float) -> Timing:
        """Seconds of each stage and hop for a step with so many prompts and decodes."""
        costs, last, key = self.problem.costs, len(pipeline.kinds) - 1, (prompts, decodes)
        work = self.mixed_work(prompts, decodes)
        layer_s, edge_s = [], []
        for j, kind in enumerate(pipeline.kinds):
            found = kind.mixed_layer_s.get(key)
            if found is None:
                found = kind.mixed_layer_s[key] = costs.layer_work_s(kind.group, work)
            layer_s.append(found)
            edge = work.sampled, j == last
            found = kind.mixed_edge_s.get(edge)
            if found is None:
                found = kind.mixed_edge_s[edge] = costs.edge_work_s(kind.group, *edge)
            edge_s.append(found)
        return Timing(layer_s, edge_s, [costs.hop_work_s(hop, work.tokens) for hop in pipeline.hops])

    def mixed_work(self, prompts: float, decodes: float) -> Work:
        """The work of a mixed step, remembered."""
        key = prompts, decodes
        if key not in self._works:
            self._works[key] = self.problem.costs.mixed_work(prompts, decodes)
        return self._works[key]

    def _decode_timing(self, pipeline: Pipeline, batch: float) -> Timing:
        """Seconds of a decode step while `batch` requests are held."""
        return self.timing(pipeline, "decode", micro_batch(self.problem.pipeline, batch, len(pipeline.kinds)))

    def prompts(self, batch: float) -> int:
        """Prompts per prefill step of a colocated replica that holds `batch` requests, whole ones."""
        return max(1, int(min(batch, self.problem.costs.prefill_batch())))

    def _largest_batch(self, memory: list[StageMemory]) -> int:
        """The most requests, up to the cap, for which the layers still fit; 0 if not even one does."""
        layers = self.problem.model.layers
        low, high = 0, self.problem.costs.batch_cap
        if _fits(memory, high, layers):
            return high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if _fits(memory, middle, layers) else (low, middle)
        return low

    def timing(self, pipeline: Pipeline, phase: Phase, batch: float) -> Timing:
        """Seconds of each stage and hop for a step of `batch` requests."""
        found = pipeline.timings.get((phase, batch))
        if found is not None:
            return found
        costs, kinds = self.problem.costs, pipeline.kinds
        layer_s, edge_s = [], []
        for j, kind in enumerate(kinds):
            layer_s.append(self._layer_s(kind, phase, batch))
            edge = (phase, batch, j == len(kinds) - 1)
            if edge not in kind.edge_s:
                kind.edge_s[edge] = costs.edge_s(phase, kind.group, batch, edge[2])
            edge_s.append(kind.edge_s[edge])
        found = Timing(layer_s, edge_s, [costs.hop_s(phase, hop, batch) for hop in pipeline.hops])
        pipeline.timings[phase, batch] = found
        return found

    def _layer_s(self, kind: StageKind, phase: Phase, batch: float) -> float:
        """Seconds of one layer for a step of `batch` requests, remembered."""
        key = (phase, batch)
        if key not in kind.layer_s:
            kind.layer_s[key] = self.problem.costs.layer_s(phase, kind.group, batch)
        return kind.layer_s[key]

    def split(self, timing: Timing, limits: list[int], by_sum: bool) -> list[int] | None:
        """Layers of each stage, at most `limits`: with the least total time (by_sum), or the least time of
        the slowest stage; None if they do not all fit."""
        layers = self.problem.model.layers
        if by_sum:
            return fastest_layers(layers, timing.layer_s, limits)
        return balance_layers(layers, timing.layer_s, timing.edge_s, limits)
