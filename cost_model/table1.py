"""Table 1 of HexGen-2 as printed: multi-head attention, a 4H feed-forward, data-sheet peaks.

It reads no KV cache, counts no attention FLOPs and knows no launch overhead; it is kept as the
paper's own model beside the better one in `calibrated.py`.
"""

from __future__ import annotations

from cost_model.base import CostModel, Phase, StageMemory, TensorGroup
from cost_model.hardware import Link


class Table1(CostModel):
    """H hidden size, B bytes per value, n tensor degree, c FLOP/s, m bytes/s, alpha s, beta bytes/s."""

    name = "table1"
    calibration = "none: data-sheet peaks"

    def layer_s(self, phase: Phase, group: TensorGroup, batch: float) -> float:
        h, b = self.model.hidden, self.model.weight_bytes
        n, device = group.degree, group.accelerator
        tokens = batch * self.isl if phase == "prefill" else batch
        compute = 24 * tokens * h**2 / (n * device.flops_s)
        scan = 12 * h**2 * b / (n * device.memory_bandwidth_bytes_s) if phase == "decode" else 0.0
        peers = (n - 1) * (group.link.latency_s + tokens * h * b / (n * group.link.bandwidth_bytes_s))
        return compute + scan + (4 * peers if n > 1 else 0.0)

    def edge_s(self, phase: Phase, group: TensorGroup, batch: float, last: bool) -> float:
        return 0.0

    def boundary_s(self, phase: Phase, link: Link, batch: float) -> float:
        tokens = batch * self.isl if phase == "prefill" else batch
        return link.latency_s + tokens * self.model.hidden * self.model.weight_bytes / link.bandwidth_bytes_s

    def stage_memory(self, phase: Phase, group: TensorGroup, first: bool, last: bool) -> StageMemory:
        h, b, n = self.model.hidden, self.model.weight_bytes, group.degree
        tokens = self.isl if phase == "prefill" else self.isl + self.osl
        return StageMemory(
            limit=group.accelerator.memory_bytes,
            fixed=0.0,
            per_layer=12 * h**2 * b / n,
            per_layer_request=2 * tokens * h * b / n,
            per_request=4 * tokens * h * b,
        )

    @property
    def kv_bytes_per_layer(self) -> float:
        return 2 * self.isl * self.model.hidden * self.model.weight_bytes

    def prefill_batch(self) -> int:
        return 1
