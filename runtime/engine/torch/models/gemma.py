"""The Gemma families. Gemma 2: four norms in each layer, their weights counted from one, scaled embeddings,
capped scores and logits, a window in every second layer. Gemma 3: norms for the heads of query and key in
place of capped scores, a window in five of six layers, and rotary frequencies of their own for these."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F

from runtime.engine.torch.attention.base import Batch, Scoring
from runtime.engine.torch.loader import CheckpointConfig
from runtime.engine.torch.models.base import ModelSpec
from runtime.engine.torch.models.llama import LlamaStage
from runtime.engine.torch.models.rope import Rotary, rope_parameters
from runtime.engine.torch.models.windows import layer_windows


class Gemma2Stage(LlamaStage):
    """One worker's part of a Gemma 2 model."""

    kv_heads_required = True
    activation = ("hidden_activation", "gelu_pytorch_tanh")
    default_tied = True
    score_cap_default: ClassVar[float | None] = 50.0
    logit_cap_default: ClassVar[float | None] = 30.0

    def _parse(self) -> ModelSpec:
        config = self.checkpoint.config
        config.require("use_bidirectional_attention", False, False)
        self._score_scale = float(config.count("query_pre_attn_scalar", 256)) ** -0.5
        self._score_cap = _cap(config, "attn_logit_softcapping", self.score_cap_default)
        self._logit_cap = _cap(config, "final_logit_softcapping", self.logit_cap_default)
        return super()._parse()

    def _default_head_dim(self, hidden: int, heads: int) -> int:
        return 256

    def _parse_windows(self, config: CheckpointConfig, layers: int) -> list[int | None]:
        return layer_windows(config, layers, config.count("sliding_window", 4096), lambda n: n % 2 == 0)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor(self.spec.hidden**0.5, dtype=self.dtype, device=self.device)
        return super()._embed(tokens) * scale

    def finished(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self._logit_cap
        return logits if cap is None else (logits / cap).tanh_().mul_(cap)

    def _load_scoring(self, name: str, layer: int) -> Scoring:
        return Scoring(self.windows[layer], self._score_scale, self._score_cap)

    def _load_layer(self, layer: int) -> Callable[[torch.Tensor, Batch], torch.Tensor]:
        name = f"layers.{layer}"
        before, after = self._norm(f"{name}.input_layernorm"), self._norm(f"{name}.post_attention_layernorm")
        before_ffn, after_ffn = (
            self._norm(f"{name}.{side}_feedforward_layernorm") for side in ("pre", "post")
        )
        attention = self._load_attention(f"{name}.self_attn", layer)
        feed_forward = self._load_feed_forward(name, layer)

        def run(hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
            attended = self.collectives.all_reduce(attention(self._rms(hidden, before), batch))
            hidden = self._add(self._rms(attended, after), hidden)
            fed = self.collectives.all_reduce(feed_forward(self._rms(hidden, before_ffn)))
            return self._add(self._rms(fed, after_ffn), hidden)

        return run

    def _activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self._kernels is not None and self._kernels.gelu_gate is not None:
            return self._kernels.gelu_gate(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    def _norm(self, name: str, width: int | None = None) -> torch.Tensor:
        return super()._norm(name, width).float() + 1

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The product with the weight is rounded, not its factors."""
        if self._kernels is not None and weight.dim() <= self._kernels.norm_dims:
            return self._kernels.rms_norm(x, weight, self._eps)
        return F.rms_norm(x.float(), x.shape[-1:], None, self._eps).mul_(weight).to(x.dtype)


class Gemma3Stage(Gemma2Stage):
    """One worker's part of a Gemma 3 model, or of the text part of one that also sees."""

    prefixes = ("model.", "language_model.model.", "model.language_model.", "language_model.")
    default_theta = 1000000.0
    score_cap_default = logit_cap_default = None

    def _parse_windows(self, config: CheckpointConfig, layers: int) -> list[int | None]:
        key = "sliding_window_pattern"
        period = config.count(key if key in config.values else f"_{key}", 6)
        window = config.count("sliding_window", 4096)
        return layer_windows(config, layers, window, lambda layer: (layer + 1) % period > 0)

    def _load_head_norm(self, name: str) -> Callable[[torch.Tensor], object]:
        return self._norm_of_heads(name)

    def _parse(self) -> ModelSpec:
        spec, config = super()._parse(), self.checkpoint.config
        near = {"rope_theta": config.get("rope_local_base_freq", 10000.0)}
        if "sliding_attention" in config.get("rope_parameters", {}):
            near |= rope_parameters(config, "sliding_attention")
        self._near = Rotary(config, spec.head_dim, self.dtype, self.device, scaling=near)
        return spec

    def _load_rotary(self, config: CheckpointConfig, head_dim: int) -> Rotary:
        far = rope_parameters(config, "full_attention")
        return Rotary(config, head_dim, self.dtype, self.device, self.default_theta, far)

    def _rotary_of(self, layer: int) -> Rotary:
        return self._rotary if self.windows[layer] is None else self._near

    def _begin(self, batch: Batch) -> None:
        super()._begin(batch)
        self._near.begin(batch.positions)


def _cap(config: CheckpointConfig, key: str, default: float | None) -> float | None:
    """A cap, of which null means that there is none."""
    value = config.values.get(key, default)
    if value is None or (isinstance(value, int | float) and value > 0):
        return value
    raise config.error(key, f"is {value!r}, not a positive number", "download the checkpoint again")
