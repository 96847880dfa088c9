"""Tokens/s of a node that holds a range of layers, by the cost model."""

from __future__ import annotations

import math
from typing import NamedTuple

from cost_model.base import CostModel, TensorGroup, Work

Range = tuple[int, int]
"""Layers [first, end)."""


def requests_held(costs: CostModel, group: TensorGroup, held: Range, layers: int) -> int:
    """Requests whose KV caches fit beside the weights of a range; 0 if the range does not fit."""
    memory = costs.stage_memory("decode", group, first=held[0] == 0, last=held[1] == layers)
    return min(costs.batch_cap, memory.max_batch(held[1] - held[0]))


def lone_s(costs: CostModel, group: TensorGroup, count: int, last: bool) -> float:
    """Seconds of a decode step of one request with no context: what a step takes at least, mostly to read
    weights."""
    layer_s = costs.layer_work_s(group, Work(0.0, 0.0, 1.0, 0.0, 1.0))
    return count * layer_s + costs.edge_work_s(group, 1.0, last)


class StepScale(NamedTuple):
    """Corrects step times so that a node passes given tokens/s: `least` times what a step takes at least, and
    `more` times the rest, which grows with its work."""

    least: float = 1.0
    more: float = 1.0

    def __call__(self, step_s: float, lone_s: float) -> float:
        """The corrected seconds of a step."""
        return self.least * lone_s + self.more * max(0.0, step_s - lone_s)


def range_tok_s(costs: CostModel, group: TensorGroup, count: int, last: bool, requests: float) -> float:
    """Tokens/s, of prompts and answers, of a node that computes `count` layers for so many requests.

    A node spends on a request one share of a prefill batch and, for each answer token, one of a decode step.
    The requests that it holds are in all stages of a path at once, so that it has one in L / count of them in
    a step: "pipelined" in cost_model/pipeline.py, as if all nodes were alike.

    Parameters
    ----------
    last : whether the last layer is among them
    """
    (prompt_s, prompts), (step_s, batch) = _steps(costs, group, count, last, requests)
    return (costs.isl + costs.osl) / (prompt_s / prompts + costs.osl * step_s / batch)


def scale_to(
    tok_s: float, costs: CostModel, group: TensorGroup, count: int, last: bool, requests: float
) -> StepScale:
    """The correction by which range_tok_s would be `tok_s`. What a step takes at least stays as it is, unless
    that alone is too long."""
    (prompt_s, prompts), (step_s, batch) = _steps(costs, group, count, last, requests)
    wanted_s, least_s = (costs.isl + costs.osl) / tok_s, lone_s(costs, group, count, last)
    fixed_s = least_s / prompts + costs.osl * least_s / batch
    all_s = prompt_s / prompts + costs.osl * step_s / batch
    if wanted_s <= fixed_s or all_s <= fixed_s:
        return StepScale(wanted_s / all_s, wanted_s / all_s)
    return StepScale(1.0, (wanted_s - fixed_s) / (all_s - fixed_s))


def _steps(
    costs: CostModel, group: TensorGroup, count: int, last: bool, requests: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds of a step with prompts and how many these are; of a decode step and its requests, which are no
    less than a whole one takes."""
    prompts, stages = costs.prefill_batch(), math.ceil(costs.model.layers / count)
    batch = max(1.0, requests / stages)
    step_s = count * costs.layer_s("decode", group, batch) + costs.edge_s("decode", group, batch, last)
    prompt_s = count * costs.layer_s("prefill", group, prompts)
    prompt_s += costs.edge_s("prefill", group, prompts, last)
    return (prompt_s, prompts), (step_s, requests / stages)
