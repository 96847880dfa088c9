"""The best-case latency of a request, which is the unit of SLO scales.

HexGen-2 (section 2) states deadlines as multiples of the execution latency on a single device. Since no
single device holds a large model, the reference here is one request alone on the fewest H100s that do,
tensor-parallel over NVLink. It is the same for all contenders, whatever they run on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cost_model.base import CostModel, TensorGroup, Work
from cost_model.hardware import CATALOGUE, NO_LINK, interconnect_link
from cost_model.lengths import attended_tokens

REFERENCE = "H100"
_CONTEXTS = (0.0, 1e6)


@dataclass(frozen=True)
class Reference:
    """Latencies of a request that runs alone on `group`."""

    costs: CostModel
    group: TensorGroup

    @classmethod
    def of(cls, costs: CostModel) -> Reference | None:
        """The reference on the fewest cards that hold the model and one request; None if even the largest
        tensor-parallel group does not."""
        card = CATALOGUE[REFERENCE]
        for degree in costs.model.tensor_degrees(64):
            memory = costs.stage_memory("decode", TensorGroup(card, degree, NO_LINK), True, True)
            if memory.max_batch(costs.model.layers) >= 1:
                link = interconnect_link("nvlink", card)[0] if degree > 1 else NO_LINK
                return cls(costs, TensorGroup(card, degree, link))
        return None

    @property
    def name(self) -> str:
        """For example "2xH100"."""
        return f"{self.group.degree}x{self.group.accelerator.name}"

    def ttft_s(self, isl: float) -> float:
        """Seconds of the prefill of isl tokens."""
        window = self.costs.model.window
        return self._step_s(Work(isl, attended_tokens(isl, window), 0.0, 0.0, 1.0))

    def e2el_s(self, isl: np.ndarray, osl: np.ndarray) -> np.ndarray:
        """[n] seconds from a request to its last token. The time of a step is affine in its context."""
        prompts = {int(tokens): self.ttft_s(float(tokens)) for tokens in np.unique(isl)}
        none, far = (self._step_s(Work(0.0, 0.0, 1.0, context, 1.0)) for context in _CONTEXTS)
        per_token = (far - none) / _CONTEXTS[1]
        steps = osl - 1
        context = isl + (osl + 1) / 2
        return np.array([prompts[int(t)] for t in isl]) + steps * (none + per_token * context)

    def _step_s(self, work: Work) -> float:
        layers = self.costs.model.layers * self.costs.layer_work_s(self.group, work)
        return layers + self.costs.edge_work_s(self.group, work.sampled, last=True)
