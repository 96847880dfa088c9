"""A cost model with the seconds of each type of device and phase times a factor: what if it is off?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from cost_model.base import CostModel, TensorGroup, Work
from cost_model.hardware import Accelerator
from cost_model.wrapped import WrappedCosts


class PhaseFactors(NamedTuple):
    """What multiplies the seconds of prompts, and of what decodes add to a step."""

    prefill: float = 1.0
    decode: float = 1.0


class PerturbedCosts(WrappedCosts):
    """The nominal cost model with other seconds; memory, bytes and hops stay as they are.

    In a step with both phases, prompts take what they would alone, times their factor, and the decodes what
    they add, times theirs. What a stage takes outside its layers belongs to neither phase, and is multiplied
    by the geometric mean of both factors.

    Parameters
    ----------
    factors : by name of the accelerator; 1 for those that are missing
    """

    def __init__(self, nominal: CostModel, factors: Mapping[str, PhaseFactors]) -> None:
        super().__init__(nominal)
        self.factors = factors

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

    def layers_work_s(self, group: TensorGroup, work: Work) -> np.ndarray:
        prefill, decode = self._of(group.accelerator)
        whole_s = self.nominal.layers_work_s(group, work)
        if prefill == decode:
            return decode * whole_s
        prompt_tokens, attended, decodes, _, sampled = map(np.asarray, work)
        found = np.where(prompt_tokens > 0, prefill, decode) * whole_s
        both = np.flatnonzero((prompt_tokens > 0) & (decodes > 0))
        none, first = np.zeros(len(both)), np.maximum(0.0, sampled - decodes)[both]
        prompts = Work(prompt_tokens[both], attended[both], none, none, first)  # type: ignore[arg-type]
        prompts_s = np.minimum(whole_s[both], self.nominal.layers_work_s(group, prompts))
        found[both] = prefill * prompts_s + decode * (whole_s[both] - prompts_s)
        return found

    def edge_work_s(self, group: TensorGroup, sampled: float, last: bool) -> float:
        prefill, decode = self._of(group.accelerator)
        return math.sqrt(prefill * decode) * self.nominal.edge_work_s(group, sampled, last)

    def _of(self, accelerator: Accelerator) -> PhaseFactors:
        return self.factors.get(accelerator.name, _AS_IT_IS)


_AS_IT_IS = PhaseFactors()
