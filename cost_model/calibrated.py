"""The cost model of the engines of 2023: a roofline over true parameter, KV and attention counts.

FLOPs are two per parameter and token, and four per attended token and element of a head (scores and
weighted values). Which share of the peaks an engine reaches, and what its steps cost besides, is in a set
of coefficients (cost_model/coefficients.py): priors, or fitted to measured times.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from cost_model.architecture import ModelArchitecture
from cost_model.base import PREFILL_TOKENS, CostModel, Origin, Phase, StageMemory, TensorGroup, Work
from cost_model.coefficients import ZERO_FIT, Coefficients, CoefficientSet, fitted
from cost_model.collectives import all_reduce_s
from cost_model.dtypes import matrix_flops_s
from cost_model.hardware import NO_LINK, Accelerator
from cost_model.lengths import RequestLengths, Window
from cost_model.portable import power, powers
from cost_model.roofline import Amount, EdgeWork, LayerWork, edge_s, layer_s

FEW = 8
"""Steps that are timed faster one by one than as arrays."""


class Calibrated(CostModel):
    """Sums, per layer: matrix products and weight reads, attention likewise, launch overhead, and two
    all-reduces; per step and stage a fixed cost, and on the last stage the LM head.

    How many tokens attention reads and the KV cache holds are means over the mixture of requests (see
    RequestLengths), within the model's sliding window; layers with one keep no other tokens, but those of a
    step or a block. Where layers differ, a stage that holds all of them has the mean layer's bytes per layer,
    and any other the largest layer's.
    """

    name = "calibrated"

    def __init__(
        self,
        model: ModelArchitecture,
        lengths: RequestLengths,
        batch_cap: int = 256,
        coefficients: CoefficientSet | None = None,
        engine: str | None = None,
    ) -> None:
        super().__init__(model, lengths, batch_cap)
        known = self.default() if coefficients is None else coefficients
        self.coefficients, self.engine = known, engine
        self.calibration = known.name if engine is None else f"{known.name} for {engine}"
        self._kv_tokens = {
            "prefill": lengths.kv_tokens_prefill(model.window, PREFILL_TOKENS),
            "decode": lengths.kv_tokens_decode(model.window),
        }
        self._kv_tokens_beyond = self._beyond_even_share()
        self._of = cache(self._coefficients_of)

    @staticmethod
    def default() -> CoefficientSet:
        """The coefficients where none are given: those that ship, under a mean engine."""
        return fitted()

    @property
    def origin(self) -> Origin:
        return Origin(self.coefficients.name, self.engine, self.coefficients.source)

    def error(self, accelerator: Accelerator) -> float:
        return self.coefficients.error(accelerator, self.engine)

    def measured(self, accelerator: Accelerator) -> bool:
        return accelerator.name in self.coefficients.gpus

    def layer_work_s(self, group: TensorGroup, work: Work) -> float:
        return float(layer_s(self.layer_work(group, work), self._of(group.accelerator)))

    def layers_work_s(self, group: TensorGroup, work: Work) -> np.ndarray:
        if np.size(work.sampled) < FEW:
            return super().layers_work_s(group, work)
        steps = Work(*map(np.asarray, work))  # type: ignore[arg-type]
        return np.asarray(layer_s(self.layer_work(group, steps), self._of(group.accelerator)))

    def edges_work_s(self, group: TensorGroup, sampled: np.ndarray, last: bool) -> np.ndarray:
        if len(sampled) < FEW:
            return super().edges_work_s(group, sampled, last)
        work = self.edge_work(group, sampled, last)
        return np.zeros(len(sampled)) + edge_s(work, self._of(group.accelerator))

    def edge_work_s(self, group: TensorGroup, sampled: float, last: bool) -> float:
        return float(edge_s(self.edge_work(group, sampled, last), self._of(group.accelerator)))

    def layer_work(self, group: TensorGroup, work: Work) -> LayerWork:
        """What one layer's part of a step (or of [n] steps) is at the peaks of the group's devices."""
        model, n, device = self.model, group.degree, group.accelerator
        kv_read = work.context * model.kv_bytes_per_token_layer * self._kv_share(n)
        exchange_s, exchanges = 0.0, 0
        if n > 1 and group.link != NO_LINK:
            exchange_s = 2 * all_reduce_s(group.link, n, work.tokens * self.activation_bytes_per_token)
            exchanges = 2
        over_nvlink = group.link.fabric == "nvlink"
        return LayerWork(
            dense_compute_s=2 * model.active_layer_params * work.tokens / n / matrix_flops_s(device, model),
            dense_read_s=self._weights_read(work.tokens) / n / device.memory_bandwidth_bytes_s,
            prompts_compute_s=model.prompt_attended_flops / n * work.prompt_attended / device.flops_s,
            decodes_compute_s=model.decode_attended_flops / n * work.context / device.flops_s,
            decodes_read_s=kv_read / device.memory_bandwidth_bytes_s,
            nvlink_s=exchange_s if over_nvlink else 0.0,
            other_s=0.0 if over_nvlink else exchange_s,
            all_reduces=exchanges,
        )

    def edge_work(self, group: TensorGroup, sampled: Amount, last: bool) -> EdgeWork:
        """What a stage's part of a step is outside its layers, at the peaks of the group's devices."""
        if not last:
            return EdgeWork(0.0, 0.0, 0.0)
        n, device = group.degree, group.accelerator
        return EdgeWork(
            head_compute_s=2 * self.model.head_params * sampled / n / device.flops_s,
            head_read_s=self.model.head_params * self.model.plain_bytes / n / device.memory_bandwidth_bytes_s,
            sampled=sampled,
        )

    def stage_memory(self, phase: Phase, group: TensorGroup, first: bool, last: bool) -> StageMemory:
        model, n, k = self.model, group.degree, self._of(group.accelerator)
        groups = group.attention_dp
        embedding = model.embedding_params if first else 0
        # A single stage holds a tied head once.
        head = model.head_params if last and not (first and model.tied_embeddings) else 0
        widest = max(model.ffn * (2 if model.gated_ffn else 1) / n, model.hidden)
        workspace = PREFILL_TOKENS * (2 * model.hidden + widest) * model.activation_bytes
        held = (embedding + head) * model.plain_bytes / n
        whole = first and last
        layer = model.layer_bytes if whole else model.largest_layer_bytes
        # Each attention group holds attention weights of its own, and the KV cache of its share of requests.
        layer += (groups - 1) * model.attention_bytes
        kv_bytes, kv_share = model.kv_bytes_per_token_layer, self._kv_share(n // groups)
        kv_tokens = self._kv_tokens[phase] + k.kv_slack_tokens
        beyond = 0.0 if whole else self._kv_tokens_beyond[phase]
        return StageMemory(
            limit=group.accelerator.memory_bytes * k.memory_utilisation,
            fixed=held + workspace + k.engine_bytes,
            per_layer=layer / n,
            per_layer_request=kv_tokens * kv_bytes * kv_share / groups,
            per_request=beyond * kv_bytes * kv_share / groups,
        )

    @property
    def kv_bytes_per_layer(self) -> float:
        return self.kv_tokens_moved * self.model.kv_bytes_per_token_layer

    @property
    def kv_to_every_rank(self) -> bool:
        return self.model.latent is not None

    def prefill_batch(self) -> float:
        return PREFILL_TOKENS / self.isl

    @property
    def activation_bytes_per_token(self) -> float:
        return self.model.hidden * self.model.activation_bytes

    def _coefficients_of(self, accelerator: Accelerator) -> Coefficients:
        return self.coefficients.of(accelerator, self.engine)

    def _beyond_even_share(self) -> dict[Phase, float]:
        """KV tokens of a request by which a stage with some of the layers may hold more than the mean: those
        of its layers without a sliding window beyond an even share of them."""
        model, lengths = self.model, self.lengths
        if model.window is None or not model.full_attention_excess:
            return {"prefill": 0.0, "decode": 0.0}
        limited, excess = Window(model.window.tokens), model.full_attention_excess
        prefill = lengths.kv_tokens_prefill() - lengths.kv_tokens_prefill(limited, PREFILL_TOKENS)
        decode = lengths.kv_tokens_decode() - lengths.kv_tokens_decode(limited)
        return {"prefill": excess * prefill, "decode": excess * decode}

    def _kv_share(self, degree: int) -> float:
        """Share of the KV heads on the device that holds most; where heads are fewer than devices (latent
        attention has one), each device holds a copy of one."""
        return math.ceil(self.model.kv_heads / degree) / self.model.kv_heads

    def _weights_read(self, tokens: Amount) -> Amount:
        """Bytes of weights that a step reads in one layer: of a mixture, the experts that at least one
        token chose, expected under uniform routing."""
        model = self.model
        idle_share: Amount = 0.0
        if model.experts > 1:
            each = powers if isinstance(tokens, np.ndarray) else power
            idle_share = each(1 - model.active_experts / model.experts, tokens)
        idle = model.experts * idle_share * model.expert_bytes * model.mixture_share
        return model.layer_bytes - idle


class ZeroFit(Calibrated):
    """The same with priors instead of what was fitted."""

    name = "zero-fit"

    @staticmethod
    def default() -> CoefficientSet:
        return ZERO_FIT
