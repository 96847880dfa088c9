"""The Llama family, from which most others derive: RMSNorm, rotary positions, grouped-query attention, gated
feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F

from runtime.engine.torch.attention.base import Batch, Scoring
from runtime.engine.torch.linear import Linear
from runtime.engine.torch.loader import CheckpointConfig, Cut
from runtime.engine.torch.models.base import DecoderStage, ModelSpec
from runtime.engine.torch.models.rope import Rotary

Attention = Callable[[torch.Tensor, Batch], torch.Tensor]
FeedForward = Callable[[torch.Tensor], torch.Tensor]
"""Both from normalised [tokens, hidden] to this rank's summand of [tokens, hidden]."""


class LlamaStage(DecoderStage):
    """One worker's part of a Llama model. Similar families override what differs."""

    prefixes: ClassVar[tuple[str, ...]] = ("model.",)
    kv_heads_required: ClassVar[bool] = False
    default_theta: ClassVar[float] = 10000.0
    default_eps: ClassVar[float] = 1e-6
    default_tied: ClassVar[bool] = False
    activation: ClassVar[tuple[str, str]] = ("hidden_act", "silu")  # its key, and what `_activate` computes

    def _parse(self) -> ModelSpec:
        config = self.checkpoint.config
        key, activation = self.activation
        config.require(key, activation, activation)
        hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
        self._eps = float(config.get("rms_norm_eps", self.default_eps))
        self._qkv_bias, self._out_bias, self._mlp_bias = self._biases(config)
        head_dim = config.count("head_dim", self._default_head_dim(hidden, heads))
        self._rotary = self._load_rotary(config, head_dim)
        spec = ModelSpec(
            layers=config.count("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=config.count("num_key_value_heads", None if self.kv_heads_required else heads),
            head_dim=head_dim,
            ffn=config.count("intermediate_size"),
            vocab=config.count("vocab_size"),
            position_limit=self._rotary.position_limit,
            tied=bool(config.get("tie_word_embeddings", self.default_tied)),
        )
        self.windows = self._parse_windows(config, spec.layers)
        return spec

    # -- what families vary

    def _biases(self, config: CheckpointConfig) -> tuple[bool, bool, bool]:
        """Whether these have biases: query, key and value; the output projection; the feed-forward."""
        attention = bool(config.get("attention_bias", False))
        return attention, attention, bool(config.get("mlp_bias", False))

    def _default_head_dim(self, hidden: int, heads: int) -> int:
        return hidden // heads

    def _parse_windows(self, config: CheckpointConfig, layers: int) -> list[int | None]:
        """The attention window of each layer in tokens, None for no limit."""
        return [None] * layers

    def _load_scoring(self, name: str, layer: int) -> Scoring:
        """How a layer attends; `name` is its attention's."""
        return Scoring(self.windows[layer])

    def _load_head_norm(self, name: str) -> Callable[[torch.Tensor], object] | None:
        """A norm of [tokens, query and key heads, head_dim], in place, before they are rotated, if there is
        one."""
        return None

    def _activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """From gates and ups, [tokens, 2 x width], to [tokens, width]."""
        if self._kernels is not None:
            return self._kernels.gate(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def _load_feed_forward(self, name: str, layer: int) -> FeedForward:
        names = (f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj", f"{name}.mlp.down_proj")
        return self.gated(names, self.cut(self.spec.ffn), self._mlp_bias)

    # -- what they share

    def _load_rotary(self, config: CheckpointConfig, head_dim: int) -> Rotary:
        """What rotates heads by their positions."""
        return Rotary(config, head_dim, self.dtype, self.device, self.default_theta)

    def _rotary_of(self, layer: int) -> Rotary:
        """What rotates the heads of a layer."""
        return self._rotary

    def _begin(self, batch: Batch) -> None:
        self._rotary.begin(batch.positions)

    def _load_layer(self, layer: int) -> Callable[[torch.Tensor, Batch], torch.Tensor]:
        name = f"layers.{layer}"
        attention_norm = self._norm(f"{name}.input_layernorm")
        feed_forward_norm = self._norm(f"{name}.post_attention_layernorm")
        attention = self._load_attention(f"{name}.self_attn", layer)
        feed_forward = self._load_feed_forward(name, layer)

        def run(hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
            attended = attention(self._rms(hidden, attention_norm), batch)
            hidden = self._add(self.collectives.all_reduce(attended), hidden)
            fed = feed_forward(self._rms(hidden, feed_forward_norm))
            return self._add(self.collectives.all_reduce(fed), hidden)

        return run

    def _load_attention(self, name: str, layer: int) -> Attention:
        qkv = self._load_qkv(name)
        head_norm = self._load_head_norm(name)
        out = self.row_parallel(
            f"{name}.o_proj", self.cut(self.spec.heads * self.spec.head_dim), self._out_bias
        )
        split = (self.local_heads, self.local_kv_heads, self.local_kv_heads)
        scoring, rotary = self._load_scoring(name, layer), self._rotary_of(layer)

        def run(x: torch.Tensor, batch: Batch) -> torch.Tensor:
            heads = qkv(x).view(len(x), -1, self.spec.head_dim)
            query, key, value = heads.split(split, dim=1)
            if head_norm is not None:
                head_norm(heads[:, : -self.local_kv_heads])
            batch.attention.rotate_and_store(heads, rotary, layer, batch)
            return out(batch.attention.attend(query, key, value, layer, batch, scoring))

        return run

    def _load_qkv(self, name: str) -> Linear:
        """The query, key and value projections of this rank's heads as one matrix."""
        return self.qkv((f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj"), self._qkv_bias)

    def gated(self, names: tuple[str, str, str], cut: Cut, bias: bool) -> FeedForward:
        """Load a feed-forward of gate, up and down projections, or the part `cut` of its width."""
        gate_up = self.fused_columns(names[:2], (cut, cut), bias)
        down = self.row_parallel(names[2], cut, bias)
        return lambda x: down(self._activate(gate_up(x)))

    def _load_last(self) -> None:
        self._norm_weight = self._norm("norm")

    def _final_norm(self, x: torch.Tensor) -> torch.Tensor:
        return self._rms(x, self._norm_weight)

    def _norm(self, name: str, width: int | None = None) -> torch.Tensor:
        """The weight of a norm of vectors that are `width` wide; None: of hidden ones."""
        return self.checkpoint.read(f"{name}.weight", (width or self.spec.hidden,))

    def _norm_of_heads(self, name: str) -> Callable[[torch.Tensor], object]:
        """A norm of each query head, and one of each key head, in place."""
        weights = [self._norm(f"{name}.{part}_norm", self.spec.head_dim) for part in "qk"]
        heads = (self.local_heads, self.local_kv_heads)
        weight = torch.cat([w.expand(n, -1) for w, n in zip(weights, heads, strict=True)])
        if self._kernels is not None and (norm := self._kernels.norm_heads) is not None:
            return lambda x: norm(x, weight, self._eps)
        return lambda x: x.copy_(self._rms(x, weight))

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Scale the last dimension to a root mean square of one, round, then multiply by the weight, in this
        order, as in training."""
        if self._kernels is not None and weight.dim() <= self._kernels.norm_dims:
            return self._kernels.rms_norm(x, weight, self._eps)
        return F.rms_norm(x, x.shape[-1:], None, self._eps).mul_(weight)
