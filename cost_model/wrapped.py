"""A cost model around another: it says the same, but for what its subclasses say otherwise."""

from __future__ import annotations

from cost_model.base import CostModel, Origin, Phase, StageMemory, TensorGroup, Work
from cost_model.hardware import Accelerator, Link
from cost_model.lengths import Window

_SAME = ("name", "calibration", "source", "tiled", "times_expert_parallel")


class WrappedCosts(CostModel):
    """The nominal cost model. Subclasses override what they change."""

    def __init__(self, nominal: CostModel) -> None:
        super().__init__(nominal.model, nominal.lengths, nominal.batch_cap)
        self.nominal = nominal
        vars(self).update({name: getattr(nominal, name) for name in _SAME})

    def layer_work_s(self, group: TensorGroup, work: Work) -> float:
        return self.nominal.layer_work_s(group, work)

    def edge_work_s(self, group: TensorGroup, sampled: float, last: bool) -> float:
        return self.nominal.edge_work_s(group, sampled, last)

    def hop_work_s(self, link: Link, tokens: float) -> float:
        return self.nominal.hop_work_s(link, tokens)

    def fastest_batch(self, phase: Phase, group: TensorGroup, most: float) -> float:
        return self.nominal.fastest_batch(phase, group, most)

    def stage_memory(self, phase: Phase, group: TensorGroup, first: bool, last: bool) -> StageMemory:
        return self.nominal.stage_memory(phase, group, first, last)

    def prefill_batch(self) -> float:
        return self.nominal.prefill_batch()

    def error(self, accelerator: Accelerator) -> float:
        return self.nominal.error(accelerator)

    def measured(self, accelerator: Accelerator) -> bool:
        return self.nominal.measured(accelerator)

    def first_token_s(self, accelerator: Accelerator) -> float:
        return self.nominal.first_token_s(accelerator)

    def tokens_per_step(self, version: str) -> float:
        return self.nominal.tokens_per_step(version)

    @property
    def origin(self) -> Origin:
        return self.nominal.origin

    @property
    def kv_window(self) -> Window | None:
        return self.nominal.kv_window

    @property
    def kv_bytes_per_layer(self) -> float:
        return self.nominal.kv_bytes_per_layer

    @property
    def kv_to_every_rank(self) -> bool:
        return self.nominal.kv_to_every_rank

    @property
    def activation_bytes_per_token(self) -> float:
        return self.nominal.activation_bytes_per_token
