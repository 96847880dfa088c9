"""The OPT family: learned positions, LayerNorm before each block, ReLU, biases everywhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from runtime.engine.torch.attention.base import Batch
from runtime.engine.torch.models.base import DecoderStage, ModelSpec

_POSITION_OFFSET = 2  # the first rows of OPT's position table are never used
_EPS = 1e-5

Norm = tuple[torch.Tensor, torch.Tensor]


class OptStage(DecoderStage):
    """One worker's part of an OPT model."""

    prefixes = ("model.decoder.", "decoder.")

    def _parse(self) -> ModelSpec:
        config = self.checkpoint.config
        hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
        config.require("do_layer_norm_before", True, True)
        config.require("word_embed_proj_dim", hidden, hidden)
        config.require("activation_function", "relu", "relu")
        config.require("enable_bias", True, True)
        config.require("layer_norm_elementwise_affine", True, True)
        config.require("_remove_final_layer_norm", False, False)
        return ModelSpec(
            layers=config.count("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            ffn=config.count("ffn_dim"),
            vocab=config.count("vocab_size"),
            position_limit=config.count("max_position_embeddings"),
            tied=bool(config.get("tie_word_embeddings", True)),
        )

    def _load_first(self) -> None:
        rows = (self.spec.position_limit or 0) + _POSITION_OFFSET
        self._positions = self.checkpoint.read("embed_positions.weight", (rows, self.spec.hidden))

    def _add_positions(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return x + F.embedding(batch.positions + _POSITION_OFFSET, self._positions)

    def _load_layer(self, layer: int) -> Callable[[torch.Tensor, Batch], torch.Tensor]:
        name = f"layers.{layer}"
        attention = f"{name}.self_attn"
        attention_norm = self._norm(f"{name}.self_attn_layer_norm")
        final_norm = self._norm(f"{name}.final_layer_norm")
        qkv = self.qkv((f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"), bias=True)
        out = self.row_parallel(f"{attention}.out_proj", self.cut(self.spec.hidden), bias=True)
        up = self.fused_columns((f"{name}.fc1",), (self.cut(self.spec.ffn),), bias=True)
        down = self.row_parallel(f"{name}.fc2", self.cut(self.spec.ffn), bias=True)

        def run(hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
            fused = qkv(self._layer_norm(hidden, attention_norm)).unflatten(1, (-1, self.spec.head_dim))
            query, key, value = fused.split((self.local_heads, *(2 * [self.local_kv_heads])), dim=1)
            batch.attention.store(key, value, layer, batch)
            attended = batch.attention.attend(query, key, value, layer, batch)
            hidden = self._add(self.collectives.all_reduce(out(attended)), hidden)
            inner = self._relu(up(self._layer_norm(hidden, final_norm)))
            return self._add(self.collectives.all_reduce(down(inner)), hidden)

        return run

    def _load_last(self) -> None:
        self._last_norm = self._norm("final_layer_norm")

    def _final_norm(self, x: torch.Tensor) -> torch.Tensor:
        return self._layer_norm(x, self._last_norm)

    def _norm(self, name: str) -> Norm:
        shape = (self.spec.hidden,)
        return self.checkpoint.read(f"{name}.weight", shape), self.checkpoint.read(f"{name}.bias", shape)

    def _relu(self, x: torch.Tensor) -> torch.Tensor:
        """In place."""
        return x.relu_() if self._kernels is None else self._kernels.relu(x)

    def _layer_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        if self._kernels is not None and self._kernels.layer_norm is not None:
            return self._kernels.layer_norm(x, *norm, _EPS)
        return F.layer_norm(x, (self.spec.hidden,), *norm, eps=_EPS)
