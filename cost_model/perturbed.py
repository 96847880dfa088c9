"""A cost model with the seconds of each type of device and phase times a factor: what if it is off?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from cost_model.base import CostModel, Origin, Phase, StageMemory, TensorGroup, Work
from cost_model.hardware import Accelerator, Link


class PhaseFactors(NamedTuple):
    """What multiplies the seconds of prompts, and of what decodes add to a step."""

    prefill: float = 1.0
    decode: float = 1.0


class PerturbedCosts(CostModel):
    """The nominal cost model with other seconds; memory, bytes and hops stay as they are.

    In a step with both phases, prompts take what they would alone, times their factor, and the decodes what
    they add, times theirs. What a stage takes outside its layers belongs to neither phase, and is multiplied
    by the geometric mean of both factors.

    Parameters
    ----------
    factors : by name of the accelerator; 1 for those that are missing
    """

    def __init__(self, nominal: CostModel, factors: Mapping[str, PhaseFactors]) -> None:
        super().__init__(nominal.model, nominal.lengths, nominal.batch_cap)
        self.nominal, self.factors = nominal, factors
        same = ("name", "calibration", "source", "tiled", "times_expert_parallel")
        vars(self).update({name: getattr(nominal, name) for name in same})

    def layer_work_s(self, group: TensorGroup, work: Work) -> float:
        prefill, decode = self._of(group.accelerator)
        whole_s = self.nominal.layer_work_s(group, work)
        if not work.prompt_tokens or prefill == decode:
            return decode * whole_s
        if not work.decodes:
            return prefill * whole_s
        sampled = max(0.0, work.sampled - work.decodes)
        prompts = Work(work.prompt_tokens, work.prompt_attended, 0.0, 0.0, sampled)
        prompts_s = min(whole_s, self.nominal.layer_work_s(group, prompts))
        return prefill * prompts_s + decode * (whole_s - prompts_s)

    def edge_work_s(self, group: TensorGroup, sampled: float, last: bool) -> float:
        prefill, decode = self._of(group.accelerator)
        return math.sqrt(prefill * decode) * self.nominal.edge_work_s(group, sampled, last)

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
    def kv_bytes_per_layer(self) -> float:
        return self.nominal.kv_bytes_per_layer

    @property
    def kv_to_every_rank(self) -> bool:
        return self.nominal.kv_to_every_rank

    @property
    def activation_bytes_per_token(self) -> float:
        return self.nominal.activation_bytes_per_token

    def _of(self, accelerator: Accelerator) -> PhaseFactors:
        return self.factors.get(accelerator.name, _AS_IT_IS)


_AS_IT_IS = PhaseFactors()
