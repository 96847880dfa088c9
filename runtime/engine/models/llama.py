"""The Llama family: RMSNorm, rotary positions, grouped-query attention, gated feed-forward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from runtime.engine.attention import Batch, attend
from runtime.engine.loader import CheckpointConfig
from runtime.engine.models.base import DecoderStage, ModelSpec


class LlamaStage(DecoderStage):
    """One worker's part of a Llama model."""

    prefixes = ("model.",)

    def _parse(self) -> ModelSpec:
        config = self.checkpoint.config
        config.require("hidden_act", "silu", "silu")
        hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
        self._eps = float(config.get("rms_norm_eps", 1e-6))
        self._attention_bias = bool(config.get("attention_bias", False))
        self._mlp_bias = bool(config.get("mlp_bias", False))
        spec = ModelSpec(
            layers=config.count("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=config.count("num_key_value_heads", heads),
            head_dim=config.count("head_dim", hidden // heads),
            ffn=config.count("intermediate_size"),
            vocab=config.count("vocab_size"),
            position_limit=None,
            tied=bool(config.get("tie_word_embeddings", False)),
        )
        self._frequencies = rope_frequencies(config, spec.head_dim).to(self.device)
        return spec

    def _begin(self, batch: Batch) -> None:
        angles = batch.positions.float()[:, None] * self._frequencies
        self._cos = angles.cos().to(self.dtype).unsqueeze(1)
        self._sin = angles.sin().to(self.dtype).unsqueeze(1)

    def _load_layer(self, layer: int) -> Callable[[torch.Tensor, Batch], torch.Tensor]:
        name = f"layers.{layer}"
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        input_norm = self._norm(f"{name}.input_layernorm")
        post_norm = self._norm(f"{name}.post_attention_layernorm")
        projections = (f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj")
        qkv = self.qkv(projections, self._attention_bias)
        width = self.spec.heads * self.spec.head_dim
        out = self.row_parallel(f"{attention}.o_proj", width, self._attention_bias)
        share = self.ffn_share()
        gate_up = self.fused_columns((f"{mlp}.gate_proj", f"{mlp}.up_proj"), (share, share), self._mlp_bias)
        down = self.row_parallel(f"{mlp}.down_proj", self.spec.ffn, self._mlp_bias)

        def run(hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
            query, key, value = self.split_qkv(qkv(self._rms(hidden, input_norm)))
            attended = attend(self._rotate(query), self._rotate(key), value, layer, batch)
            hidden = hidden + self.links.all_reduce(out(attended))
            gate, up = gate_up(self._rms(hidden, post_norm)).chunk(2, dim=-1)
            return hidden + self.links.all_reduce(down(F.silu(gate) * up))

        return run

    def _load_last(self) -> None:
        self._norm_weight = self._norm("norm")

    def _final_norm(self, x: torch.Tensor) -> torch.Tensor:
        return self._rms(x, self._norm_weight)

    def _norm(self, name: str) -> torch.Tensor:
        return self.checkpoint.read(f"{name}.weight", (self.spec.hidden,))

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return weight * wide.to(x.dtype)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate the halves of [tokens, heads, head_dim] by each token's position."""
        left, right = x.chunk(2, dim=-1)
        turned = (left * self._cos - right * self._sin, right * self._cos + left * self._sin)
        return torch.cat(turned, dim=-1)


def rope_frequencies(config: CheckpointConfig, head_dim: int) -> torch.Tensor:
    """Rotation per position, [head_dim / 2], with the checkpoint's scaling applied."""
    scaling: dict[str, Any] = config.get("rope_parameters", config.get("rope_scaling", {}))
    theta = float(scaling.get("rope_theta", config.get("rope_theta", 10000.0)))
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    try:
        if kind == "default":
            return frequencies
        if kind == "linear":
            return frequencies / float(scaling["factor"])
        if kind == "llama3":
            return _llama3(frequencies, scaling)
    except KeyError as error:
        raise config.error("rope_scaling", f"lacks {error}", "download the checkpoint again") from error
    raise config.error("rope_scaling", f"{kind!r} is unknown", "choose one of default, linear, llama3")


def _llama3(frequencies: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1's rule: long wavelengths are stretched by `factor`, short ones kept, a blend between."""
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = float(scaling["original_max_position_embeddings"])
    turns = trained * frequencies / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / factor + blend * frequencies
