"""One model on some devices: times of a prefill and of a decode step, memory, largest batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cost_model.architecture import ModelArchitecture
from cost_model.base import CostModel, Phase, TensorGroup
from cost_model.hardware import Accelerator, Link


@dataclass(frozen=True)
class Shape:
    """`pp` stages of `tp` devices each, all alike and joined by `link`. attention_dp and expert_parallel are
    those of TensorGroup."""

    accelerator: Accelerator
    link: Link
    tp: int
    pp: int = 1
    attention_dp: int = 1
    expert_parallel: int = 1

    @property
    def group(self) -> TensorGroup:
        return TensorGroup(self.accelerator, self.tp, self.link, self.attention_dp, self.expert_parallel)

    def layers(self, model: ModelArchitecture) -> list[int]:
        """Layers of each stage: as even as can be, the first stages take what is over."""
        each, over = divmod(model.layers, self.pp)
        return [each + (stage < over) for stage in range(self.pp)]


@dataclass(frozen=True)
class Estimate:
    """Predicted times, each within about `error` (relative), and bytes on the fullest device.

    prefill_s : of the whole batch of prompts, through all stages
    decode_s : of one step of the batch through all stages, at the mean context (prompt and half the output)
    memory_bytes : with the whole of the batch's requests in the KV cache, which takes kv_bytes of it
    limit_bytes : what the engine may use of a device
    largest_batch : requests whose whole KV cache fits (0: not even one)
    """

    prefill_s: float
    decode_s: float
    error: float
    memory_bytes: float
    kv_bytes: float
    limit_bytes: float
    largest_batch: int

    @property
    def fits(self) -> bool:
        """Whether the batch fits."""
        return self.memory_bytes <= self.limit_bytes


def estimate(
    costs: CostModel,
    shape: Shape,
    batch: int,
) -> Estimate:
    """What a batch takes on that shape, of requests of the cost model's model and lengths."""
    model, group = costs.model, shape.group
    split, last = shape.layers(model), shape.pp - 1

    def walk_s(phase: Phase) -> float:
        """Through all stages, one after the other."""
        layer_s = costs.layer_s(phase, group, batch)
        edges_s = math.fsum(costs.edge_s(phase, group, batch, stage == last) for stage in range(shape.pp))
        return model.layers * layer_s + edges_s + last * costs.hop_s(phase, shape.link, batch)

    memory = [costs.stage_memory("decode", group, stage == 0, stage == last) for stage in range(shape.pp)]
    held = list(zip(memory, split, strict=True))
    fullest, layers = max(held, key=lambda stage: stage[0].needed(stage[1], batch))
    return Estimate(
        prefill_s=walk_s("prefill"),
        decode_s=walk_s("decode"),
        error=costs.error(shape.accelerator),
        memory_bytes=fullest.needed(layers, batch),
        kv_bytes=batch * layers * fullest.per_layer_request,
        limit_bytes=fullest.limit,
        largest_batch=min(stage.max_batch(count) for stage, count in held),
    )
