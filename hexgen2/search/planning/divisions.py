"""Ways to divide a pipeline's layers over its stages, each with its batch, its pace and what it serves.

HexGen-2, Appendix A: the layers follow the stages' speed within their memory. How many requests a step holds
decides both, so several batches are tried, and for replicas that do both phases several sizes of chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cost_model.pipeline import (
    Pace,
    mixed_decodes,
    prefill_batches_held,
    prefill_pace,
    prompt_s,
    prompts_held,
    steps_to_fill,
)
from cost_model.queueing import DecodeQueue
from hexgen2.region import Point
from hexgen2.replica import EngineSettings
from hexgen2.search.planning.pipelines import Pipeline, Pipelines
from hexgen2.search.planning.timing import Timing
from hexgen2.search.planning.waiting_prompts import Rates, waiting_s
from hexgen2.search.problem import Problem

BATCH_SHARES = (1.0, 0.8, 0.6, 0.4, 0.25)
"""The batches tried, as shares of the largest: a smaller one leaves room for layers on faster stages."""
SMALLEST_STEP = 256
"""Tokens of the smallest prefill step tried under a target for the first token."""
SOON = 0.3
"""If a prompt takes less than this part of the target for the first token, no quicker division is tried."""
WORSE = 0.95
"""If layers chosen for a smaller batch serve less than this share of what others do, smaller ones do, too."""
LESS = 1 - 1e-6
"""Rates that differ by less may be ties, and are compared with care (see ties.py)."""
_EXACT = 1 - 1e-9
"""So that a product that should be whole is not rounded up."""


@dataclass(frozen=True)
class Division:
    """A division of the layers over the stages, with the batch, the pace, the requests/s within the targets
    and the engine's settings."""

    split: list[int]
    batch: float
    pace: Pace
    req_s: float
    engine: EngineSettings


class Divisions:
    """Finds the divisions of a problem's pipelines that are worth a look, under its goal's targets."""

    def __init__(self, pipelines: Pipelines, problem: Problem) -> None:
        self.problem, self._pipelines = problem, pipelines
        self._engines: dict[tuple[int, int], EngineSettings] = {}

    def prefill(
        self,
        pipeline: Pipeline,
        given: list[int] | None = None,
        batches: Sequence[float] = (),
        engine: EngineSettings | None = None,
        above: float = 0.0,
    ) -> Iterator[Division]:
        """Divisions of a prefill replica for each number of prompts in a step, or those worth trying, with
        the given layers or those that suit the step best, as far as they fit. Those that serve no more than
        others, or than `above` requests/s, have a rate of 0 or are left out: smaller steps have no greater
        capacity, nor has another division."""
        semantics, targets = self.problem.pipeline, self.problem.targets
        first_by_sum = semantics != "pipelined"
        smallest = SMALLEST_STEP / self.problem.costs.isl
        for batch in batches or targets.prefill_batches(pipeline.batch, smallest):
            timing, limits = self.prefill_step(pipeline, batch)
            split = given or self._pipelines.split(timing, limits, first_by_sum)
            soon = False
            if split and all(n <= limit for n, limit in zip(split, limits, strict=True)):
                found = self.prefill_division(pipeline, timing, split, batch, engine)
                if found.pace.capacity_req_s <= above:
                    return
                found = self.rated(found, above)
                above = max(above, found.req_s * LESS)
                soon = targets.ttft_s is None or found.pace.latency_s <= SOON * targets.ttft_s
                yield found
            if given or first_by_sum or soon:
                continue
            quick = self._pipelines.split(timing, limits, True)
            if quick and quick != split:
                found = self.rated(self.prefill_division(pipeline, timing, quick, batch, engine), above)
                above = max(above, found.req_s * LESS)
                yield found

    def prefill_step(self, pipeline: Pipeline, batch: float) -> tuple[Timing, list[int]]:
        """The times of a step of so many prompts, and the most layers of each stage that fit beside them."""
        held = prompts_held(batch, self.batches_held(pipeline))
        return self._pipelines.timing(pipeline, "prefill", batch), [
            m.max_layers(held) for m in pipeline.memory
        ]

    def batches_held(self, pipeline: Pipeline) -> int:
        """Steps for whose KV caches each stage of a prefill replica needs memory."""
        return prefill_batches_held(self.problem.pipeline, len(pipeline.shape))

    def prefill_division(
        self,
        pipeline: Pipeline,
        timing: Timing,
        split: list[int],
        batch: float,
        engine: EngineSettings | None,
    ) -> Division:
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
        return Division(split, batch, pace, 0.0, engine)

    def rated(self, division: Division, above: float) -> Division:
        """A division of a prefill replica with the requests/s that it serves within the targets; 0 if these
        are no more than `above`."""
        req_s = self.problem.targets.prefill_req_s(division.pace, division.batch, above)
        pace = replace(division.pace, latency_s=prompt_s(division.pace, division.batch))
        return replace(division, pace=pace, req_s=req_s)

    def decode(self, pipeline: Pipeline, above: float) -> list[Division]:
        """Divisions of a decode or colocated replica; see _prefill_divisions."""
        found = list(self._decode_up_to(pipeline, pipeline.batch, above))
        within = max((one.batch for one in found), default=0)
        if self.problem.targets.tpot_s is not None and 0 < within < pipeline.batch:
            # The targets allow fewer requests than the memory does: divide the layers again for these.
            found += self._decode_up_to(pipeline, within, above)
        return found

    def _decode_up_to(self, pipeline: Pipeline, most: float, above: float) -> Iterator[Division]:
        """Divisions chosen for at most so many requests, each with the most requests that it has memory
        for."""
        limit_of = dict(
            zip(self.chunks_of(pipeline), pipeline.chunk_limits or (pipeline.limit_req_s,), strict=True)
        )
        best_req_s = 0.0
        for batch in dict.fromkeys(max(1, int(most * share)) for share in BATCH_SHARES):
            chunks = [chunk for chunk, limit in limit_of.items() if limit > above]
            limits = [m.max_layers(batch) for m in pipeline.memory]
            splits = dict.fromkeys(
                tuple(split) for chunk in chunks for split in self._splits(pipeline, batch, chunk, limits)
            )
            here_req_s = 0.0
            for split in splits:
                # The layers chosen may leave room for more requests than they were chosen for.
                room = (m.max_batch(n) for m, n in zip(pipeline.memory, split, strict=True))
                largest = min(self.problem.costs.batch_cap, *room)
                for chunk in (each for each in chunks if limit_of[each] > above):
                    found = self.within_targets(pipeline, list(split), largest, chunk, above=above)
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

    def chunks_of(self, pipeline: Pipeline) -> Sequence[float]:
        """The chunks worth trying in a replica's mixed steps, in prompts; 0 where no step is mixed."""
        return (self._pipelines.chunks if pipeline.role == "colocated" else ()) or (0.0,)

    def within_targets(
        self,
        pipeline: Pipeline,
        split: list[int],
        most: int,
        chunk: float,
        given: EngineSettings | None = None,
        above: float = 0.0,
    ) -> Division | None:
        """The division with the most requests, up to `most`, that meet the targets; None if none do. The
        requests/s may be 0 if they are no more than `above`."""
        targets, batch = self.problem.targets, most
        if targets.tpot_s is not None:
            places = self.decode_queue(pipeline, split, most, chunk).places_within(targets.tpot_s, above)
            batch = places // self._pipelines.at_once(split)
        if not batch:
            return None
        pace = self._pipelines.decode_pace(pipeline, split, batch, chunk)
        req_s = 0.0 if targets.given else pace.capacity_req_s
        if targets.given and pace.capacity_req_s > above:
            queue = self.decode_queue(pipeline, split, batch, chunk)
            req_s = targets.decode_req_s(pace, queue)
            if pipeline.role == "colocated":
                prompts = self._pace_of_prompts(pipeline, split, batch, chunk, pace)
                req_s = min(pace.capacity_req_s, targets.both_req_s(prompts, chunk or 1.0, queue, req_s))
        if pipeline.role == "decode" and not targets.given and req_s > above:
            waits_s = waiting_s(self._pipelines, pipeline, split)
            req_s = self.beside_prompts(pipeline, split, batch, pace, waits_s)
        steps = 1 if self.problem.pipeline == "literal" else len(split)
        engine = given or self._engine(round(chunk * self.problem.costs.isl), steps)
        return Division(split, batch, pace, req_s, engine)

    def _pace_of_prompts(
        self, pipeline: Pipeline, split: list[int], batch: int, chunk: float, pace: Pace
    ) -> Pace:
        """The pace at which a colocated replica of that pace computes prompts while some wait: each step has
        a chunk then. Without mixed steps, prompts have what both phases leave of the replica's time."""
        if not chunk:
            return pace
        decodes = mixed_decodes(batch, len(split), chunk, self.problem.costs.osl)
        mixed, prompts = self._pipelines.mixed(pipeline, decodes, chunk)
        step_s = max(*mixed.stage_s(split), *mixed.hop_s, 0.0)
        return replace(pace, capacity_req_s=max(pace.capacity_req_s, prompts / step_s))

    def _engine(self, chunk_tokens: int, in_flight: int) -> EngineSettings:
        """The settings of a replica that decodes, with chunks of so many tokens unless they are 0."""
        key = chunk_tokens, in_flight
        if key not in self._engines:
            chunks = {"chunk_tokens": chunk_tokens} if chunk_tokens else {}
            self._engines[key] = EngineSettings(in_flight=in_flight, **chunks)
        return self._engines[key]

    def beside_prompts(
        self, pipeline: Pipeline, split: list[int], batch: int, pace: Pace, waits_s: float
    ) -> float:
        """Requests/s of a decode replica that runs up to `batch` requests at that pace, and whose memory also
        holds the prompts that are still being computed for it, each for so long."""
        if self.problem.pipeline != "pipelined":
            return pace.capacity_req_s
        room = min(m.max_batch(n) for m, n in zip(pipeline.memory, split, strict=True))

        def at(running: float) -> Point:
            paced = pace if running == batch else self._pipelines.decode_pace(pipeline, split, running)
            return 0.0, paced.capacity_req_s

        return Rates.of(at, batch, room).beside(waits_s)[1]

    def decode_queue(
        self, pipeline: Pipeline, split: list[int], batch: int, chunk: float = 0.0
    ) -> DecodeQueue:
        """How a decode or colocated replica with these layers and this batch fares under any load."""
        at_once = self._pipelines.at_once(split)

        def tpot_s(requests: float) -> float:
            pace = self._pipelines.decode_pace(pipeline, split, requests / at_once, chunk)
            return pace.token_s if pipeline.role == "colocated" else pace.latency_s

        return DecodeQueue(batch * at_once, tpot_s, self.problem.costs.osl, self.problem.costs.tiled)
