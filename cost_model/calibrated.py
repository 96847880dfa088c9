"""The default cost model: a roofline over true parameter, KV and attention counts.

The coefficients are priors, fitted to nothing yet; `Coefficients.name` says so wherever a
placement is shown.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_model.architecture import ModelArchitecture
from cost_model.base import PREFILL_TOKENS, CostModel, Phase, StageMemory, TensorGroup
from cost_model.hardware import Link


@dataclass(frozen=True)
class Coefficients:
    """Shares of the data-sheet peaks that engines reach, and times that no peak explains."""

    name: str = "zero-fit"
    compute_efficiency: float = 0.5
    memory_efficiency: float = 0.8
    layer_overhead_s: float = 15e-6
    all_reduce_overhead_s: float = 10e-6
    memory_utilisation: float = 0.9


class Calibrated(CostModel):
    """Sums, per layer: matrix products and weight reads (whichever is longer), attention likewise,
    launch overhead, and two ring all-reduces."""

    name = "calibrated"

    def __init__(
        self,
        model: ModelArchitecture,
        isl: float,
        osl: float,
        batch_cap: int = 256,
        coefficients: Coefficients | None = None,
    ) -> None:
        super().__init__(model, isl, osl, batch_cap)
        self.coefficients = coefficients or Coefficients()
        self.calibration = self.coefficients.name
        self.context = isl + osl / 2
        if model.sliding_window:
            self.context = min(self.context, model.sliding_window)

    def layer_s(self, phase: Phase, group: TensorGroup, batch: float) -> float:
        model, n = self.model, group.degree
        tokens = batch * self.isl if phase == "prefill" else batch
        dense = self._roofline(
            group,
            flops=2 * model.active_layer_params * tokens / n,
            read=self._weights_read(tokens) / n,
        )
        # Prefill attends to half the prompt on average (causal); decode to the whole context.
        attended = self.isl / 2 if phase == "prefill" else self.context
        if model.sliding_window:
            attended = min(attended, model.sliding_window)
        kv_share = max(model.kv_heads // n, 1) / model.kv_heads
        attention = self._roofline(
            group,
            flops=4 * model.heads * model.head_dim * attended * tokens / n,
            read=batch * self.context * model.kv_bytes_per_token_layer * kv_share
            if phase == "decode"
            else 0.0,
        )
        return dense + attention + self.coefficients.layer_overhead_s + 2 * self._all_reduce_s(group, tokens)

    def edge_s(self, phase: Phase, group: TensorGroup, batch: float, last: bool) -> float:
        if not last:
            return 0.0
        n = group.degree
        return self._roofline(
            group,
            flops=2 * self.model.head_params * batch / n,
            read=self.model.head_params * self.model.weight_bytes / n,
        )

    def boundary_s(self, phase: Phase, link: Link, batch: float) -> float:
        tokens = batch * self.isl if phase == "prefill" else batch
        return link.latency_s + tokens * self._activation_bytes / link.bandwidth_bytes_s

    def stage_memory(self, phase: Phase, group: TensorGroup, first: bool, last: bool) -> StageMemory:
        model, n = self.model, group.degree
        embedding = model.embedding_params if first else 0
        # A single stage holds a tied head once.
        head = model.head_params if last and not (first and model.tied_embeddings) else 0
        widest = max(model.ffn * (2 if model.gated_ffn else 1) / n, model.hidden)
        workspace = PREFILL_TOKENS * (2 * model.hidden + widest) * model.kv_value_bytes
        tokens = self.isl if phase == "prefill" else self.isl + self.osl
        if model.sliding_window:
            tokens = min(tokens, model.sliding_window)
        kv_share = max(model.kv_heads // n, 1) / model.kv_heads
        return StageMemory(
            limit=group.accelerator.memory_bytes * self.coefficients.memory_utilisation,
            fixed=(embedding + head) * model.weight_bytes / n + workspace,
            per_layer=model.layer_params * model.weight_bytes / n,
            per_layer_request=tokens * model.kv_bytes_per_token_layer * kv_share,
            per_request=0.0,
        )

    @property
    def kv_bytes_per_layer(self) -> float:
        return self.isl * self.model.kv_bytes_per_token_layer

    def prefill_batch(self) -> int:
        return max(1, int(PREFILL_TOKENS // self.isl))

    @property
    def _activation_bytes(self) -> float:
        return self.model.hidden * self.model.kv_value_bytes

    def _weights_read(self, tokens: float) -> float:
        """Bytes of weights that a step reads in one layer: of a mixture, the experts that at least one
        token chose, expected under uniform routing."""
        model = self.model
        idle_share = (1 - model.active_experts / model.experts) ** tokens if model.experts > 1 else 0.0
        idle = model.experts * idle_share * model.expert_params
        return (model.layer_params - idle) * model.weight_bytes

    def _roofline(self, group: TensorGroup, flops: float, read: float) -> float:
        device, k = group.accelerator, self.coefficients
        return max(
            flops / (device.flops_s * k.compute_efficiency),
            read / (device.memory_bandwidth_bytes_s * k.memory_efficiency),
        )

    def _all_reduce_s(self, group: TensorGroup, tokens: float) -> float:
        n = group.degree
        if n == 1:
            return 0.0
        moved = 2 * (n - 1) / n * tokens * self._activation_bytes
        return (
            self.coefficients.all_reduce_overhead_s
            + group.link.latency_s
            + moved / group.link.bandwidth_bytes_s
        )
