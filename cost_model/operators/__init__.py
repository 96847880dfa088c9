"""Seconds of single operators on one GPU, as today's engines run them.

`Operators.of(accelerator)` answers for any GPU of the catalogue: with numbers fitted to measurements of that
GPU, or, scaled by its data sheet, with those of a relative. Formulas are physical; the numbers are shares of
peaks and a few microseconds. All times are those of the GPU, as in a CUDA graph, with weights and KV caches
read from memory, not from the L2 cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar, cast

from pydantic import BaseModel

from cost_model.architecture import WeightType
from cost_model.dtypes import KV_BYTES, WEIGHT_BYTES
from cost_model.gpu_catalogue import Generation
from cost_model.hardware import Accelerator, Link
from cost_model.operators.all_reduce import all_reduce_s
from cost_model.operators.attention import decode_attention_s, prefill_attention_s
from cost_model.operators.cards import Card, card_of, stand_in
from cost_model.operators.experts import Distribution, experts_s
from cost_model.operators.gemm import Weights
from cost_model.operators.mla import DEEPSEEK_V3, MlaShape, mla_decode_s, mla_prefill_s
from cost_model.operators.numbers import Fitted, MlaNumbers, OperatorFits, shipped

__all__ = ["DEEPSEEK_V3", "MlaShape", "Operators"]

N = TypeVar("N", bound=BaseModel)

_RELATIVES: dict[Generation, str] = {
    **dict.fromkeys(("pascal", "volta", "turing", "ampere"), "A100-80GB"),
    **{"ada": "L40S", "hopper": "H100", "blackwell": "B200"},
}
"""The measured card that stands for a generation: the oldest one for those before it."""

_LATENT_LAUNCH_US = 30.0
"""Most microseconds that launching a module of latent attention takes. Tables have 75 to 105 on Hopper, where
the host takes as long to start its kernels; servers, which start them in a CUDA graph, show about 30."""

_ALL_REDUCES = ("graph", "eager", "nccl")
KV_STAND_INS = {"fp32": "bf16", "fp16": "bf16", "int8": "fp8", "int4": "fp8"}
"""The formats of KV caches whose numbers stand in for those that were not measured."""


class Choice(NamedTuple):
    """The numbers that predict an operator, where they come from, and the relative error to expect."""

    numbers: Any
    origin: str
    error: float


class Operators:
    """Operator times of one GPU.

    Sizes are per GPU: heads, KV heads and columns that are divided among tensor-parallel GPUs are given
    after the division. `weights` are formats of cost_model/dtypes.py, `kv` those of its KV_BYTES: KeyError
    for others.
    """

    def __init__(self, accelerator: Accelerator, fits: OperatorFits) -> None:
        self.accelerator, self.fits = accelerator, fits
        self._choices: dict[tuple[str, str], Choice] = {}
        self._weights: dict[tuple[float, float, WeightType], Weights] = {}
        self._cards: dict[WeightType, Card] = {
            weights: card_of(accelerator, weights) for weights in WEIGHT_BYTES
        }

    @classmethod
    def of(cls, accelerator: Accelerator) -> Operators:
        """Operators of a GPU, with the numbers that ship."""
        return cls(accelerator, shipped())

    def gemm_s(self, m: float, n: float, k: float, weights: WeightType = "bf16") -> float:
        """Seconds of m x k activations times k x n weights."""
        key = n, k, weights
        known = self._weights.get(key)
        if known is None:
            known = Weights.of(self._numbers("gemm", weights), self._cards[weights], n, k)
            self._weights[key] = known
        return known.gemm_s(m)

    def prefill_attention_s(
        self,
        batch: float,
        tokens: float,
        attended: float,
        heads: float,
        kv_heads: float,
        head_dim: float,
        kv: str = "bf16",
    ) -> float:
        """Seconds of causal attention over `batch` prompts of together `tokens` tokens.

        attended : sum over the tokens of the keys that each sees: n (n + 1) / 2 for a prompt of n tokens, at
            most the window each
        """
        numbers = self._numbers("prefill_attention", KV_STAND_INS.get(kv, kv))
        sizes = (batch, tokens, attended, heads, kv_heads, head_dim)
        return prefill_attention_s(numbers, self._cards["bf16"], KV_BYTES[kv], *sizes)

    def decode_attention_s(
        self,
        batch: float,
        context: float,
        heads: float,
        kv_heads: float,
        head_dim: float,
        kv: str = "bf16",
    ) -> float:
        """Seconds of attention of `batch` decodes.

        context : sum over the requests of the cached tokens that each sees, at most the window each
        """
        numbers = self._numbers("decode_attention", KV_STAND_INS.get(kv, kv))
        sizes = (batch, context, heads, kv_heads, head_dim)
        return decode_attention_s(numbers, self._cards["bf16"], KV_BYTES[kv], *sizes)

    def mla_prefill_s(
        self,
        batch: float,
        tokens: float,
        attended: float,
        heads: float,
        weights: WeightType = "bf16",
        kv: str = "bf16",
        shape: MlaShape = DEEPSEEK_V3,
    ) -> float:
        """Seconds of an MLA module with its projections, for prompts; sizes as in `prefill_attention_s`."""
        numbers = self._numbers("mla_prefill", f"{weights}/{KV_STAND_INS.get(kv, kv)}")
        cards = self._cards[weights], self._cards["bf16"]
        return mla_prefill_s(numbers, *cards, shape, tokens, attended, batch, heads)

    def mla_decode_s(
        self,
        batch: float,
        context: float,
        heads: float,
        weights: WeightType = "bf16",
        kv: str = "bf16",
        shape: MlaShape = DEEPSEEK_V3,
    ) -> float:
        """Seconds of an MLA module with its projections, for decodes; sizes as in `decode_attention_s`."""
        numbers = self._numbers("mla_decode", f"{weights}/{KV_STAND_INS.get(kv, kv)}")
        cards = self._cards[weights], self._cards["bf16"]
        return mla_decode_s(numbers, *cards, KV_BYTES[kv], shape, batch, context, heads)

    def experts_s(
        self,
        tokens: float,
        hidden: float,
        inter: float,
        topk: float,
        experts: float,
        tp: float = 1,
        ep: float = 1,
        weights: WeightType = "bf16",
        distribution: Distribution = "power_law",
        gated: bool = True,
        skew: float | None = None,
    ) -> float:
        """Seconds of the routed experts of one layer on the busiest of tp * ep GPUs.

        tokens : of all GPUs together; inter : of a whole expert; gated : three matrices, or two
        skew : how many more tokens than the mean the busiest of many GPUs gets, in parts of that; None: as in
            the tables
        """
        numbers = self._numbers("experts", weights)
        sizes = (tokens, hidden, inter, topk, experts, tp, ep)
        balanced, matrices = float(distribution == "balanced"), 3.0 if gated else 2.0
        return experts_s(numbers, self._cards[weights], *sizes, balanced, matrices, skew)

    def all_reduce_s(self, gpus: int, message_bytes: float, link: Link, way: str = "graph") -> float:
        """Seconds for `gpus` of a node to add up a message.

        way : graph (the engine's kernels in a CUDA graph), eager (the same without) or nccl
        """
        if gpus == 1:
            return 0.0
        numbers = self._numbers("all_reduce", way)
        return all_reduce_s(numbers, link.bandwidth_bytes_s, gpus, message_bytes)

    def origin(self, operator: str, key: str = "bf16") -> str:
        """Where an operator's numbers come from: "fitted", "scaled from H100" and the like.

        operator : the method without _s; key : format of the weights, or of the KV cache, of both as
            "bf16/fp8" for MLA, or the way of an all-reduce
        """
        return self._choice(operator, key).origin

    def error(self, operator: str, key: str = "bf16") -> float:
        """The mean relative error to expect of shapes that were not measured."""
        return self._choice(operator, key).error

    def _numbers(self, operator: str, key: str) -> Any:
        """The numbers of an operator; key : its format as the tables name it."""
        known = self._choices.get((operator, key))
        return known.numbers if known else self._choice(operator, key).numbers

    def _choice(self, operator: str, key: str) -> Choice:
        if (operator, key) not in self._choices:
            tables = getattr(self.fits, operator)
            found = choose(tables, self.accelerator, key, self.fits.elsewhere.get(operator, 1.0))
            if isinstance(found.numbers, MlaNumbers) and found.numbers.launch_us > _LATENT_LAUNCH_US:
                in_graph = found.numbers.model_copy(update={"launch_us": _LATENT_LAUNCH_US})
                found = found._replace(numbers=in_graph)
            self._choices[(operator, key)] = found
        return self._choices[(operator, key)]


def choose(
    tables: Mapping[str, Mapping[str, Fitted[N]]], accelerator: Accelerator, key: str, elsewhere: float
) -> Choice:
    """The numbers for a card, from the nearest relative that was measured.

    In this order: the card's own; its own of a format that stands in; the same of the card that stands for
    its generation; the mean over all cards. KeyError for a key that nothing stands in for.
    """
    keys = _keys(accelerator, key)
    relative = _RELATIVES.get(accelerator.generation, "")
    for name in (accelerator.name, relative):
        for form in keys:
            fitted = tables.get(name, {}).get(form)
            if fitted is None:
                continue
            if name == accelerator.name and form == key:
                return Choice(fitted.numbers, "fitted", fitted.error)
            as_format = "" if form == key else f" as {form}"
            origin = f"scaled from {name}" if name != accelerator.name else "fitted"
            return Choice(fitted.numbers, origin + as_format, max(elsewhere, fitted.error))
    for form in keys:
        with_it = {name: formats[form].numbers for name, formats in sorted(tables.items()) if form in formats}
        if with_it:
            return Choice(mean(list(with_it.values())), f"mean of {', '.join(with_it)}", elsewhere)
    raise KeyError(key)


def mean(several: list[N]) -> N:
    """Numbers whose every field is the mean of the given ones'."""
    names = type(several[0]).model_fields
    values = {name: math.fsum(getattr(one, name) for one in several) / len(several) for name in names}
    return type(several[0])(**values)


def _keys(accelerator: Accelerator, key: str) -> tuple[str, ...]:
    """An operator's key (formats of weights, of the KV cache, of both; way of an all-reduce), and those whose
    numbers stand in for it, the nearest first. Over PCIe, engines leave all-reduces to NCCL."""
    if key in _ALL_REDUCES:
        return key, "nccl"
    weights, slash, kv = key.partition("/")
    nearest = [weights, stand_in(accelerator, cast(WeightType, weights))]
    nearest += ["fp8_block", "bf16"] if nearest[-1] == "fp8" else ["bf16"]
    return tuple(dict.fromkeys(form + slash + kv for form in nearest))
