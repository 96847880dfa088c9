"""Step times of a replica whose decode attention is divided by heads between its own GPUs and attention
workers (Hetis, SC 2025, section 4.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from cost_model.attention import WORKER_LAUNCH_S, token_s, vector_bytes
from cost_model.base import CostModel, TensorGroup, Work
from cost_model.hardware import NO_LINK, Accelerator, Link
from cost_model.pipeline import PipelineSemantics
from hexgen2.attention_workers import AttentionWorker, devices_requests
from hexgen2.cluster import Cluster
from hexgen2.placement import Replica
from hexgen2.prediction.step_times import StepTimes


class Device(NamedTuple):
    """What takes a part of a stage's attention: the stage's own GPUs together (link None), or a worker.

    kv_tokens : tokens of KV cache, with all heads in all layers of the stage, that it has memory for
    """

    group: TensorGroup
    link: Link | None
    kv_tokens: float


class Line(NamedTuple):
    """Seconds of a device for a share of a layer's attention: fixed_s + share * share_s if it has any."""

    fixed_s: float
    share_s: float
    most: float


def level(lines: Sequence[Line]) -> tuple[float, list[float]]:
    """The least time within which devices take all heads together, and the share of each: all that take part
    end at the same time, unless they have no more room. Where all have too little room together, each has as
    much more than that.
    """
    most = math.fsum(line.most for line in lines)
    if most < 1:
        lines = [line._replace(most=line.most / most if most > 0 else 1.0 / len(lines)) for line in lines]
    ends = {line.fixed_s for line in lines} | {line.fixed_s + line.most * line.share_s for line in lines}
    low_s, low = 0.0, 0.0
    for end_s in sorted(ends):
        taken = math.fsum(_share(line, end_s) for line in lines)
        if taken >= 1:
            # In between the sum of the shares is linear.
            part = (1 - low) / (taken - low) if taken > low else 1.0
            at_s = low_s + part * (end_s - low_s)
            return at_s, [_share(line, at_s) for line in lines]
        low_s, low = end_s, taken
    return low_s, [line.most for line in lines]


def _share(line: Line, at_s: float) -> float:
    if at_s <= line.fixed_s:
        return 0.0
    if line.share_s <= 0:
        return line.most
    return min(line.most, (at_s - line.fixed_s) / line.share_s)


class HeadwiseTimes(StepTimes):
    """The step times of a replica with attention workers.

    `step` divides heads as evenly in time as memory allows, as the dispatcher does; `dense` is a step without
    decode attention. All stages of the replica share its workers: a step takes at least as long on its
    slowest stage as its attention keeps the busiest worker busy in all stages together, since another step
    follows in each.

    Attributes
    ----------
    devices : for each stage, its own GPUs, then each worker
    """

    def __init__(
        self,
        replica: Replica,
        workers: Sequence[AttentionWorker],
        cluster: Cluster,
        costs: CostModel,
        semantics: PipelineSemantics,
    ) -> None:
        super().__init__(replica, cluster, costs, semantics)
        self._vector_bytes = vector_bytes(costs.model)
        tokens = costs.lengths.kv_tokens_decode(costs.model.window)
        held = devices_requests(replica, workers, cluster, costs)
        self.devices = [
            [
                Device(group, None, max(0.0, own[0] * tokens)),
                *(
                    Device(TensorGroup(_card(cluster, w.gpu), 1, NO_LINK), link, requests * tokens)
                    for w, link, requests in zip(
                        workers, _links(cluster, stage.gpus, workers), own[1:], strict=True
                    )
                ),
            ]
            for stage, group, own in zip(replica.stages, self.groups, held, strict=True)
        ]
        self.token_s = lru_cache(1 << 12)(self._token_s)
        self.dense = lru_cache(1 << 13)(self._dense)
        self._known_step = lru_cache(1 << 13)(self._step)

    def step(self, work: Work) -> tuple[Sequence[float], Sequence[float]]:
        return self._known_step(work)

    def _step(self, work: Work) -> tuple[Sequence[float], Sequence[float]]:
        stage_s, hop_s = self.dense(work._replace(context=0.0))
        if work.context <= 0:
            return stage_s, hop_s
        found, busy_s = list(stage_s), [0.0] * len(self.devices[0])
        for s, devices in enumerate(self.devices):
            lines = self._lines(devices, work)
            seconds, shares = level(lines)
            found[s] += self.layers[s] * seconds
            for d, (line, share) in enumerate(zip(lines, shares, strict=True)):
                if d and share:
                    busy_s[d] += self.layers[s] * (WORKER_LAUNCH_S + share * line.share_s)
        slowest = max(range(self.stages), key=found.__getitem__)
        found[slowest] = max(found[slowest], *busy_s)
        return found, hop_s

    def _dense(self, work: Work) -> tuple[Sequence[float], Sequence[float]]:
        return StepTimes._step(self, work)

    def _lines(self, devices: Sequence[Device], work: Work) -> list[Line]:
        lines, known = [], dict[tuple, tuple[float, float]]()
        for device in devices:
            alike = device.group, device.link
            if alike not in known:
                known[alike] = self._line(*alike, work)
            # The requests of the other stages' steps hold as much.
            lines.append(Line(*known[alike], min(1.0, device.kv_tokens / (work.context * self.stages))))
        return lines

    def _line(self, group: TensorGroup, link: Link | None, work: Work) -> tuple[float, float]:
        share_s = self.token_s(group, work.decodes) * work.context
        if link is None:
            return 0.0, share_s
        return WORKER_LAUNCH_S + 2 * link.latency_s, share_s + self.transfer_s(link, work.decodes)

    def transfer_s(self, link: Link, decodes: float) -> float:
        """Seconds on a worker's link for the vectors of so many decodes with all heads in one layer."""
        return decodes * self._vector_bytes / link.bandwidth_bytes_s

    def _token_s(self, group: TensorGroup, decodes: float) -> float:
        return token_s(self.costs, group, max(1.0, decodes))


def step_times(
    replica: Replica,
    workers: Sequence[AttentionWorker],
    cluster: Cluster,
    costs: CostModel,
    semantics: PipelineSemantics,
) -> StepTimes:
    """The step times of a replica, with or without attention workers."""
    if workers:
        return HeadwiseTimes(replica, workers, cluster, costs, semantics)
    return StepTimes(replica, cluster, costs, semantics)


def _links(cluster: Cluster, gpus: Sequence[str], workers: Sequence[AttentionWorker]) -> list[Link]:
    """From a stage to each worker, the slowest link of any of its GPUs. Workers of a node that the stage is
    not on share its network card, which none has more than its part of."""
    own = cluster.indices(gpus)
    found, nodes = [], cluster.nodes_of(worker.gpu for worker in workers)
    for worker, node in zip(workers, nodes, strict=True):
        there = cluster.index(worker.gpu)
        links = [cluster.link(gpu, there) for gpu in own]
        sharing = nodes.count(node) if all(cluster.node_of[gpu] != node for gpu in own) else 1
        bandwidth = min(link.bandwidth_bytes_s for link in links) / sharing
        found.append(Link(bandwidth, max(link.latency_s for link in links)))
    return found


def _card(cluster: Cluster, gpu: str) -> Accelerator:
    return cluster.accelerators[cluster.index(gpu)]
