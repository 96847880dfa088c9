"""The shape of a transformer, and the exact counts of parameters and bytes that follow from it."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from cost_model.fields import Name, between

Family = Literal["llama", "opt", "mixtral", "bloom", "gpt"]
WeightType = Literal["fp32", "fp16", "bf16", "fp8", "fp8_block", "int8", "int4", "nvfp4", "mxfp4"]
LARGEST = 10**8
Count = Annotated[int, Field(gt=0), between(1, LARGEST)]
ValueBytes = Annotated[float, Field(gt=0), between(1 / 64, 64)]


class ModelArchitecture(BaseModel):
    """The shape of a decoder-only transformer.

    `family` names the engine's model class. `biases`: every projection and norm has a bias; `qkv_bias`: only
    q, k and v have one (Qwen 2); `qk_norm`: the heads of q and k are normalised (Qwen 3); `position_offset`:
    the first rows of the position table that are not used (OPT). Layers hold weights of `weight_bytes` each;
    token table, LM head and activations have `activation_bytes`."""

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
    position_offset: Annotated[int, Field(ge=0), between(0, LARGEST)] = 0
    biases: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: Count = 1
    active_experts: Count = 1
    sliding_window: Annotated[int, between(1, LARGEST)] | None = None
    weight_type: WeightType = "bf16"
    weight_bytes: ValueBytes = 2.0
    activation_bytes: ValueBytes = 2.0
    kv_value_bytes: ValueBytes = 2.0

    @cached_property
    def attention_params(self) -> int:
        """Parameters of one layer's q, k, v and output projections."""
        q_width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = self.hidden * (2 * q_width + 2 * kv_width)
        biases = q_width + 2 * kv_width if self.biases or self.qkv_bias else 0
        biases += self.hidden if self.biases else 0
        return weights + biases + (2 * self.head_dim if self.qk_norm else 0)

    @cached_property
    def expert_params(self) -> int:
        """Parameters of one feed-forward block (one expert of a mixture)."""
        matrices = 3 if self.gated_ffn else 2
        return matrices * self.hidden * self.ffn + (self.ffn + self.hidden if self.biases else 0)

    @cached_property
    def layer_params(self) -> int:
        """Parameters of one layer, with all its experts and the router."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        return self.attention_params + self.experts * self.expert_params + router + 2 * self.norm_params

    @cached_property
    def norm_params(self) -> int:
        """Parameters of one norm over the hidden size: two in each layer, one before the head."""
        return self.hidden * (2 if self.biases else 1)

    @cached_property
    def active_layer_params(self) -> int:
        """Parameters of one layer that a token uses."""
        idle = (self.experts - self.active_experts) * self.expert_params
        return self.layer_params - idle

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
        return self.layers * self.layer_params + self.embedding_params + self.norm_params + head

    @cached_property
    def kv_bytes_per_token_layer(self) -> float:
        """Bytes of the keys and values of one token in one layer, all heads."""
        return 2 * self.kv_heads * self.head_dim * self.kv_value_bytes

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
