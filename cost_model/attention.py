"""Decode attention apart from the rest of a layer: its time on other devices than those with the weights.

A cost model's layer takes a time that is affine in the context that decodes read; what is proportional to it
is attention, and all else (products with weights, attention over prompts, launches, communication) is dense.
"""

from __future__ import annotations

import numpy as np

from cost_model.architecture import ModelArchitecture
from cost_model.base import CostModel, Phase, TensorGroup, Work
from cost_model.wrapped import WrappedCosts

_FAR = 1e6
WORKER_LAUNCH_S = 15e-6
"""Seconds of an attention worker for a layer beside its attention: to unpack queries, launch, and pack the
result. Assumed: the prior for the launches of a whole layer; nobody measured it."""


def token_s(costs: CostModel, group: TensorGroup, decodes: float) -> float:
    """Seconds of one layer's decode attention, with all heads, per token of context in a step of so many
    decodes."""
    far = costs.layer_work_s(group, Work(0.0, 0.0, decodes, _FAR, decodes))
    return (far - costs.layer_work_s(group, Work(0.0, 0.0, decodes, 0.0, decodes))) / _FAR


def vector_bytes(model: ModelArchitecture) -> float:
    """Bytes that pass between a primary and an attention worker for all heads of one token in one layer: its
    query, key and value there, its result back (Hetis, section 5.1: 2 + 2 / r head vectors per query head, r
    query heads for each KV head)."""
    vectors = 2 * model.heads + 2 * model.kv_heads
    return float(vectors * model.head_dim * model.activation_bytes)


class DenseCosts(WrappedCosts):
    """A cost model without decode attention: the time of the dense modules. Memory and hops stay as they
    are."""

    def layer_work_s(self, group: TensorGroup, work: Work) -> float:
        return self.nominal.layer_work_s(group, work._replace(context=0.0))

    def layers_work_s(self, group: TensorGroup, work: Work) -> np.ndarray:
        no_context = np.zeros(np.shape(work.context))
        return self.nominal.layers_work_s(group, work._replace(context=no_context))  # type: ignore[arg-type]

    def fastest_batch(self, phase: Phase, group: TensorGroup, most: float) -> float:
        return most
