"""The Qwen families. Qwen 2 and 2.5: Llama with biased query, key and value, and windows in some layers.
Qwen 3: without the biases, but with a norm for each head of query and key. Qwen 3 MoE: with experts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from runtime.engine.torch.experts import Mixture
from runtime.engine.torch.loader import CheckpointConfig
from runtime.engine.torch.models.llama import LlamaStage
from runtime.engine.torch.models.mixture import MixtureStage
from runtime.engine.torch.models.windows import layer_windows


class Qwen2Stage(LlamaStage):
    """One worker's part of a Qwen 2 or 2.5 model."""

    kv_heads_required = True

    def _biases(self, config: CheckpointConfig) -> tuple[bool, bool, bool]:
        return True, False, False

    def _parse_windows(self, config: CheckpointConfig, layers: int) -> list[int | None]:
        window = config.count("sliding_window") if config.get("use_sliding_window", False) else None
        full = config.count("max_window_layers", 28, least=0)
        return layer_windows(config, layers, window, lambda layer: layer >= full)


class Qwen3Stage(Qwen2Stage):
    """One worker's part of a Qwen 3 model."""

    def _biases(self, config: CheckpointConfig) -> tuple[bool, bool, bool]:
        attention = bool(config.get("attention_bias", False))
        return attention, attention, False

    def _default_head_dim(self, hidden: int, heads: int) -> int:
        return 128

    def _load_head_norm(self, name: str) -> Callable[[torch.Tensor], object]:
        return self._norm_of_heads(name)


class Qwen3MoeStage(MixtureStage, Qwen3Stage):
    """One worker's part of a Qwen 3 mixture of experts; some layers may have a single feed-forward."""

    def _default_head_dim(self, hidden: int, heads: int) -> int:
        return hidden // heads

    def _parse_windows(self, config: CheckpointConfig, layers: int) -> list[int | None]:
        used = config.get("use_sliding_window", False)
        return [config.count("sliding_window", 4096) if used else None] * layers

    def _parse_mixture(self, config: CheckpointConfig) -> Mixture:
        self._renormalises = bool(config.get("norm_topk_prob", False))
        self._every = config.count("decoder_sparse_step", 1)
        self._single = config.get("mlp_only_layers", [])
        if not isinstance(self._single, list):
            raise config.error("mlp_only_layers", "is not a list of layers", "download the checkpoint again")
        key = "num_local_experts" if "num_experts" not in config.values else "num_experts"
        chosen, width = config.count("num_experts_per_tok"), config.count("moe_intermediate_size")
        return Mixture(config.count(key), chosen, width)

    def _has_experts(self, layer: int) -> bool:
        return layer not in self._single and (layer + 1) % self._every == 0
