"""The simulator's replicas outside the simulator, with made-up step times and a clock."""

from __future__ import annotations

import heapq
import itertools
from types import SimpleNamespace

import numpy as np

from cost_model.base import Work
from hexgen2.simulator.batching import Batching, Policy
from hexgen2.simulator.decode_replica import DecodeReplica
from hexgen2.simulator.pipelined_replica import PipelinedReplica
from hexgen2.simulator.records import Records, ReplicaRecord
from hexgen2.workload.requests import Requests
from runtime.routing.kv_budget import KvBudget
from runtime.routing.windowed_room import WindowedAccount


class Times:
    """Step times of stages that take 10 units and one unit per token; later stages take a little less."""

    def __init__(self, stages: int = 1, unit_s: float = 1e-3) -> None:
        self._unit_s = unit_s
        self.stages = self.in_flight = stages
        self.costs = SimpleNamespace(model=SimpleNamespace(window=None))

    def step(self, work):
        own = self._unit_s * (10 + work.prompt_tokens + work.decodes)
        return [own * (1 - j / 8) for j in range(self.stages)], [2 * self._unit_s] * (self.stages - 1)

    def turn_s(self, works):
        steps = [self.step(work) for work in works]
        longest = max(sum(stage_s) + sum(hop_s) for stage_s, hop_s in steps)
        return max(longest, sum(stage_s[0] for stage_s, _ in steps))

    def decode_turn(self, requests):
        count = min(self.stages, requests)
        return ((self.turn_s([Work(0.0, 0.0, requests / count, 0.0, requests / count)] * count), 0.0),)


class Clock:
    """The events of a simulation. Those of the same time run in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.events, self.count = [], itertools.count()

    def schedule(self, time_s, call, *arguments) -> None:
        heapq.heappush(self.events, (time_s, 1, next(self.count), call, arguments))

    def schedule_first(self, time_s, call, *arguments) -> None:
        """Schedule an event before all others of its time."""
        heapq.heappush(self.events, (time_s, 0, next(self.count), call, arguments))

    def run(self) -> None:
        while self.events:
            now, _, _, call, arguments = heapq.heappop(self.events)
            call(now, *arguments)


def engine_of(
    rows,
    kv_tokens: int,
    places: int,
    batching: Batching | Policy = "mixed",
    times: Times | None = None,
    windowed: WindowedAccount | None = None,
):
    """An engine with its clock and records, for requests (arrival_s, isl, osl)."""
    arrival_s, isl, osl = (np.array(column) for column in zip(*rows, strict=True))
    records, clock = Records(Requests(arrival_s, isl, osl, "by hand")), Clock()
    budget, record = KvBudget(kv_tokens, places, windowed=windowed), ReplicaRecord()
    if isinstance(batching, str):
        batching = Batching(batching)
    lengths, times = (isl.tolist(), osl.tolist()), times or Times()
    kind = DecodeReplica if times.in_flight == 1 else PipelinedReplica
    engine = kind(batching, times, *lengths, budget, records, record, clock.schedule, records.ended)
    return engine, clock, records, record
