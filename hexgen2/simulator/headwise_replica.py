"""A colocated replica with attention workers: heads of requests are dispatched, and move (Hetis, section 5).

Heads are dispatched when a prompt begins, by the fitted profiles; what a step takes follows the cost model.
The KV cache of a prompt's heads goes to the workers while it is computed. Each stage dispatches by itself.
Caches that move later go at low priority: steps do not wait for them, and attention goes on where they are
until they have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cost_model.attention import WORKER_LAUNCH_S
from cost_model.base import Work
from cost_model.lengths import context_tokens
from hexgen2.headwise.allocation import MOST_MOVES, STEPS_PER_LOOK, Allocation, Move
from hexgen2.headwise.profile import DeviceProfile, kv_head_token_bytes, profiled
from hexgen2.prediction.headwise_times import HeadwiseTimes
from hexgen2.simulator.batching import Batching
from hexgen2.simulator.cohort import Request
from hexgen2.simulator.options import HeadOptions
from hexgen2.simulator.pipelined_replica import Decodes, PipelinedReplica
from hexgen2.simulator.prefill_replica import Begun, nobody
from hexgen2.simulator.records import Records, ReplicaRecord
from runtime.routing.kv_budget import KvBudget


class HeadwiseReplica(PipelinedReplica):
    """One replica whose decode attention is divided by heads; parameters are those of PipelinedReplica."""

    together = False

    def __init__(
        self,
        batching: Batching,
        times: HeadwiseTimes,
        isl: Sequence[int],
        osl: Sequence[int],
        kv_budget: KvBudget,
        records: Records,
        record: ReplicaRecord,
        schedule: Callable,
        ended: Callable[[int, float], None],
        begun: Begun = nobody,
        computed: Callable[[Any, float], None] = nobody,
        heads: HeadOptions = HeadOptions(),  # noqa: B008
    ) -> None:
        super().__init__(
            batching, times, isl, osl, kv_budget, records, record, schedule, ended, begun, computed
        )
        self._head_times, self._options, self._looked = times, heads, 0
        model = times.costs.model
        self._kv_heads = model.kv_heads
        token_bytes = model.kv_bytes_per_token_layer
        self._head_bytes = kv_head_token_bytes(model)
        rng = np.random.default_rng(heads.seed)
        self._allocations = [
            Allocation(
                _believed(profiled(times, s), heads.profile_error, rng),
                model.heads // model.kv_heads,
                model.kv_heads,
                self._head_bytes,
                [device.kv_tokens * token_bytes for device in devices],
            )
            for s, devices in enumerate(times.devices)
        ]
        # When the link of each device has sent the caches that move.
        self._hauled_s = [0.0] * len(times.devices[0])

    # -- requests come and go

    def _fits(self, request: Request) -> bool:
        return super()._fits(request) and all(own.has_room(request.tokens) for own in self._allocations)

    def _enter(self, request: Request) -> None:
        super()._enter(request)
        for allocation in self._allocations:
            placed = allocation.place({request.index: float(request.held or request.tokens)})
            assert placed, "a request that fits finds room for its heads"

    def _leave(self, request: Request) -> None:
        super()._leave(request)
        for allocation in self._allocations:
            allocation.remove(request.index)

    # -- steps

    def _decodes(self, now: float) -> Decodes:
        self._make_room(now)
        return super()._decodes(now)

    def _make_room(self, now: float) -> None:
        """Dispatch requests anew where attention is out of balance or memory is short, and preempt those that
        came last where it is exhausted."""
        self._looked += 1
        look = self._looked % STEPS_PER_LOOK == 0
        for s, allocation in enumerate(self._allocations):
            if self._options.balances_memory:
                for _ in range(MOST_MOVES):
                    if not self._haul(s, allocation.crowded_request(), now):
                        break
            if look and self._options.theta is not None:
                self._haul(s, allocation.slow_request(self._options.theta), now)
            for index in allocation.overfull_requests():
                if not allocation.overfull_requests():
                    break
                request = self._running[index]
                if not request.steps:
                    self._unfinished.pop(index, None)
                    self._preempt(request, now)

    def _haul(self, stage: int, move: Move | None, now: float) -> bool:
        """Send the caches of the heads that move, at low priority: those of a link one after another, of all
        layers of the stage. False if none moves."""
        if move is None:
            return False
        allocation, devices = self._allocations[stage], self._head_times.devices[stage]
        layers = self._head_times.layers[stage]
        sent = allocation.begin(move) * layers
        each = sent / max(1.0, float(move.added.sum()))
        arrives_s = now
        for d, device in enumerate(devices):
            if device.link is None:
                continue
            count = abs(float(move.new[d] - move.old[d]))
            if count:
                start_s = max(now, self._hauled_s[d])
                self._hauled_s[d] = (
                    start_s + device.link.latency_s + count * each / device.link.bandwidth_bytes_s
                )
                arrives_s = max(arrives_s, self._hauled_s[d])
        self._record.redispatches += 1
        self._record.hauled_bytes += sent
        self._schedule(arrives_s, self._arrived, (stage, move))
        return True

    def _arrived(self, now: float, what: tuple[int, Move]) -> None:
        if self._alive:
            stage, move = what
            self._allocations[stage].finish(move)
            self._go_on(now, None)

    def _step_s(
        self, work: Work, decodes: list[Request], chunks: list[tuple[Request, int]]
    ) -> tuple[Sequence[float], Sequence[float]]:
        times, window = self._head_times, self._window
        stage_s, hop_s = times.dense(work._replace(context=0.0))
        found, busy_s = list(stage_s), [0.0] * len(self._hauled_s)
        own = [request for request in decodes if request.tokens > request.prompt]
        context = np.array([r.tokens if window is None else context_tokens(r.tokens, window) for r in own])
        held = np.array([float(r.held) for r in decodes])
        for s, allocation in enumerate(self._allocations):
            if decodes:
                allocation.grow(allocation.rows(r.index for r in decodes), held)
            if own:
                heads = allocation.heads(allocation.rows(r.index for r in own))
                attention_s = self._attention_s(s, len(own), heads, context, busy_s)
                found[s] += times.layers[s] * attention_s
            for d, device in enumerate(times.devices[s]):
                if device.link is not None and chunks:
                    sent = sum(
                        float(allocation.heads(allocation.rows([r.index]))[0, d]) * n for r, n in chunks
                    )
                    cache_s = sent * self._head_bytes * times.layers[s] / device.link.bandwidth_bytes_s
                    found[s] = max(found[s], cache_s)
        # Another step follows in each stage, and all share the workers.
        slowest = max(range(len(found)), key=found.__getitem__)
        found[slowest] = max(found[slowest], *busy_s)
        return found, hop_s

    def _attention_s(
        self, stage: int, decodes: int, heads: np.ndarray, context: np.ndarray, busy_s: list[float]
    ) -> float:
        """Seconds of a layer's attention by the cost model; adds what each worker does to busy_s."""
        times = self._head_times
        counts = (heads.sum(axis=0) / self._kv_heads).tolist()
        tokens = ((heads * context[:, None]).sum(axis=0) / self._kv_heads).tolist()
        most_s = 0.0
        for d, (device, count, read) in enumerate(zip(times.devices[stage], counts, tokens, strict=True)):
            if not count:
                continue
            seconds = times.token_s(device.group, float(decodes)) * read
            if device.link is not None:
                exchange_s = times.transfer_s(device.link, count)
                busy_s[d] += times.layers[stage] * (seconds + exchange_s + WORKER_LAUNCH_S)
                seconds += WORKER_LAUNCH_S + 2 * device.link.latency_s + exchange_s
            most_s = max(most_s, seconds)
        return most_s


def _believed(
    profiles: Sequence[DeviceProfile], error: float, rng: np.random.Generator
) -> list[DeviceProfile]:
    """The profiles, each number off by up to this share, alike for devices that are alike."""
    if error == 0:
        return list(profiles)
    drawn: dict[DeviceProfile, DeviceProfile] = {}
    for profile in profiles:
        if profile not in drawn:
            drawn[profile] = profile.off_by((1 + error * rng.uniform(-1, 1, 5)).tolist())
    return [drawn[profile] for profile in profiles]
