"""The operators that one layer of a model consists of, on the busiest GPU of a stage."""

from __future__ import annotations

from functools import cached_property

from cost_model.architecture import ModelArchitecture, WeightType
from cost_model.base import TensorGroup
from cost_model.collectives import all_reduce_s
from cost_model.hardware import NO_LINK
from cost_model.operators import KV_STAND_INS, MlaShape, Operators
from cost_model.operators.arithmetic import Amount
from cost_model.operators.cards import units

_STREAMED = 0.7
"""Share of the memory bandwidth that kernels without products reach, assumed."""

_ROWS = 64
"""Rows of the smallest tile of a product (cost_model/operators/gemm.py); all larger ones are multiples."""


class StepOperators:
    """Seconds of a layer's operators, as a mean over the model's layers.

    Where parts of the stage's GPUs run attention for requests of their own (attention data parallelism), each
    part does everything but routed experts for its own tokens only.

    Parameters
    ----------
    group : the stage's GPUs; model : with the formats of its weights and KV cache
    operators : of the group's GPUs

    All amounts of work may be floats, or numpy arrays of them.
    """

    def __init__(self, model: ModelArchitecture, group: TensorGroup, operators: Operators) -> None:
        self.model, self.group = model, group
        self.operators = operators
        self.attention_degree = group.degree // group.attention_dp
        self.heads = model.heads / self.attention_degree
        self.kv_heads = max(1.0, model.kv_heads / self.attention_degree)
        self.dense_type: WeightType = plain_type(model) if model.only_experts_quantised else model.weight_type
        self.kv = model.kv_type
        self._bandwidth = group.accelerator.memory_bandwidth_bytes_s * _STREAMED
        self._latent = None
        if model.latent is not None:
            latent = model.latent
            self._latent = MlaShape(
                model.hidden,
                latent.query_rank or model.hidden,
                latent.latent_rank,
                latent.nope_dim,
                latent.rope_dim,
                latent.value_dim,
            )

    def sources(self) -> list[tuple[str, str, float]]:
        """Name, origin and expected error of each operator that a stage's layers consist of."""
        kv = KV_STAND_INS.get(self.kv, self.kv)
        prompts, decodes = "attention of prompts", "of decodes"
        found = [("matrix products", "gemm", str(self.dense_type))]
        if self._latent is None:
            found += [(prompts, "prefill_attention", kv), (decodes, "decode_attention", kv)]
        else:
            both = f"{self.dense_type}/{kv}"
            found += [(prompts, "mla_prefill", both), (decodes, "mla_decode", both)]
        if self.model.experts > 1:
            found.append(("experts", "experts", self.model.weight_type))
        if self.group.degree > 1 and self.group.link.fabric == "nvlink":
            found.append(("all-reduces", "all_reduce", "graph"))
        origin, error = self.operators.origin, self.operators.error
        return [(name, origin(operator, key), error(operator, key)) for name, operator, key in found]

    @cached_property
    def tile_batches(self) -> tuple[float, ...]:
        """Decodes per step that fill one tile of products, and one wave of attention: beyond a multiple of
        either, a step takes longer by a jump."""
        products = float(_ROWS)
        if self._latent is not None:
            return (products,)
        return products, self.group.attention_dp * units(self.group.accelerator) / self.kv_heads

    def products_s(self, own: Amount) -> Amount:
        """Products of a part's `own` tokens with weights that every token uses: projections of attention,
        feed-forward blocks, shared experts and routers."""
        model, n, weights = self.model, self.attention_degree, self.dense_type
        gemm, h, mixture = self.operators.gemm_s, model.hidden, model.mixture_share
        taken = 0.0
        if self._latent is None:
            width = self.heads * model.head_dim
            taken = gemm(own, width + 2 * self.kv_heads * model.head_dim, h, weights)
            taken = taken + gemm(own, h, width, weights)
        if model.experts == 1 or mixture < 1:
            dense = self._block_s(own, model.ffn / n)
            taken = taken + (dense if model.experts == 1 else (1 - mixture) * dense)
        if model.experts > 1:
            taken = taken + mixture * gemm(own, model.experts, h, "bf16")
            if model.shared_ffn:
                taken = taken + mixture * self._block_s(own, model.shared_ffn / n)
        return taken

    def _block_s(self, tokens: Amount, width: float) -> Amount:
        """A feed-forward block of this width on one GPU."""
        h, weights = self.model.hidden, self.dense_type
        up = 2 * width if self.model.gated_ffn else width
        return self.operators.gemm_s(tokens, up, h, weights) + self.operators.gemm_s(
            tokens, h, width, weights
        )

    def prompts_s(self, prompts: Amount, tokens: Amount, attended: Amount) -> Amount:
        """Attention over `prompts` prompts of together `tokens` tokens; latent attention with its
        projections."""
        if self._latent is not None:
            return self.operators.mla_prefill_s(
                prompts, tokens, attended, self.heads, self.dense_type, self.kv, self._latent
            )
        sizes = (prompts, tokens, attended, self.heads, self.kv_heads, self.model.head_dim)
        return self.operators.prefill_attention_s(*sizes, self.kv)

    def decodes_s(self, decodes: Amount, context: Amount) -> Amount:
        """Attention of `decodes` requests over together `context` tokens; latent attention with its
        projections."""
        if self._latent is not None:
            return self.operators.mla_decode_s(
                decodes, context, self.heads, self.dense_type, self.kv, self._latent
            )
        return self.operators.decode_attention_s(
            decodes, context, self.heads, self.kv_heads, self.model.head_dim, self.kv
        )

    def experts_s(self, tokens: Amount, skew: float) -> Amount:
        """Routed experts of all tokens of the stage; skew as in `Operators.experts_s`."""
        model, parts = self.model, self.group.expert_parallel
        if model.experts == 1:
            return 0.0
        return model.mixture_share * self.operators.experts_s(
            tokens,
            model.hidden,
            model.expert_ffn or model.ffn,
            model.active_experts,
            model.experts,
            self.group.degree / parts,
            parts,
            model.weight_type,
            gated=model.gated_ffn,
            skew=skew,
        )

    def exchange_s(self, own: Amount, tokens: Amount) -> Amount:
        """What the GPUs add up after attention, and after experts or the feed-forward block. Where attention
        is data-parallel, they gather tokens before the latter and scatter results after it, which moves as
        much."""
        if self.group.degree == 1 or self.group.link == NO_LINK:
            return 0.0
        size = self.model.hidden * self.model.activation_bytes
        total = self._all_reduce_s(self.group.degree, tokens * size)
        if self.attention_degree > 1:
            total = total + self._all_reduce_s(self.attention_degree, own * size)
        return total

    def _all_reduce_s(self, degree: int, message_bytes: Amount) -> Amount:
        """By the engines' own kernels over NVLink, otherwise by a library of collectives."""
        link = self.group.link
        if link.fabric == "nvlink":
            return self.operators.all_reduce_s(degree, message_bytes, link)
        return all_reduce_s(link, degree, message_bytes)

    def elementwise_s(self, own: Amount) -> Amount:
        """Norms with residuals (two, each reading and writing two vectors), rotation of queries and keys,
        and activation functions."""
        model = self.model
        width = (self.heads + self.kv_heads) * model.head_dim
        ffn = 0.0 if model.experts > 1 else model.ffn / self.attention_degree
        elements = own * (8.0 * model.hidden + 2.0 * width + 3.0 * ffn)
        return elements * model.activation_bytes / self._bandwidth

    def head_s(self, sampled: Amount) -> Amount:
        """The LM head of so many tokens of a part."""
        columns = self.model.vocab / self.attention_degree
        return self.operators.gemm_s(sampled, columns, self.model.hidden, plain_type(self.model))


def plain_type(model: ModelArchitecture) -> WeightType:
    """The format of weights that are not quantised."""
    return model.weight_type if model.weight_type in ("fp32", "fp16") else "bf16"
