"""The shape of a transformer, and the exact counts of parameters and bytes that follow from it."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from cost_model.fields import Name, between
from cost_model.lengths import Window

Family = Literal[
    "llama",
    "opt",
    "mixtral",
    "bloom",
    "gpt",
    "phi3",
    "gemma2",
    "gemma3",
    "qwen3_moe",
    "gpt_oss",
    "minimax_m2",
    "deepseek_v3",
]
WeightType = Literal["fp32", "fp16", "bf16", "fp8", "fp8_block", "int8", "int4", "nvfp4", "mxfp4"]
KvType = Literal["fp32", "fp16", "bf16", "fp8", "int8", "int4"]
LARGEST = 10**8
Count = Annotated[int, Field(gt=0), between(1, LARGEST)]
CountOrZero = Annotated[int, Field(ge=0), between(0, LARGEST)]
ValueBytes = Annotated[float, Field(gt=0), between(1 / 64, 64)]


_LATER_FIELDS = (
    "expert_ffn",
    "expert_biases",
    "shared_ffn",
    "dense_layers",
    "full_attention_layers",
    "latent",
    "other_layer_params",
    "only_experts_quantised",
    "plain_weight_bytes",
)
_KV_TYPES: dict[float, KvType] = {4.0: "fp32", 2.0: "bf16", 1.0: "fp8", 0.5: "int4"}
"""The formats of KV caches that their bytes per value tell, which placements need not name."""


class LatentAttention(BaseModel):
    """Multi-head latent attention (DeepSeek-V2, section 2.1): the cache holds one latent vector per token.

    Queries are projected through `query_rank` (None: directly); `latent_rank` values of a token and
    `rope_dim` rotated ones are cached, from which each head's key (`nope_dim` + `rope_dim`) and value
    (`value_dim`) follow.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    query_rank: Count | None = None
    latent_rank: Count
    nope_dim: Count
    rope_dim: Count
    value_dim: Count

    def params(self, hidden: int, heads: int) -> int:
        """Parameters of a layer's attention, norms of query and latent included."""
        q_width = heads * (self.nope_dim + self.rope_dim)
        rank = self.query_rank
        queries = hidden * q_width if rank is None else rank * (hidden + q_width + 1)
        latent = hidden * (self.latent_rank + self.rope_dim) + self.latent_rank
        expanded = self.latent_rank * heads * (self.nope_dim + self.value_dim)
        return queries + latent + expanded + heads * self.value_dim * hidden


class ModelArchitecture(BaseModel):
    """The shape of a decoder-only transformer.

    `family` names the engine's model class. `biases`: every projection and norm has a bias; `qkv_bias`: only
    q, k and v have one (Qwen 2); `qk_norm`: the heads of q and k are normalised (Qwen 3); `position_offset`:
    the first rows of the position table that are not used (OPT). The matrices of layers hold weights of
    `weight_bytes` each, scales included; where `only_experts_quantised`, only those of experts (or of the
    only feed-forward block) do (gpt-oss). All other weights have `plain_weight_bytes` (None: as activations),
    and activations `activation_bytes`. Each value of a KV cache takes `kv_value_bytes`, scales included, in
    the format `kv_type`.

    Layers may differ: `dense_layers` of them have one feed-forward block of `ffn` instead of experts (of
    `expert_ffn`, where that differs from `ffn`) and of shared experts, which every token uses (`shared_ffn`
    wide together); `full_attention_layers` are those that `sliding_window` does not limit. Costs of a layer
    are means over all layers. With `latent` attention there is one KV head, the latent, of which every
    tensor-parallel rank holds a copy. `other_layer_params` are those of a layer that no other field implies:
    further norms, attention sinks.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name
    family: Family
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    ffn: Count
    gated_ffn: bool = True
    vocab: Count
    tied_embeddings: bool = False
    max_position: Count
    learned_positions: bool = False
    position_offset: CountOrZero = 0
    biases: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: Count = 1
    active_experts: Count = 1
    sliding_window: Annotated[int, between(1, LARGEST)] | None = None
    weight_type: WeightType = "bf16"
    weight_bytes: ValueBytes = 2.0
    activation_bytes: ValueBytes = 2.0
    plain_weight_bytes: ValueBytes | None = None
    kv_value_bytes: ValueBytes = 2.0
    kv_type: KvType = "bf16"
    expert_ffn: Count | None = None
    expert_biases: bool = False
    shared_ffn: CountOrZero = 0
    dense_layers: CountOrZero = 0
    full_attention_layers: tuple[CountOrZero, ...] = ()
    latent: LatentAttention | None = None
    other_layer_params: CountOrZero = 0
    only_experts_quantised: bool = False

    @model_validator(mode="before")
    @classmethod
    def _kv_type_of_bytes(cls, fields: Any) -> Any:
        """Add the format of KV caches where only their bytes are given."""
        if not isinstance(fields, dict) or "kv_type" in fields:
            return fields
        width = fields.get("kv_value_bytes", 2.0)
        known = _KV_TYPES.get(width) if isinstance(width, int | float) else None
        return {**fields, "kv_type": known or "bf16"}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        """Refuse layers that there are not, and a latent cache divided into heads."""
        if self.dense_layers > self.layers:
            raise PydanticCustomError("dense_layers", "dense_layers should not exceed layers")
        full = self.full_attention_layers
        if full and (list(full) != sorted(set(full)) or full[-1] >= self.layers):
            raise PydanticCustomError(
                "full_attention_layers", "full_attention_layers should rise and be less than layers"
            )
        if self.latent is not None and self.kv_heads != 1:
            raise PydanticCustomError("kv_heads", "kv_heads should be 1 with latent attention")
        return self

    @model_serializer(mode="wrap")
    def _without_unused(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The fields that came after the first placements are left out where a model does not use them, so
        that placements made before and after them have the same bytes."""
        fields: dict[str, Any] = dump(self)
        kinds = type(self).model_fields
        unused = {key for key in _LATER_FIELDS if getattr(self, key) == kinds[key].default}
        if self.kv_type == _KV_TYPES.get(self.kv_value_bytes):
            unused.add("kv_type")
        return {key: value for key, value in fields.items() if key not in unused}

    @property
    def plain_bytes(self) -> float:
        """Bytes of a weight that is not quantised."""
        return self.activation_bytes if self.plain_weight_bytes is None else self.plain_weight_bytes

    @cached_property
    def window(self) -> Window | None:
        """How far attention looks back, and in which share of the layers; None: without limit in all."""
        if self.sliding_window is None:
            return None
        return Window(self.sliding_window, 1 - len(self.full_attention_layers) / self.layers)

    @cached_property
    def full_attention_excess(self) -> float:
        """By how many layers any run of consecutive layers has more full attention than an even share of it:
        the largest sum of a run (Kadane's algorithm)."""
        share = len(self.full_attention_layers) / self.layers
        excess, largest, before = 0.0, 0.0, -1
        for layer in self.full_attention_layers:
            excess = max(0.0, excess - share * (layer - before - 1)) + 1 - share
            largest, before = max(largest, excess), layer
        return largest

    @cached_property
    def attention_params(self) -> int:
        """Parameters of one layer's q, k, v and output projections."""
        if self.latent is not None:
            return self.latent.params(self.hidden, self.heads)
        q_width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = self.hidden * (2 * q_width + 2 * kv_width)
        biases = q_width + 2 * kv_width if self.biases or self.qkv_bias else 0
        biases += self.hidden if self.biases else 0
        return weights + biases + (2 * self.head_dim if self.qk_norm else 0)

    @cached_property
    def attention_bytes(self) -> float:
        """Bytes of one layer's q, k, v and output projections."""
        quantised = 0 if self.only_experts_quantised else self._attention_matrices_params
        return self.attention_params * self.plain_bytes + self._saved(quantised)

    @cached_property
    def expert_params(self) -> int:
        """Parameters of one expert of a mixture, or of the only feed-forward block."""
        return self._ffn_params(self.expert_ffn or self.ffn)

    @cached_property
    def layer_params(self) -> float:
        """Parameters of one layer, with all its experts and the router: the mean, if layers differ."""
        return self._mean(self._all_layers_params)

    @cached_property
    def expert_bytes(self) -> float:
        """Bytes of one expert of a mixture, or of the only feed-forward block."""
        matrices = self._matrices_params(self.expert_ffn or self.ffn)
        return self.expert_params * self.plain_bytes + self._saved(matrices)

    @cached_property
    def layer_bytes(self) -> float:
        """Bytes of one layer's weights, with all its experts and the router: the mean, if layers differ."""
        mixtures = (self.layers - self.dense_layers) * self._quantised_params(mixture=True)
        dense = self.dense_layers * self._quantised_params(mixture=False)
        return self.layer_params * self.plain_bytes + self._saved(mixtures + dense) / self.layers

    @cached_property
    def largest_layer_bytes(self) -> float:
        """Bytes of the largest layer's weights."""
        blocks = [(self._mixture_params, True)] if self.dense_layers < self.layers else []
        blocks += [(self._ffn_params(self.ffn), False)] if self.dense_layers else []
        return max(
            (self._params_beside_ffn + params) * self.plain_bytes
            + self._saved(self._quantised_params(mixture))
            for params, mixture in blocks
        )

    @cached_property
    def total_bytes(self) -> float:
        """Bytes of all weights, each counted once."""
        others = self.total_params - self._all_layers_params
        return self.layers * self.layer_bytes + others * self.plain_bytes

    @cached_property
    def norm_params(self) -> int:
        """Parameters of one norm over the hidden size: two in each layer, one before the head."""
        return self.hidden * (2 if self.biases else 1)

    @cached_property
    def active_layer_params(self) -> float:
        """Parameters of one layer that a token uses: the mean, if layers differ."""
        return self._mean(self._all_layers_params - self._idle_params)

    @cached_property
    def mixture_share(self) -> float:
        """Share of the layers that have experts, if any has."""
        return (self.layers - self.dense_layers) / self.layers

    @cached_property
    def embedding_params(self) -> int:
        """Parameters of the first stage beside its layers: token table, learned positions (OPT), norm
        (BLOOM)."""
        positions = self.max_position + self.position_offset if self.learned_positions else 0
        return (self.vocab + positions) * self.hidden + (self.norm_params if self.family == "bloom" else 0)

    @cached_property
    def head_params(self) -> int:
        """Parameters of the LM head, which the last stage holds whether or not it is tied to the token
        table."""
        return self.vocab * self.hidden

    @cached_property
    def total_params(self) -> int:
        """All parameters, each counted once: a tied head belongs to the token table."""
        head = 0 if self.tied_embeddings else self.head_params
        return self._all_layers_params + self.embedding_params + self.norm_params + head

    @cached_property
    def active_params(self) -> int:
        """All parameters but those of the experts that a token does not use."""
        return self.total_params - self._idle_params

    @cached_property
    def prompt_attended_flops(self) -> int:
        """FLOPs of one attended token in one layer's prefill, all heads: scores and weighted values, two per
        element."""
        if self.latent is None:
            return 4 * self.heads * self.head_dim
        return 2 * self.heads * (self.latent.nope_dim + self.latent.rope_dim + self.latent.value_dim)

    @cached_property
    def decode_attended_flops(self) -> int:
        """The same in decode, where latent attention works on the cached vectors themselves (DeepSeek-V2,
        section 2.1.2: expansion is absorbed into the projections of queries and outputs)."""
        if self.latent is None:
            return self.prompt_attended_flops
        return 2 * self.heads * (2 * self.latent.latent_rank + self.latent.rope_dim)

    @cached_property
    def kv_head_dim(self) -> int:
        """Values of one vector in the cache: a key or a value of a head, or the latent."""
        if self.latent is not None:
            return self.latent.latent_rank + self.latent.rope_dim
        return self.head_dim

    @cached_property
    def kv_values_per_token_layer(self) -> int:
        """Values that the cache keeps of one token in one layer: keys and values of all heads, or the
        latent."""
        return self.kv_head_dim if self.latent is not None else 2 * self.kv_heads * self.head_dim

    @cached_property
    def kv_bytes_per_token_layer(self) -> float:
        """Bytes of the KV cache of one token in one layer, all heads."""
        return self.kv_values_per_token_layer * self.kv_value_bytes

    @cached_property
    def kv_bytes_per_token(self) -> float:
        """Bytes of the keys and values of one token in all layers (335 MB for 1024 tokens of Llama-2 70B)."""
        return self.layers * self.kv_bytes_per_token_layer

    def tensor_degrees(self, limit: int) -> list[int]:
        """The tensor-parallel degrees up to `limit` that split the query heads evenly, and split or replicate
        the KV heads evenly."""
        return [n for n in range(1, limit + 1) if self.heads % n == 0 and self._kv_heads_split(n)]

    def _kv_heads_split(self, degree: int) -> bool:
        """Whether this degree splits the KV heads evenly, or replicates each evenly."""
        return self.kv_heads % degree == 0 or degree % self.kv_heads == 0

    def _ffn_params(self, width: int) -> int:
        """Parameters of a feed-forward block of this width."""
        matrices = 3 if self.gated_ffn else 2
        biases = (matrices - 1) * width + self.hidden if self.biases or self.expert_biases else 0
        return self._matrices_params(width) + biases

    def _matrices_params(self, width: int) -> int:
        """The same without biases."""
        return (3 if self.gated_ffn else 2) * self.hidden * width

    def _quantised_params(self, mixture: bool) -> int:
        """Parameters that quantisation applies to in a layer with experts (or with the only feed-forward
        block), or in one of the dense layers among such."""
        experts = self.experts * self._matrices_params(self.expert_ffn or self.ffn) if mixture else 0
        if self.only_experts_quantised:
            return experts
        others = self._matrices_params(self.shared_ffn if mixture else self.ffn)
        return experts + self._attention_matrices_params + others

    @cached_property
    def _attention_matrices_params(self) -> int:
        """Parameters of one layer's attention without biases and norms."""
        if self.latent is not None:
            return self.attention_params - self.latent.latent_rank - (self.latent.query_rank or 0)
        return 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim

    def _saved(self, params: int) -> float:
        """Bytes (negative) that quantisation saves on so many parameters of matrices."""
        return params * (self.weight_bytes - self.plain_bytes)

    @cached_property
    def _mixture_params(self) -> int:
        """Parameters of a layer's experts and router, or of its only feed-forward block."""
        if self.experts == 1:
            return self.expert_params
        router = self.experts * (self.hidden + (1 if self.expert_biases else 0))
        shared = self._ffn_params(self.shared_ffn) if self.shared_ffn else 0
        return self.experts * self.expert_params + router + shared

    @cached_property
    def _params_beside_ffn(self) -> int:
        """Parameters of one layer outside its feed-forward part."""
        return self.attention_params + 2 * self.norm_params + self.other_layer_params

    @cached_property
    def _all_layers_params(self) -> int:
        """Parameters of all layers."""
        mixtures = (self.layers - self.dense_layers) * self._mixture_params
        dense = self.dense_layers * self._ffn_params(self.ffn)
        return self.layers * self._params_beside_ffn + mixtures + dense

    @cached_property
    def _idle_params(self) -> int:
        """Parameters of the experts that a token does not use, all layers."""
        layers, idle = self.layers - self.dense_layers, self.experts - self.active_experts
        return layers * idle * self.expert_params

    def _mean(self, params: int) -> float:
        """Of all layers' parameters, one layer's: a whole number where layers are alike."""
        return params // self.layers if params % self.layers == 0 else params / self.layers
