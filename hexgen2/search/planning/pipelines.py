"""Pipelines: a group's stages in one order, and their times by the cost model (HexGen-2, Table 1).

The time of a stage is affine in its layers, and its slope depends only on the batch; so slopes are remembered
by kind of stage and batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

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
from hexgen2.search.planning.layers import balance_layers, balance_many, fastest_layers
from hexgen2.search.planning.limits import MixedSteps, least_period_s, mean_period_s
from hexgen2.search.planning.pipeline_rows import Forms, PipelineRows, StepTimes
from hexgen2.search.planning.shapes import StageShape
from hexgen2.search.planning.stage_kinds import StageKind, StageKinds
from hexgen2.search.planning.timing import Timing
from hexgen2.search.problem import Problem

FOUND = 1 - 1e-3
"""Of the requests/s of divisions that the planner tries, this share: ties may be decided otherwise there."""


class Limits(NamedTuple):
    """Limits on the requests/s of n pipelines.

    of_chunks : [n, c] that no division of the layers exceeds, for each size of chunk if it is to be chosen
    least : [n] that the planner finds; 0 where that is not known
    """

    of_chunks: np.ndarray
    least: np.ndarray


class Contenders(NamedTuple):
    """The pipelines that may be the best of their groups.

    batch : [n] the largest that fit
    of_chunks : [n, c] limits on their requests/s (see Limits)
    least : [n] requests/s that the planner finds for their groups; 0 where that is not known
    """

    rows: PipelineRows
    batch: np.ndarray
    of_chunks: np.ndarray
    least: np.ndarray

    @property
    def most(self) -> np.ndarray:
        """[n] requests/s that no plan of a pipeline exceeds."""
        return np.asarray(self.of_chunks.max(axis=1))


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
    """Makes pipelines of one problem, whatever its goal, and times them. Of prefill_batches, prompts in a
    step, the first that fits is run."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        full = problem.costs.prefill_batch()
        mixes = problem.pipeline == "pipelined"
        self.chunks = tuple(tokens / problem.costs.isl for tokens in CHUNKS) if mixes else ()
        self.prefill_batches = tuple(dict.fromkeys((full, min(1.0, full))))
        self._kinds = StageKinds(problem)
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
        kinds = [self._kinds.of(stage) for stage in shape]
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

    def rows(self, groups: Sequence[Forms]) -> PipelineRows:
        """The pipelines that these groups can form, whether or not the model fits."""
        rows = PipelineRows.of(self._kinds, groups)
        return rows.only(rows.stages <= self.problem.model.layers)

    def contenders(self, role: str, rows: PipelineRows) -> Contenders:
        """Those of the groups that can form these pipelines."""
        rows, batch = self._fitting(role, rows)
        if not len(rows):
            return Contenders(rows, batch, np.zeros((0, 1)), np.zeros(0))
        limits = self._limits(role, rows, batch)
        first = np.unique(rows.group, return_index=True)[1]
        counts = np.diff(first, append=len(rows))
        least = np.repeat(np.maximum.reduceat(limits.least, first), counts)
        may = limits.of_chunks.max(axis=1) >= least
        return Contenders(rows.only(may), batch[may], limits.of_chunks[may], least[may])

    def _fitting(self, role: str, rows: PipelineRows) -> tuple[PipelineRows, np.ndarray]:
        """The pipelines in which the model fits, and their largest batches [n]."""
        costs, layers = self.problem.costs, self.problem.model.layers
        if role != "prefill":
            batch = rows.largest_batch("decode", costs.batch_cap, layers)
        else:
            batch = np.zeros(len(rows))
            for each in reversed(self.prefill_batches):
                batch[rows.fit("prefill", self._prompts_held(rows, each), layers)] = each
        return rows.only(batch > 0), batch[batch > 0]

    def _limits(self, role: str, rows: PipelineRows, batch: np.ndarray) -> Limits:
        """Limits on the requests/s of these pipelines."""
        if role == "colocated" and self.chunks:
            return self._mixed_limits(rows, batch)
        full = role == "prefill" and self.problem.pipeline == "pipelined" and not self.problem.targets.given
        most = self._prefill_req_s(rows, batch) if full else self._most_req_s(role, rows, batch)
        return Limits(most[:, None], np.zeros(len(rows)))

    def _prompts_held(self, rows: PipelineRows, batch: np.ndarray | float) -> np.ndarray:
        """[n] prompts whose KV caches prefill replicas hold, whose steps have so many prompts each."""
        batches = prefill_batches_held(self.problem.pipeline, rows.stages)  # type: ignore[arg-type]
        return np.full(len(rows), np.maximum(prompts_held(0.0, 1), batch) * batches)

    def _prefill_req_s(self, rows: PipelineRows, batch: np.ndarray) -> np.ndarray:
        """[n] for prefill replicas that always fill their steps: those of layers divided for that, if enough
        steps are in flight."""
        most = rows.max_layers("prefill", self._prompts_held(rows, batch))
        times = StepTimes(self.problem.costs, rows).of(batch, np.zeros_like(batch))
        stage_s = times.stage_s(balance_many(self.problem.model.layers, times, most))
        return np.asarray(batch / np.maximum(stage_s.max(axis=1), times.hop_s.max(axis=1)))

    def _most_req_s(self, role: str, rows: PipelineRows, batch: np.ndarray) -> np.ndarray:
        """[n] for replicas whose steps are not mixed: every request passes all L layers, so L times the
        requests/s is at most the layers/s of all stages."""
        costs, running, outputs = self.problem.costs, batch.astype(float), 1.0
        if role != "prefill":
            outputs = costs.osl
            running = micro_batch(self.problem.pipeline, running, rows.stages)  # type: ignore
        rates = np.zeros(rows.kind.shape)
        for number, row, column in rows.places():
            kind = self._kinds.every[number]
            if role == "colocated":
                pairs = zip(running[row].tolist(), batch[row].tolist(), strict=True)
                rates[row, column] = [self._turns_req_s(kind, *pair) for pair in pairs]
            else:
                most, which = np.unique(running[row], return_inverse=True)
                phase: Phase = "prefill" if role == "prefill" else "decode"
                rates[row, column] = costs.most_requests_s(phase, kind.group, most)[which]
        return np.cumsum(rates, axis=1)[:, -1] / (self.problem.model.layers * outputs)

    def _turns_req_s(self, kind: StageKind, running: float, batch: float) -> float:
        """The most layers/s, times requests, of a stage of a colocated replica that holds `batch` requests,
        whose steps have up to `running` of them, beside the prefills between two decode steps; remembered."""
        key = running, batch
        if key not in kind.turns_req_s:
            costs = self.problem.costs
            best = costs.fastest_batch("decode", kind.group, running)
            prompts = costs.fastest_batch("prefill", kind.group, self._prompts(batch))
            turn_s = best / (costs.osl * prompts) * self._layer_s(kind, "prefill", prompts)
            kind.turns_req_s[key] = best / (self._layer_s(kind, "decode", best) + turn_s)
        return kind.turns_req_s[key]

    def _mixed_limits(self, rows: PipelineRows, batch: np.ndarray) -> Limits:
        """Those of colocated replicas whose steps have chunks of so many prompts."""
        osl, chunks, times = self.problem.costs.osl, self.chunks, StepTimes(self.problem.costs, rows)
        decodes = np.concatenate([np.minimum(batch / rows.stages, osl * chunk) for chunk in chunks])
        held, which = np.unique(
            np.stack([np.repeat(chunks, len(rows)), decodes]), axis=1, return_inverse=True
        )
        steps = [mixed_steps(chunk, each, osl) for chunk, each in held.T.tolist()]
        first = np.array([each[0] for each in steps]).T[:, which.ravel()]
        # Where all mixed steps are alike, the second kind of them has a share of 0.
        second = np.array([each[-1] if len(each) > 1 else (*each[0][:2], 0.0) for each in steps])
        second = second.T[:, which.ravel()]
        mixed, prompts = times.of(first[0], first[1]), first[0]
        if second[2].any():
            mixed = mixed.mean(times.of(second[0], second[1]), second[2])
            prompts = (1 - second[2]) * prompts + second[2] * second[0]
        rest = times.of(np.zeros_like(decodes), decodes)
        chains = MixedSteps(np.minimum(1.0, decodes / (osl * prompts)), prompts, mixed.stages)
        layers, shape = self.problem.model.layers, (len(chunks), len(rows))
        most = decodes / (osl * least_period_s(mixed, rest, layers, chains))
        if self.problem.targets.given:
            return Limits(most.reshape(shape).T, np.zeros(len(rows)))
        room = np.tile(rows.max_layers("decode", batch), (len(chunks), 1))
        split = balance_many(layers, rest.mean(mixed, chains.share), room)
        found = decodes / (osl * mean_period_s(mixed, rest, split, chains))
        return Limits(most.reshape(shape).T, found.reshape(shape).max(axis=0) * FOUND)

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
