"""What a colocated replica can do that also works for others (hexgen2/region.py), by its times."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cost_model.pipeline import PhaseTimes, mixed_period_s, outgoing_prompts
from hexgen2.region import Point, Region
from hexgen2.search.planning.limits import MixedSteps, least_decodes_s, least_step_s
from hexgen2.search.planning.pipelines import Pipeline, Pipelines, StepTimes

SHARES = (0.15, 0.3, 0.5, 0.7, 0.85)
"""Shares of mixed steps at which a mixed replica's region is looked at."""
TELLING = (SHARES[2], SHARES[-1])
"""Those of them that limit regions most: the former where hops take long, the latter where they do not."""


@dataclass(frozen=True)
class ColocatedLimit:
    """What no plan of a colocated group exceeds: in requests/s of its own, and in work of both phases for
    itself and others (None where no replica works for others)."""

    req_s: float
    region: Region | None

    @classmethod
    def of_each(
        cls, pipelines: Pipelines, groups: Sequence[Sequence[Pipeline]]
    ) -> list[ColocatedLimit | None]:
        """Those of groups that can form these pipelines; None if there are none."""
        found: list[ColocatedLimit | None] = []
        everyone = list(itertools.chain.from_iterable(groups))
        corners = iter(_corners(pipelines, everyone) if pipelines.problem.mixes and everyone else ())
        for group in groups:
            if not group:
                found.append(None)
                continue
            region = None
            if pipelines.problem.mixes:
                points = list(itertools.chain.from_iterable(itertools.islice(corners, len(group))))
                region = Region.around(
                    [*points, *((pipeline.limit_req_s, pipeline.limit_req_s) for pipeline in group)]
                )
            found.append(cls(max(pipeline.limit_req_s for pipeline in group), region))
        return found


def _corners(pipelines: Pipelines, found: Sequence[Pipeline]) -> list[list[Point]]:
    """For each pipeline, corners of a region that no plan with its stages exceeds, however its layers are
    divided."""
    costs, layers, count = pipelines.problem.costs, pipelines.problem.model.layers, len(found)
    chunks, rows = pipelines.chunks, StepTimes(pipelines, found)
    held = np.tile([pipeline.batch / len(pipeline.kinds) for pipeline in found], len(chunks))
    prompts, none = np.repeat(chunks, count), np.zeros_like(held)
    only, mixed, rest = rows.of(prompts, none), rows.of(prompts, held), rows.of(none, held)
    step_s = least_step_s(mixed, layers)
    chains = (MixedSteps(np.full_like(held, share), prompts, mixed.stages) for share in TELLING)
    decode_s = np.maximum(*(least_decodes_s(mixed, rest, layers, chain) for chain in chains))

    def of_each(rates: np.ndarray) -> np.ndarray:
        return rates.reshape(len(chunks), count)

    most_prompts = of_each(prompts / least_step_s(only, layers)).max(axis=0).tolist()
    most_answers = of_each(held / (costs.osl * decode_s)).max(axis=0).tolist()
    both = np.stack([of_each(prompts / step_s), of_each(held / (costs.osl * step_s))]).T.tolist()
    return [
        [(p, 0.0), (0.0, d), *map(tuple, mixtures)]
        for p, d, mixtures in zip(most_prompts, most_answers, both, strict=True)
    ]


def region_of(
    pipelines: Pipelines, pipeline: Pipeline, split: list[int], most: float, chunk: float, both: float
) -> Region:
    """What a colocated replica with these layers can do.

    Parameters
    ----------
    most : requests that it holds if it works for itself
    chunk : prompts in a mixed step, at most
    both : its own requests/s, within the targets
    """
    costs, osl, stages = pipelines.problem.costs, pipelines.problem.costs.osl, len(split)
    # Room is kept for prompts that go on elsewhere.
    room = min(m.max_batch(n) for m, n in zip(pipeline.memory, split, strict=True))
    kept = outgoing_prompts(chunk, stages) * costs.isl / (costs.isl + costs.osl)
    batch = min(most, room - kept)
    if batch < 1:
        return Region.around([(both, both)])
    held = batch / stages

    def times(decodes: float, prompts: float) -> PhaseTimes:
        step = pipelines.mixed_step(pipeline, decodes, prompts)
        return PhaseTimes(step.stage_s(split), step.hop_s, prompts)

    def point(decodes: float, share: float) -> Point:
        mixed = times(decodes, chunk)
        rest = pipelines.timing(pipeline, "decode", decodes) if decodes else None
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
    balanced = pipelines.decode_pace(pipeline, split, int(most), chunk).capacity_req_s
    within = min(1.0, both / balanced)
    corners = [(p * within, d * within) for p, d in (prompts_only, every_step, (0.0, answers))]
    found = Region.around([(both, both), *corners])
    return found if found.balanced <= both * (1 + 1e-9) else found.times(both / found.balanced)
