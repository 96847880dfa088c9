"""The DeepSeek-V3 family: multi-head latent attention, a mixture of experts in groups with experts that every
token uses, and single feed-forwards in the first layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch

from cost_model.architecture import LatentAttention
from runtime import native
from runtime.engine.torch.attention.base import Scoring
from runtime.engine.torch.experts import Mixture, Routing
from runtime.engine.torch.latent import LatentHeads, latent_attention, latent_rms
from runtime.engine.torch.linear import Linear
from runtime.engine.torch.loader import FLOATS, CheckpointConfig
from runtime.engine.torch.models.base import ModelSpec
from runtime.engine.torch.models.llama import Attention, FeedForward
from runtime.engine.torch.models.mixture import MixtureStage, Router
from runtime.engine.torch.models.rope import rope_parameters
from runtime.kv_cache.pool import CacheShape

Projection = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class DeepseekV3Stage(MixtureStage):
    """One worker's part of a DeepSeek-V3 model.

    The KV cache holds one vector for each token and layer, which every rank has (latent.py).
    """

    default_dense: ClassVar[int] = 3
    default_shared: ClassVar[int] = 0
    default_factor: ClassVar[float] = 2.5

    def _parse(self) -> ModelSpec:
        config = self.checkpoint.config
        config.require("attention_bias", False, False)
        config.require("moe_layer_freq", 1, 1)
        self._latent = LatentAttention(
            query_rank=config.get("q_lora_rank") and config.count("q_lora_rank"),
            latent_rank=config.count("kv_lora_rank"),
            nope_dim=config.count("qk_nope_head_dim"),
            rope_dim=config.count("qk_rope_head_dim"),
            value_dim=config.count("v_head_dim"),
        )
        self._interleaved = bool(config.get("rope_interleave", True))
        spec = replace(
            super()._parse(), kv_heads=1, head_dim=self._latent.latent_rank + self._latent.rope_dim
        )
        self._scoring = Scoring(scale=self._score_scale(config))
        return spec

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape(self.part, self.spec.head_dim, self.dtype, self.device, sides=1)

    def _default_head_dim(self, hidden: int, heads: int) -> int:
        """The part of a head that is rotated."""
        return self._latent.rope_dim

    def _score_scale(self, config: CheckpointConfig) -> float:
        """Attention gets sharper where YaRN stretches positions."""
        scale, scaling = (self._latent.nope_dim + self._latent.rope_dim) ** -0.5, rope_parameters(config)
        kind, weight = scaling.get("rope_type", scaling.get("type", "default")), scaling.get("mscale_all_dim")
        factor = float(scaling.get("factor") or 1)
        if kind == "default" or not weight or factor <= 1:
            return scale
        return scale * (0.1 * float(weight) * math.log(factor) + 1) ** 2

    # -- attention

    def _load_attention(self, name: str, layer: int) -> Attention:
        latent = self._latent
        norm = self._norm(f"{name}.kv_a_layernorm", latent.latent_rank)
        project = self._load_projection(name)
        heads = LatentHeads(
            latent,
            self.local_heads,
            self._load_expansion(name),
            norm,
            self._rotary,
            self._interleaved,
            self._scoring,
        )
        attend = latent_attention(heads, self.cache_shape)
        out = self.row_parallel(f"{name}.o_proj", self.cut(self.spec.heads * latent.value_dim), bias=False)
        return lambda x, batch: out(attend(*project(x), layer, batch))

    def _load_projection(self, name: str) -> Projection:
        """To this rank's queries, [tokens, heads x (nope_dim + rope_dim)], and to what becomes the cached
        vector, [tokens, latent_rank + rope_dim]."""
        latent = self._latent
        wide, cached = latent.nope_dim + latent.rope_dim, latent.latent_rank + latent.rope_dim
        queries, kept = self.cut(self.spec.heads * wide), (cached, 0, cached)
        if latent.query_rank is None:
            names, sizes = (f"{name}.q_proj", f"{name}.kv_a_proj_with_mqa"), (queries[2] - queries[1], cached)
            both = self.fused_columns(names, (queries, kept), bias=False)
            return lambda x: _in_two(both(x), sizes)
        rank = latent.query_rank
        names, sizes = (f"{name}.q_a_proj", f"{name}.kv_a_proj_with_mqa"), (rank, cached)
        both = self.fused_columns(names, ((rank, 0, rank), kept), bias=False)
        norm = self._norm(f"{name}.q_a_layernorm", rank)
        expand = self.fused_columns((f"{name}.q_b_proj",), (queries,), bias=False, inputs=rank)

        def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            low, kept = _in_two(both(x), sizes)
            return expand(latent_rms(low, norm)), kept

        return run

    def _load_expansion(self, name: str) -> torch.Tensor:
        """What expands a latent to keys and values; see `LatentHeads`."""
        latent = self._latent
        rows = self.cut(self.spec.heads * (latent.nope_dim + latent.value_dim))
        columns = (latent.latent_rank, 0, latent.latent_rank)
        return self.quantised.plain(f"{name}.kv_b_proj", rows, columns)

    # -- experts

    def _parse_mixture(self, config: CheckpointConfig) -> Mixture:
        key = "n_routed_experts" if "n_routed_experts" in config.values else "num_local_experts"
        experts, width = config.count(key), config.count("moe_intermediate_size")
        self._dense = config.count("first_k_dense_replace", self.default_dense, least=0)
        self._shared = config.count("n_shared_experts", self.default_shared, least=0) * width
        self._groups, self._chosen_groups = self._parse_groups(config)
        self._factor = float(config.get("routed_scaling_factor", self.default_factor))
        self._renormalises = bool(config.get("norm_topk_prob", True))
        if experts % self._groups or self._chosen_groups > self._groups:
            problem = f"{self._chosen_groups} of {self._groups} groups of {experts} experts cannot be chosen"
            raise config.error("n_group", problem, "download the checkpoint again")
        return Mixture(experts, config.count("num_experts_per_tok"), width)

    def _parse_groups(self, config: CheckpointConfig) -> tuple[int, int]:
        """How many groups the experts form, and from how many of them a token's experts are."""
        return config.count("n_group", 8), config.count("topk_group", 4)

    def _has_experts(self, layer: int) -> bool:
        return layer >= self._dense

    def _split_widths(self) -> dict[str, int]:
        return super()._split_widths() | ({"n_shared_experts": self._shared} if self._shared else {})

    def _load_feed_forward(self, name: str, layer: int) -> FeedForward:
        routed = super()._load_feed_forward(name, layer)
        if not self._shared or not self._has_experts(layer):
            return routed
        names = (f"{name}.mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down"))
        gate, up, down = names
        shared = self.gated((gate, up, down), self.cut(self._shared), bias=False)
        return lambda x: self._add(routed(x), shared(x))

    def _load_router(self, name: str) -> Router:
        experts = self._mixture.experts
        router = Linear(self.checkpoint.read(f"{name}.gate.weight", (experts, self.spec.hidden)).float())
        bias = self.checkpoint.read_stored(f"{name}.gate.e_score_correction_bias", (experts,), FLOATS).float()
        return self._routed(router, Routing(is_sigmoid=True, best=2, bias=bias, **self._limits()))

    def _limits(self) -> dict[str, Any]:
        """What routings of the family have in common."""
        return {
            "chosen": self._mixture.chosen,
            "renormalises": self._renormalises,
            "factor": self._factor,
            "groups": self._groups,
            "kept_groups": self._chosen_groups,
        }

    def _routed(self, router: Linear, routing: Routing) -> Router:
        """Logits are computed in float32."""
        return lambda x: routing(router(native.converted(x, torch.float32)))


def _in_two(x: torch.Tensor, sizes: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns of x [tokens, width] in two parts of these widths."""
    first, second = x.split(sizes, dim=1)
    return first, second
