"""Latency targets: the requests/s that a plan serves while enough of them are in time.

Where both targets are given, a request must be in time in both phases. The phases are taken as independent,
so each must reach the square root of the attainment. Since a request waits for a place in a decode replica
before its prefill, a target for the first token asks for places, too. Beyond the paper, which has no targets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from cost_model.base import CostModel
from cost_model.pipeline import Pace
from cost_model.queueing import DecodeQueue, PrefillQueue, ServiceMix
from hexgen2.goal import Goal

LIMITING = 0.95
"""The shares of requests in time in both phases are powers of the attainment, which add up to 1. Where one
phase limits a colocated replica, this is its power."""


@dataclass(frozen=True)
class Targets:
    """The targets that a share `attainment` of the requests must meet: seconds to the first token, and per
    output token; None where there is no target. mix and osl are the workload's."""

    ttft_s: float | None
    tpot_s: float | None
    attainment: float
    mix: ServiceMix
    osl: float

    @classmethod
    def of(cls, goal: Goal, costs: CostModel) -> Targets:
        """The targets of a goal."""
        return cls(
            goal.ttft_ms / 1e3 if goal.ttft_ms else None,
            goal.tpot_ms / 1e3 if goal.tpot_ms else None,
            goal.attainment,
            ServiceMix.of(costs.model, costs.lengths),
            costs.osl,
        )

    @property
    def given(self) -> bool:
        """Whether there is any target."""
        return self.ttft_s is not None or self.tpot_s is not None

    @property
    def share(self) -> float:
        """The share of requests that each phase must serve in time."""
        return self.attainment if self.ttft_s is None else math.sqrt(self.attainment)

    def prefill_batches(self, largest: float, smallest: float) -> Iterator[float]:
        """Prompts per step worth trying: with a target also fewer, whose steps end sooner."""
        yield largest
        while self.ttft_s is not None and largest / 2 >= smallest:
            largest /= 2
            yield largest

    def both_req_s(self, prompts: Pace, batch: float, decodes: DecodeQueue, decode_req_s: float) -> float:
        """Requests/s of a colocated replica within the targets, whose prompts are computed at that pace, and
        which decodes so many: at equal shares of requests in time in both phases, or at a larger share in
        the phase that limits less."""
        if self.ttft_s is None:
            return decode_req_s
        queue = self.prefill_queue(prompts, batch)
        first = queue.largest_rate(self.ttft_s, self.share)
        if first <= 0 or first == decode_req_s:
            return first
        many, few = self.attainment**LIMITING, self.attainment ** (1 - LIMITING)
        if first < decode_req_s:
            return max(first, min(queue.largest_rate(self.ttft_s, many), decodes.largest_rate(few)))
        return max(decode_req_s, min(queue.largest_rate(self.ttft_s, few), decodes.largest_rate(many)))

    def prefill_req_s(self, pace: Pace, batch: float, above: float = 0.0) -> float:
        """Requests/s of a prefill replica within the target; 0 if it cannot be met, or not with more than
        `above` requests/s."""
        if self.ttft_s is None:
            return pace.capacity_req_s
        queue = self.prefill_queue(pace, batch)
        if above and (pace.capacity_req_s <= above or queue.attained(above, self.ttft_s) < self.share):
            return 0.0
        return queue.largest_rate(self.ttft_s, self.share)

    def prefill_queue(self, pace: Pace, batch: float) -> PrefillQueue:
        """How a prefill replica of that pace fares under any load."""
        return PrefillQueue(pace.capacity_req_s, pace.latency_s, batch, self.mix)

    def decode_req_s(self, pace: Pace, queue: DecodeQueue) -> float:
        """Requests/s of a decode replica within the targets, given places that meet them."""
        return queue.largest_rate(self.share) if self.given else pace.capacity_req_s
