"""The default cost model: a roofline over true parameter, KV and attention counts.

Roofline: Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009. FLOPs are two per parameter
and token, and four per attended token and element of a head (scores and weighted values).

The coefficients are priors, fitted to nothing yet; `Coefficients.name` says so wherever a
placement is shown. They know nothing of an engine's own time: an engine whose Python code cannot keep
up with its GPUs is slower than predicted, the more so the higher the tensor degree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cost_model.architecture import ModelArchitecture
from cost_model.base import PREFILL_TOKENS, CostModel, Phase, StageMemory, TensorGroup, Work
from cost_model.collectives import all_reduce_s
from cost_model.lengths import RequestLengths


@dataclass(frozen=True)
class Coefficients:
    """Shares of the data-sheet peaks that engines reach, and times that no peak explains.

    layer_overhead_s is the launch of one layer's kernels, all_reduce_overhead_s that of one collective
    (the latency of its messages comes from the link), memory_utilisation the share of device memory
    that an engine takes (vLLM's gpu_memory_utilization default). The error in the name is what
    benchmarks/cost_model_accuracy.py finds: 22 % on average, 27 % where attention is included.
    """

    name: str = "zero-fit, expect 25 % error"
    compute_efficiency: float = 0.5
    memory_efficiency: float = 0.8
    layer_overhead_s: float = 15e-6
    all_reduce_overhead_s: float = 10e-6
    memory_utilisation: float = 0.9


class Calibrated(CostModel):
    """Sums, per layer: matrix products and weight reads (whichever is longer), attention likewise,
    launch overhead, and two all-reduces.

    A matrix product overlaps its reads with its arithmetic, so the longer of the two counts; products
    and attention follow one another, so they add up. How many tokens attention reads and the KV cache
    holds are means over the mixture of requests (see RequestLengths), within the model's sliding window.
    """

    name = "calibrated"

    def __init__(
        self,
        model: ModelArchitecture,
        lengths: RequestLengths,
        batch_cap: int = 256,
        coefficients: Coefficients | None = None,
    ) -> None:
        super().__init__(model, lengths, batch_cap)
        self.coefficients = coefficients or Coefficients()
        self.calibration = self.coefficients.name
        self._kv_tokens = {
            "prefill": lengths.kv_tokens_prefill(model.sliding_window),
            "decode": lengths.kv_tokens_decode(model.sliding_window),
        }

    def layer_work_s(self, group: TensorGroup, work: Work) -> float:
        model, n = self.model, group.degree
        dense = self._roofline(
            group,
            flops=2 * model.active_layer_params * work.tokens / n,
            read=self._weights_read(work.tokens) / n,
        )
        per_attended = 4 * model.heads * model.head_dim / n
        prompts = self._roofline(group, flops=per_attended * work.prompt_attended, read=0.0)
        decodes = self._roofline(
            group,
            flops=per_attended * work.context,
            read=work.context * model.kv_bytes_per_token_layer * self._kv_share(n),
        )
        overhead = self.coefficients.layer_overhead_s + 2 * self._all_reduce_s(group, work.tokens)
        return dense + prompts + decodes + overhead

    def edge_work_s(self, group: TensorGroup, sampled: float, last: bool) -> float:
        if not last:
            return 0.0
        n = group.degree
        return self._roofline(
            group,
            flops=2 * self.model.head_params * sampled / n,
            read=self.model.head_params * self.model.weight_bytes / n,
        )

    def stage_memory(self, phase: Phase, group: TensorGroup, first: bool, last: bool) -> StageMemory:
        model, n = self.model, group.degree
        embedding = model.embedding_params if first else 0
        # A single stage holds a tied head once.
        head = model.head_params if last and not (first and model.tied_embeddings) else 0
        widest = max(model.ffn * (2 if model.gated_ffn else 1) / n, model.hidden)
        workspace = PREFILL_TOKENS * (2 * model.hidden + widest) * model.kv_value_bytes
        return StageMemory(
            limit=group.accelerator.memory_bytes * self.coefficients.memory_utilisation,
            fixed=(embedding + head) * model.weight_bytes / n + workspace,
            per_layer=model.layer_params * model.weight_bytes / n,
            per_layer_request=self._kv_tokens[phase] * model.kv_bytes_per_token_layer * self._kv_share(n),
            per_request=0.0,
        )

    @property
    def kv_bytes_per_layer(self) -> float:
        return self.isl * self.model.kv_bytes_per_token_layer

    def prefill_batch(self) -> int:
        return max(1, int(PREFILL_TOKENS // self.isl))

    @property
    def activation_bytes_per_token(self) -> float:
        return self.model.hidden * self.model.kv_value_bytes

    def _kv_share(self, degree: int) -> float:
        """Share of the KV heads on the device that holds most; where heads are fewer than devices, each
        device holds a copy of one."""
        return math.ceil(self.model.kv_heads / degree) / self.model.kv_heads

    def _weights_read(self, tokens: float) -> float:
        """Bytes of weights that a step reads in one layer: of a mixture, the experts that at least one
        token chose, expected under uniform routing."""
        model = self.model
        idle_share = (1 - model.active_experts / model.experts) ** tokens if model.experts > 1 else 0.0
        idle = model.experts * idle_share * model.expert_params
        return (model.layer_params - idle) * model.weight_bytes

    def _roofline(self, group: TensorGroup, flops: float, read: float) -> float:
        """Seconds of `flops` operations on `read` bytes: the longer of computing and reading."""
        device, k = group.accelerator, self.coefficients
        return max(
            flops / (device.flops_s * k.compute_efficiency),
            read / (device.memory_bandwidth_bytes_s * k.memory_efficiency),
        )

    def _all_reduce_s(self, group: TensorGroup, tokens: float) -> float:
        """Seconds of one all-reduce of the activations of so many tokens, its launch included."""
        if group.degree == 1:
            return 0.0
        message_bytes = tokens * self.activation_bytes_per_token
        return self.coefficients.all_reduce_overhead_s + all_reduce_s(group.link, group.degree, message_bytes)
