"""Table 1 of HexGen-2 as printed: multi-head attention, a 4H feed-forward, data-sheet peaks.

It ignores reads of the KV cache, attention FLOPs and launch overhead. It stays as the paper's own model,
beside the better one in `calibrated.py`."""

from __future__ import annotations

from cost_model.base import CostModel, Phase, StageMemory, TensorGroup, Work
from cost_model.hardware import Accelerator
from cost_model.lengths import Window


class Table1(CostModel):
    """H hidden size, B bytes per value, n tensor degree, c FLOP/s, m bytes/s, alpha s, beta bytes/s.

    The paper's decode costs are totals over s_out tokens; here they are those of one step. Its maxima over
    devices are not needed, since the devices of a stage are equal and `link` is the slowest between them."""

    name = "table1"
    calibration = "none: data-sheet peaks"

    def error(self, accelerator: Accelerator) -> float:
        """The error that benchmarks/simulator/cost_model_accuracy.py finds on times that include
        attention."""
        return 0.47

    def layer_work_s(self, group: TensorGroup, work: Work) -> float:
        """Seconds: 24 t H^2 / (n c), in decode 12 H^2 B / (n m) besides, and tensor-parallel communication of
        4 (n - 1) (alpha + t H B / (n beta)), with t = batch times s_in (prefill) or batch (decode)."""
        h, b = self.model.hidden, self.model.weight_bytes
        n, device, link = group.degree, group.accelerator, group.link
        compute = 24 * work.tokens * h**2 / (n * device.flops_s)
        scan = 12 * h**2 * b / (n * device.memory_bandwidth_bytes_s) if work.decodes else 0.0
        exchange = 4 * (n - 1) * (link.latency_s + work.tokens * h * b / (n * link.bandwidth_bytes_s))
        return compute + scan + exchange

    def edge_work_s(self, group: TensorGroup, sampled: float, last: bool) -> float:
        """Zero: Table 1 has no LM head and no fixed cost of a step."""
        return 0.0

    def stage_memory(self, phase: Phase, group: TensorGroup, first: bool, last: bool) -> StageMemory:
        """Bytes: (12 H^2 B / n + 2 b s H B / n) l + 4 b s H B for l layers and b requests of s tokens, where
        s is s_in + s_out; a prefill replica holds s_in of them only."""
        h, b, n = self.model.hidden, self.model.weight_bytes, group.degree
        kv_tokens = self.lengths.kv_tokens_prefill if phase == "prefill" else self.lengths.kv_tokens_decode
        tokens = kv_tokens()
        return StageMemory(
            limit=group.accelerator.memory_bytes,
            fixed=0.0,
            per_layer=12 * h**2 * b / n,
            per_layer_request=2 * tokens * h * b / n,
            per_request=4 * tokens * h * b,
        )

    @property
    def kv_window(self) -> Window | None:
        """None: the paper has no windows."""
        return None

    @property
    def kv_bytes_per_layer(self) -> float:
        """Bytes: 2 s_in H B per layer; the paper's formula leaves out the number of layers."""
        return 2 * self.isl * self.model.hidden * self.model.weight_bytes

    @property
    def activation_bytes_per_token(self) -> float:
        """Bytes: H B."""
        return self.model.hidden * self.model.weight_bytes

    def prefill_batch(self) -> float:
        """1, since prefill gains nothing from batching (Appendix A)."""
        return 1.0
