"""Pipelines: a group's stages in one order, and their times by the cost model (HexGen-2, Table 1).

The time of a stage is affine in its layers, and its slope depends only on the batch; so slopes are remembered
by kind of stage and batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from cost_model.base import Phase, StageMemory, TensorGroup, Work
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
from hexgen2.search.planning.limits import MixedSteps, least_period_s
from hexgen2.search.planning.shapes import StageShape
from hexgen2.search.planning.timing import Timing, Timings
from hexgen2.search.problem import Problem


@dataclass(frozen=True, eq=False)
class StageKind:
    """A tensor group and everything about it that does not depend on the batch."""

    group: TensorGroup
    memory: dict[tuple[Phase, bool, bool], StageMemory]
    layer_s: dict[tuple[Phase, float], float] = field(default_factory=dict)
    edge_s: dict[tuple[Phase, float, bool], float] = field(default_factory=dict)
    layers_s: dict[tuple[str, float, float], float] = field(default_factory=dict)
    mixed_layer_s: dict[tuple[float, float], float] = field(default_factory=dict)
    mixed_edge_s: dict[tuple[float, bool], float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Stages in order, whose layers are not divided yet.

    Attributes
    ----------
    shape : node and degrees of each stage
    batch : the requests that fit; for prefill, the prompts in a step
    limit_req_s : an upper limit on the capacity, however the layers are divided
    chunk_limits : the same for each size of the chunks in mixed steps (see Pipelines.chunks)
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
    """Makes pipelines of one problem, whatever its goal, and times them. Of prefill_batches, prompts in a
    step, the first that fits is run."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        full = problem.costs.prefill_batch()
        mixes = problem.pipeline == "pipelined"
        self.chunks = tuple(tokens / problem.costs.isl for tokens in CHUNKS) if mixes else ()
        self.prefill_batches = tuple(dict.fromkeys((full, min(1.0, full))))
        self._stage_kinds: dict[tuple[int, ...], StageKind] = {}
        self._works: dict[tuple[float, float], Work] = {}

    def of(self, role: str, shape: Sequence[StageShape]) -> Pipeline | None:
        """The pipeline of this shape, without a limit on its capacity; None if the model does not fit."""
        problem = self.problem
        layers, last = problem.model.layers, len(shape) - 1
        if len(shape) > layers:
            return None
        phase: Phase = "prefill" if role == "prefill" else "decode"
        kinds = [self._stage_kind(stage) for stage in shape]
        hops = [problem.node_links[a][b] for (a, *_), (b, *_) in itertools.pairwise(shape)]
        memory = [kind.memory[phase, j == 0, j == last] for j, kind in enumerate(kinds)]
        if phase == "prefill":
            steps = prefill_batches_held(problem.pipeline, len(shape))
            fitting = (b for b in self.prefill_batches if _fits(memory, prompts_held(b, steps), layers))
            batch = next(fitting, 0.0)
        else:
            batch = self._largest_batch(memory)
        return Pipeline(role, tuple(shape), kinds, hops, memory, batch) if batch else None

    def with_limits(self, role: str, pipelines: Sequence[Pipeline]) -> list[Pipeline]:
        """These pipelines with limits on their capacity."""
        if role != "colocated" or not self.chunks:
            return [replace(pipeline, limit_req_s=self._most_req_s(pipeline)) for pipeline in pipelines]
        return [
            replace(pipeline, limit_req_s=max(each), chunk_limits=tuple(each))
            for pipeline, each in zip(pipelines, self._most_mixed_req_s(pipelines).tolist(), strict=True)
        ]

    def _most_req_s(self, pipeline: Pipeline) -> float:
        """An upper limit on the capacity of a replica whose steps are not mixed: every request passes all L
        layers, so L times the requests/s is at most the layers/s of all stages."""
        batch, running, outputs = pipeline.batch, pipeline.batch, 1.0
        if pipeline.role != "prefill":
            running = micro_batch(self.problem.pipeline, batch, len(pipeline.kinds))
            outputs = self.problem.costs.osl
        rate = math.fsum(self._layers_s(pipeline.role, kind, running, batch) for kind in pipeline.kinds)
        return rate / (self.problem.model.layers * outputs)

    def _layers_s(self, role: str, kind: StageKind, running: float, batch: float) -> float:
        """The most layers/s, times requests, of a stage whose steps have up to `running` requests; in a
        colocated replica that holds `batch` requests, beside the prefills between two decode steps."""
        key = (role, running, batch)
        if key not in kind.layers_s:
            costs, phase = self.problem.costs, cast(Phase, "prefill" if role == "prefill" else "decode")
            best = costs.fastest_batch(phase, kind.group, running)
            layer_s = self._layer_s(kind, phase, best)
            if role == "colocated":
                prompts = costs.fastest_batch("prefill", kind.group, self._prompts(batch))
                layer_s += best / (costs.osl * prompts) * self._layer_s(kind, "prefill", prompts)
            kind.layers_s[key] = best / layer_s
        return kind.layers_s[key]

    def _stage_kind(self, stage: StageShape) -> StageKind:
        """The kind of a stage, remembered by kind of node."""
        node, *degrees = stage
        key = (self.problem.node_kind[node], *degrees)
        if key not in self._stage_kinds:
            group = TensorGroup(
                self.problem.node_accelerator[node],
                stage.degree,
                self.problem.node_links[node][node],
                stage.attention_dp,
                stage.expert_parallel,
            )
            ends = itertools.product(("prefill", "decode"), (True, False), (True, False))
            memory = {end: self.problem.costs.stage_memory(end[0], group, *end[1:]) for end in ends}  # type: ignore[arg-type]
            self._stage_kinds[key] = StageKind(group, memory)  # type: ignore[arg-type]
        return self._stage_kinds[key]

    def _most_mixed_req_s(self, pipelines: Sequence[Pipeline]) -> np.ndarray:
        """[n, chunks] upper limits on the requests/s of colocated replicas whose steps have chunks of so many
        prompts, however their layers are divided."""
        if not pipelines:
            return np.zeros((0, len(self.chunks)))
        osl, chunks, rows = self.problem.costs.osl, self.chunks, StepTimes(self, pipelines)
        decodes = np.array([mixed_decodes(p.batch, len(p.kinds), c, osl) for c in chunks for p in pipelines])
        held = zip(np.repeat(chunks, len(pipelines)).tolist(), decodes.tolist(), strict=True)
        steps = [mixed_steps(chunk, each, osl) for chunk, each in held]
        first = np.array([each[0] for each in steps]).T
        # Where all mixed steps are alike, the second kind of them has a share of 0.
        second = np.array([each[-1] if len(each) > 1 else (*each[0][:2], 0.0) for each in steps]).T
        mixed, prompts = rows.of(first[0], first[1]), first[0]
        if second[2].any():
            mixed = mixed.mean(rows.of(second[0], second[1]), second[2])
            prompts = (1 - second[2]) * prompts + second[2] * second[0]
        rest = rows.of(np.zeros_like(decodes), decodes)
        chains = MixedSteps(np.minimum(1.0, decodes / (osl * prompts)), prompts, mixed.stages)
        period_s = least_period_s(mixed, rest, self.problem.model.layers, chains)
        return (decodes / (osl * period_s)).reshape(len(chunks), len(pipelines)).T

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
            mixed, prompts = self._mixed(pipeline, decodes, chunk)
            rest = self.timing(pipeline, "decode", decodes)
            both = PhaseTimes(mixed.stage_s(split), mixed.hop_s, prompts)
            return mixed_pace(both, PhaseTimes(rest.stage_s(split), rest.hop_s, batch), decodes, osl, chunk)
        decode = self._decode_timing(pipeline, batch)
        if pipeline.role == "decode":
            return decode_pace(semantics, decode.stage_s(split), decode.hop_s, batch, osl)
        prompts = self._prompts(batch)
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
            mixed, prompts = self._mixed(pipeline, decodes, chunk)
            rest = self.timing(pipeline, "decode", decodes)
            share = decodes / (osl * prompts)
            mean = rest.times(1 - share).plus(mixed, share)
            return [mean, mixed] if len(pipeline.kinds) > 1 else [mean]
        decode = self._decode_timing(pipeline, batch)
        if pipeline.role == "decode":
            return [decode]
        prompts = self._prompts(batch)
        micro = micro_batch(self.problem.pipeline, batch, len(pipeline.kinds))
        return [decode.plus(self.timing(pipeline, "prefill", prompts), micro / (osl * prompts))]

    def _mixed(self, pipeline: Pipeline, decodes: float, chunk: float) -> tuple[Timing, float]:
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
        kinds, last = pipeline.kinds, len(pipeline.kinds) - 1
        work = self.mixed_work(prompts, decodes)
        return Timing(
            [self._mixed_layer_s(kind, prompts, decodes) for kind in kinds],
            [self._edge_of_work_s(kind, work.sampled, j == last) for j, kind in enumerate(kinds)],
            [self.problem.costs.hop_work_s(hop, work.tokens) for hop in pipeline.hops],
        )

    def mixed_work(self, prompts: float, decodes: float) -> Work:
        """The work of a mixed step, remembered."""
        key = prompts, decodes
        if key not in self._works:
            self._works[key] = self.problem.costs.mixed_work(prompts, decodes)
        return self._works[key]

    def _edge_of_work_s(self, kind: StageKind, sampled: float, last: bool) -> float:
        """Seconds of the first or last stage for what is beside the layers, remembered."""
        key = sampled, last
        if key not in kind.mixed_edge_s:
            kind.mixed_edge_s[key] = self.problem.costs.edge_work_s(kind.group, sampled, last)
        return kind.mixed_edge_s[key]

    def _decode_timing(self, pipeline: Pipeline, batch: float) -> Timing:
        """Seconds of a decode step while `batch` requests are held."""
        return self.timing(pipeline, "decode", micro_batch(self.problem.pipeline, batch, len(pipeline.kinds)))

    def _prompts(self, batch: float) -> int:
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
        if (phase, batch) in pipeline.timings:
            return pipeline.timings[phase, batch]
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

    def _mixed_layer_s(self, kind: StageKind, prompts: float, decodes: float) -> float:
        """Seconds of one layer for a step with so many prompts and decodes, remembered."""
        key = prompts, decodes
        found = kind.mixed_layer_s.get(key)
        if found is None:
            work = self.mixed_work(prompts, decodes)
            found = kind.mixed_layer_s[key] = self.problem.costs.layer_work_s(kind.group, work)
        return found

    def split(self, timing: Timing, limits: list[int], by_sum: bool) -> list[int] | None:
        """Layers of each stage, at most `limits`: with the least total time (by_sum), or the least time of
        the slowest stage; None if they do not all fit."""
        layers = self.problem.model.layers
        if by_sum:
            return fastest_layers(layers, timing.layer_s, limits)
        return balance_layers(layers, timing.layer_s, timing.edge_s, limits)


class StepTimes:
    """Times steps of several pipelines at once, which takes a fraction of what one after the other does."""

    def __init__(self, pipelines: Pipelines, several: Sequence[Pipeline]) -> None:
        self._costs = pipelines.problem.costs
        self._stages = np.array([len(pipeline.kinds) for pipeline in several])
        kind_at: dict[StageKind, int] = {}
        hop_at: dict[Link, int] = {}
        # Of each kind, inside and at the end of pipelines, and of each link: rows and columns of stages.
        places: dict[tuple[str, int], tuple[list[int], list[int]]] = {}
        for row, pipeline in enumerate(several):
            last = len(pipeline.kinds) - 1
            stages = [
                ("end" if column == last else "inside", kind_at.setdefault(kind, len(kind_at)))
                for column, kind in enumerate(pipeline.kinds)
            ]
            hops = [("hop", hop_at.setdefault(hop, len(hop_at))) for hop in pipeline.hops]
            for column, key in (*enumerate(stages), *enumerate(hops)):
                rows, columns = places.setdefault(key, ([], []))
                rows.append(row)
                columns.append(column)
        self._kinds, self._hops = list(kind_at), list(hop_at)
        self._places = {key: (np.array(rows), np.array(columns)) for key, (rows, columns) in places.items()}

    def of(self, prompts: np.ndarray, decodes: np.ndarray) -> Timings:
        """[c n] steps with so many prompts and decodes each: first one of each of the n pipelines, then
        another of each, and so on."""
        costs, count = self._costs, len(self._stages)
        work = costs.mixed_work(prompts, decodes)  # type: ignore[arg-type]
        turns = np.arange(0, len(prompts), count)[:, None]
        found = Timings.nothing(np.tile(self._stages, len(turns)), int(self._stages.max()))
        for (place, k), (rows, columns) in self._places.items():
            at = (turns + rows).ravel()
            here = Work(*(np.asarray(each)[at] for each in work))  # type: ignore[arg-type]
            column = np.tile(columns, len(turns))
            if place == "hop":
                found.hop_s[at, column] = costs.hop_work_s(self._hops[k], here.tokens)
                continue
            group = self._kinds[k].group
            found.layer_s[at, column] = costs.layers_work_s(group, here)
            found.edge_s[at, column] = costs.edges_work_s(group, here.sampled, place == "end")  # type: ignore[arg-type]
        return found
