"""The Phi-3 family, which includes Phi-4: Llama with one matrix for query, key and value, and one for gate
and up. With longrope, sequences may be as long as in training: beyond, all keys of a sequence would turn by
other angles, those in the cache included."""

from __future__ import annotations

from runtime.engine.torch.linear import Linear
from runtime.engine.torch.loader import CheckpointConfig
from runtime.engine.torch.models.llama import FeedForward, LlamaStage
from runtime.engine.torch.models.rope import Rotary, rope_parameters


class Phi3Stage(LlamaStage):
    """One worker's part of a Phi-3 or Phi-4 model."""

    default_eps = 1e-5

    def _biases(self, config: CheckpointConfig) -> tuple[bool, bool, bool]:
        return False, False, False

    def _parse_windows(self, config: CheckpointConfig, layers: int) -> list[int | None]:
        return [None if config.get("sliding_window") is None else config.count("sliding_window")] * layers

    def _load_rotary(self, config: CheckpointConfig, head_dim: int) -> Rotary:
        scaling = dict(rope_parameters(config))
        if scaling.pop("type", scaling.get("rope_type")) in ("su", "yarn", "longrope"):
            scaling["rope_type"] = "longrope"  # which older files call by other names
        partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        return Rotary(config, head_dim, self.dtype, self.device, self.default_theta, scaling, partial)

    def _load_qkv(self, name: str) -> Linear:
        dim, part = self.spec.head_dim, self.part
        queries, keys = self.spec.heads * dim, self.spec.kv_heads * dim
        whole, (_, first, end) = queries + 2 * keys, self.cut(queries)
        own = part.first_head * dim, part.end_head * dim
        rows = [(whole, first, end)]
        rows += [(whole, before + own[0], before + own[1]) for before in (queries, queries + keys)]
        return self.fused_columns([f"{name}.qkv_proj"] * 3, rows, bias=False)

    def _load_feed_forward(self, name: str, layer: int) -> FeedForward:
        width, first, end = self.cut(self.spec.ffn)
        rows = [(2 * width, first, end), (2 * width, width + first, width + end)]
        gate_up = self.fused_columns([f"{name}.mlp.gate_up_proj"] * 2, rows, bias=False)
        down = self.row_parallel(f"{name}.mlp.down_proj", (width, first, end), bias=False)
        return lambda x: down(self._activate(gate_up(x)))
