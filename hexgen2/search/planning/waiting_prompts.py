"""Room that requests hold in a replica before they decode there, while others compute their prompts.

A request has room on both sides from the start, since each layer is sent once it is computed. Which replicas
will send to one is not known yet when it is planned; they are taken to be PREFILL_AHEAD times as fast as its
own stages. Once a solution says which they are, it counts how long they take, if that is longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cost_model.base import CostModel
from cost_model.pipeline import prefill_pace
from hexgen2.region import Point
from hexgen2.search.planning.pipelines import Pipeline, Pipelines

if TYPE_CHECKING:
    from hexgen2.search.planning.plan import GroupPlan

PREFILL_AHEAD = 2.0
"""Replicas that prefill are chosen for that, and taken to be so many times as fast at it as those that
decode. An assumption; benchmarks/search/planned_throughput.py shows what it does to planned requests/s."""

FEWER = 0.75
"""Rates are taken as linear in the requests that run, as between all of them and this share."""
MIXED_WAIT = 2.0
"""A prompt is in a mixed replica for so many times as long as its chunks take."""
_LEAST_S, _LEVEL = 1e-3, 1.15
"""Mean waiting times are rounded down to the first times a power of the second, so that what replicas do
beside them need not be looked at too often."""


def waiting_s(pipelines: Pipelines, pipeline: Pipeline, split: list[int]) -> float:
    """Seconds for which a request whose prompt others compute holds room in a replica with these layers
    before it decodes: of the room of a running one."""
    costs = pipelines.problem.costs
    prompts = costs.prefill_batch()
    prefill = pipelines.timing(pipeline, "prefill", prompts)
    lead_s = prefill_pace("pipelined", prefill.stage_s(split), prefill.hop_s, prompts).latency_s
    return lead_s / PREFILL_AHEAD * _share_held(costs)


def mean_waiting_s(costs: CostModel, senders: Sequence[tuple[str, GroupPlan, float]]) -> float | None:
    """The same, of the prompts that replicas with these roles and plans compute, so many per second each;
    one of few values. None if there are none."""
    total = math.fsum(req_s for _, _, req_s in senders)
    if total <= 0:
        return None
    mean = math.fsum(req_s * _lead_s(role, plan) for role, plan, req_s in senders) / total
    level = _LEAST_S
    while level * _LEVEL <= mean * _share_held(costs):
        level *= _LEVEL
    return level


def _lead_s(role: str, plan: GroupPlan) -> float:
    """Seconds from when a prompt is sent to a replica until it is computed: it waits for half a step of a
    prefill replica, or as long as it takes in a mixed one, where others wait, too."""
    if role == "prefill":
        return plan.latency_s + plan.batch / (2 * plan.capacity_req_s)
    return MIXED_WAIT * plan.latency_s


def _share_held(costs: CostModel) -> float:
    """The room of a request that waits, in that of one that runs: admission keeps half of an output's tokens
    free for each (see kv_budget.growth_tokens)."""
    return (costs.isl + costs.osl / 2) / (costs.isl + costs.osl)


@dataclass(frozen=True)
class Rates:
    """Prompts/s and answers/s of a replica that runs `batch` requests, and a share FEWER of them; in between,
    they grow about linearly. It has room for `room` requests, waiting ones included."""

    batch: float
    room: float
    full: Point
    fewer: Point

    @classmethod
    def of(cls, at: Callable[[float], Point], batch: float, room: float) -> Rates:
        """From what it does while so many requests run."""
        return cls(batch, room, at(batch), at(FEWER * batch))

    def beside(self, waits_s: float) -> Point:
        """What it does beside the requests that wait for so long for the prompts of others."""
        (p, d), (q, e) = self.full, self.fewer
        span = (1 - FEWER) * self.batch
        prompts, answers = (p - q) / span, (d - e) / span
        # As many run as have room beside those that wait: batch - missing = room - waits_s * received.
        lost = answers - prompts
        spare = self.room - self.batch
        received = (d - p + lost * spare) / (1 + lost * waits_s)
        missing = min(max(0.0, waits_s * received - spare), self.batch - 1)
        return p - prompts * missing, max(0.0, d - answers * missing)
