"""What a colocated replica can do that also works for others (hexgen2/region.py), by its times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from cost_model.base import CostModel
from cost_model.pipeline import PhaseTimes, kept_prompts, mixed_period_s
from hexgen2.region import Point, Region
from hexgen2.search.planning.contenders import Contenders, PlanLimit
from hexgen2.search.planning.limits import MixedSteps, least_decodes_s, least_step_s
from hexgen2.search.planning.pipeline_rows import Steps, StepTimes
from hexgen2.search.planning.pipelines import Pipeline, Pipelines
from hexgen2.search.planning.waiting_prompts import Rates

TILE = 128
"""Tokens by which the time of a step's products jumps."""
SHARES = (0.3, 0.5, 0.85)
"""Shares of mixed steps at which a mixed replica's region is looked at."""
TELLING = SHARES[1:]
"""Those of them that limit regions most: the former where hops take long, the latter where they do not."""


def limits_of(pipelines: Pipelines, role: str, found: Contenders) -> dict[int, PlanLimit]:
    """The limits of the groups that these pipelines are contenders of, by their numbers."""
    rows = found.rows
    if not len(rows):
        return {}
    numbers, first = np.unique(rows.group, return_index=True)
    most_req_s = np.maximum.reduceat(found.most, first).tolist()
    regions: Sequence[Region | None] = [None] * len(numbers)
    if role == "colocated" and pipelines.problem.mixes:
        regions = _regions(pipelines, found, first, most_req_s)
    limits = zip(numbers.tolist(), most_req_s, regions, strict=True)
    return {number: PlanLimit(req_s, region) for number, req_s, region in limits}


def _regions(
    pipelines: Pipelines, found: Contenders, first: np.ndarray, most_req_s: list[float]
) -> list[Region]:
    """Regions that no plan of a group exceeds, however its layers are divided.

    Parameters
    ----------
    first : [g] the first pipeline of each group
    most_req_s : the limit of each group
    """
    costs, layers, rows = pipelines.problem.costs, pipelines.problem.model.layers, found.rows
    chunks, count, times = pipelines.chunks_for_others or pipelines.chunks, len(rows), StepTimes(costs, rows)
    kept = _room_kept(costs, 0.0, 0.0, rows.stages, 0.0)
    room = rows.largest_batch("decode", costs.batch_cap + math.ceil(kept.max()), layers)
    # Without targets, the size of chunks does not limit the batch.
    most = found.batch[:, :1].repeat(len(chunks), 1) if pipelines.chunks_for_others else found.batch
    batch = np.minimum(most.T.ravel(), np.tile(room - kept, len(chunks)))
    held = np.maximum(batch, 1.0) / np.tile(rows.stages, len(chunks))
    # Where there is no room for others' prompts, or another size of chunk is better and the only one tried, a
    # replica has no such region.
    able = (batch >= 1).reshape(len(chunks), count)
    if not pipelines.chunks_for_others:
        able &= (found.of_chunks >= found.least[:, None]).T
    prompts = np.repeat(chunks, count)
    steps = Steps.of(prompts, held)
    none = np.zeros_like(steps.prompts)
    only, mixed = times.of(steps._replace(decodes=none)), times.of(steps)
    rest = times.of(steps._replace(prompts=none))
    step_s = least_step_s(mixed, layers)
    below = _below_jump(steps.prompts * costs.isl, steps.decodes) if costs.tiled else steps.decodes
    fewer, fewer_step_s = below[steps.kind], least_step_s(times.of(steps._replace(decodes=below)), layers)
    chains = (MixedSteps(np.full_like(held, share), prompts, mixed.stages) for share in TELLING)
    decode_s = np.maximum(*(least_decodes_s(mixed, rest, layers, chain) for chain in chains))

    def of_each(rates: np.ndarray) -> np.ndarray:
        return np.where(able, rates.reshape(len(chunks), count), 0.0)

    most_prompts = of_each(prompts / least_step_s(only, layers)).max(axis=0)
    most_answers = of_each(held / (costs.osl * decode_s)).max(axis=0)
    alone = (np.maximum.reduceat(most, first).tolist() for most in (most_prompts, most_answers))
    points = ((prompts / step_s, held / step_s), (prompts / fewer_step_s, fewer / fewer_step_s))
    both = np.concatenate([np.stack([of_each(p), of_each(d / costs.osl)]) for p, d in points], axis=1)
    mixtures = (part.reshape(-1, 2).tolist() for part in np.split(both.T, first[1:]))
    return [
        Region.around([(p, 0.0), (0.0, d), (own, own), *map(tuple, mixed)])
        for p, d, own, mixed in zip(*alone, most_req_s, mixtures, strict=True)
    ]


def _below_jump(prompt_tokens: np.ndarray, decodes: np.ndarray) -> np.ndarray:
    """So many decodes, or the few less with which a step's tokens fill whole tiles."""
    whole = np.floor((prompt_tokens + decodes) / TILE) * TILE - prompt_tokens
    return np.where((whole < decodes) & (whole >= decodes / 2), whole, decodes)


def _room_kept(costs: CostModel, share: float, chunk: float, stages: Any, batch: float) -> Any:
    """Requests for which a replica of so many stages (or [n] replicas) and `batch` requests has no room,
    because it keeps room for prompts that go on elsewhere, which are that share of all."""
    return kept_prompts(share, chunk, stages, batch) * costs.isl / (costs.isl + costs.osl)


@dataclass(frozen=True)
class Outline:
    """What a colocated replica can do, before it is known for how long requests wait for the prompts of
    others.

    Attributes
    ----------
    both : its own requests/s, within the targets; balanced : the same by its times alone
    prompts_only : with prompts only
    sending : with a chunk in every step, if it computes more prompts than it decodes answers then
    every_step, none : with a chunk in every step, and in none
    answers : the most answers/s without prompts that a line from there allows
    """

    both: float
    balanced: float
    prompts_only: Point
    sending: Point | None
    every_step: Rates
    none: Rates
    answers: float

    def region(self, waits_s: float) -> Region:
        """The region where requests hold room for so long whose prompts others compute."""
        answers = self.answers * (self.none.beside(waits_s)[1] / self.none.full[1])
        both_phases = self.sending or self.every_step.beside(waits_s)
        # Of its own requests alone, the plan knows better how prompts and answers come.
        within = min(1.0, self.both / self.balanced)
        corners = [(p * within, d * within) for p, d in (self.prompts_only, both_phases, (0.0, answers))]
        found = Region.around([(self.both, self.both), *corners])
        too_much = found.balanced > self.both * (1 + 1e-9)
        return found.times(self.both / found.balanced) if too_much else found


def outline_of(
    pipelines: Pipelines, pipeline: Pipeline, split: list[int], most: float, chunk: float, both: float
) -> Outline | None:
    """What a colocated replica with these layers can do; None if it has no room for the prompts of others.

    Parameters
    ----------
    most : requests that it holds if it works for itself
    chunk : prompts in a mixed step, at most
    both : its own requests/s, within the targets
    """
    costs, osl, stages = pipelines.problem.costs, pipelines.problem.costs.osl, len(split)
    room = min(m.max_batch(n) for m, n in zip(pipeline.memory, split, strict=True))
    # Those that take more answers than they compute prompts send nothing.
    taking, sending = (room - float(_room_kept(costs, share, chunk, stages, most)) for share in (0.0, 1.0))
    if min(most, sending) < 1:
        return None

    @cache
    def times(decodes: float) -> tuple[PhaseTimes, PhaseTimes]:
        """Of steps with so many decodes: of one with a chunk beside them, and of one without."""
        step = pipelines.mixed_step(pipeline, decodes, chunk)
        mixed = PhaseTimes(step.stage_s(split), step.hop_s, chunk)
        if not decodes:
            return mixed, mixed
        rest = pipelines.timing(pipeline, "decode", decodes)
        return mixed, PhaseTimes(rest.stage_s(split), rest.hop_s, decodes)

    def point(decodes: float, share: float) -> Point:
        period_s = mixed_period_s(*times(decodes), share)
        return share * chunk / period_s, decodes / (osl * period_s)

    def rates(share: float) -> Rates:
        return Rates.of(lambda batch: point(batch / stages, share), min(most, taking), taking)

    # The engine spreads decodes over all steps: as long as there are any, prompts come in chunks.
    prompts_only, every_step, none = point(0.0, 1.0), rates(1.0), rates(0.0)
    most_prompts, answers = every_step.full[0], none.full[1]
    for p, d in (point(none.batch / stages, share) for share in SHARES if stages > 1):
        if p < most_prompts:  # Where one step in a pipeline delays all, less than on a line in between.
            answers = min(answers, d + (d - every_step.full[1]) * p / (most_prompts - p))
    takes = every_step.full[0] <= every_step.full[1]
    sent = None if takes else point(min(most, sending) / stages, 1.0)
    balanced = pipelines.decode_pace(pipeline, split, int(most), chunk).capacity_req_s
    return Outline(both, balanced, prompts_only, sent, every_step, none, answers)
