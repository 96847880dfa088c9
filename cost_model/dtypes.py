"""Number formats: bytes of weights and KV values, which cards have kernels for them, and the peak rates.

Quantised checkpoints keep token table, LM head, norms, biases and routers in 16 bits, so these have
`activation_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from cost_model.architecture import ModelArchitecture, WeightType
from cost_model.errors import InputError
from cost_model.gpu_catalogue import Generation
from cost_model.hardware import Accelerator

# With the scales that are stored beside the weights. int4: for each group of 128, a 16-bit scale and a 4-bit
# zero (GPTQ and AWQ defaults); fp8_block: an fp32 scale per 128 x 128 (DeepSeek V3); nvfp4: an fp8 scale per
# 16; mxfp4: an 8-bit exponent per 32 (OCP Microscaling). Scales per tensor or channel are not counted: at
# most 1 in 2,000 bytes.
WEIGHT_BYTES: dict[WeightType, float] = {
    "fp32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1 + 4 / 128**2,
    "int8": 1.0,
    "int4": (4 + 20 / 128) / 8,
    "nvfp4": (4 + 8 / 16) / 8,
    "mxfp4": (4 + 8 / 32) / 8,
}
SIXTEEN_BIT: tuple[WeightType, ...] = ("fp32", "fp16", "bf16")
"""The formats that are not quantised: 16 bits and more."""
KV_BYTES: dict[str, float] = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes of a value in a KV cache, without scales."""
_KV_SCALE_BYTES: dict[str, float] = {"int8": 4.0}
"""What each key and value of a head has besides: a scale in fp32, in vLLM's int8_per_token_head and in the
torch engine. fp8 has none, or one for a whole tensor."""


def kv_format_fields(kv: str, kv_head_dim: int) -> dict[str, Any]:
    """The fields of ModelArchitecture that say how KV caches are stored.

    Parameters
    ----------
    kv_head_dim : values of one vector in the cache
    """
    width = KV_BYTES[kv] + _KV_SCALE_BYTES.get(kv, 0.0) / kv_head_dim
    return {"kv_type": kv, "kv_value_bytes": width}


def in_formats(
    model: ModelArchitecture, weights: str | None = None, kv: str | None = None
) -> ModelArchitecture:
    """The model with weights and KV cache in other formats (None: unchanged).

    Activations keep 16 bits if weights get fewer; how they are computed with is up to `matrix_flops_s`. In
    mxfp4, only experts are quantised, as in gpt-oss.

    Raises
    ------
    InputError : an unknown format
    """
    for option, value, known in (("--weights", weights, WEIGHT_BYTES), ("--kv", kv, KV_BYTES)):
        if value is not None and value not in known:
            raise InputError(option, "", f"is {value[:60]!r}", f"use one of {', '.join(known)}")
    changes: dict[str, object] = {}
    if weights is not None:
        width = WEIGHT_BYTES[weights]  # type: ignore[index]
        changes |= {"weight_type": weights, "weight_bytes": width, "activation_bytes": max(2.0, width)}
        changes |= {"only_experts_quantised": weights == "mxfp4"}
    if kv is not None:
        changes |= kv_format_fields(kv, model.kv_head_dim)
    return ModelArchitecture(**{**model.model_dump(), **changes})


Kernels = Literal["native", "weight-only", "none"]
"""Whether a card multiplies in the format, unpacks weights to 16 bits first, or cannot use it."""

# vLLM: its table of supported hardware for quantisation, fp8 and fp4 through Marlin on Ampere and later, and
# no int8 activations on Blackwell. On CPUs, the torch engine unpacks fp8 and mxfp4, which vLLM does not run
# there. bf16 weights become fp16 where a card has no bf16.
_NATIVE: dict[WeightType, set[Generation]] = {
    "bf16": {"ampere", "ada", "hopper", "blackwell", "cdna3", "cpu"},
    "fp8": {"ada", "hopper", "blackwell", "cdna3"},
    "fp8_block": {"ada", "hopper", "blackwell", "cdna3"},
    "int8": {"turing", "ampere", "ada", "hopper", "cpu"},
    "int4": set(),
    "nvfp4": {"blackwell"},
    "mxfp4": {"blackwell"},
}
_WEIGHT_ONLY: dict[WeightType, set[Generation]] = {
    "bf16": {"pascal", "volta", "turing", ""},
    "fp8": {"ampere", "cpu"},
    "fp8_block": {"ampere", "cpu"},
    "int8": {"volta", "blackwell"},
    "int4": {"volta", "turing", "ampere", "ada", "hopper", "blackwell", "cpu"},
    "nvfp4": {"ampere", "ada", "hopper"},
    "mxfp4": {"ampere", "ada", "hopper", "cdna3", "cpu"},
}


def kernels(accelerator: Accelerator, weights: WeightType) -> Kernels:
    """How the card computes with weights of a format."""
    if weights not in _NATIVE or accelerator.generation in _NATIVE[weights]:
        return "native"
    return "weight-only" if accelerator.generation in _WEIGHT_ONLY[weights] else "none"


def check_kernels(cards: Iterable[Accelerator], weights: WeightType, source: str, key: str = "") -> None:
    """Refuse weights in a format that one of the cards cannot use.

    Raises
    ------
    InputError : with `source` and `key`, naming the card and the formats that it can use
    """
    for card in cards:
        if kernels(card, weights) == "none":
            usable = ", ".join(known for known in WEIGHT_BYTES if kernels(card, known) != "none")
            remedy = f"use one of {usable}, or leave {card.name} out"
            if not card.generation:
                remedy += f", or state the generation of {card.name} under accelerators"
            raise InputError(source, key, f"{card.name} has no kernels for {weights} weights", remedy)


def matrix_flops_s(accelerator: Accelerator, model: ModelArchitecture) -> float:
    """Peak operations/s of products of activations with this model's quantised weights.

    Where the kernels are native, activations are quantised on the fly: to the format of the weights, with
    mxfp4 to fp8. Otherwise, and in attention that is not quantised, products are in 16 bits."""
    rate = peak_flops_s(accelerator, model.weight_type)
    if not model.only_experts_quantised:
        return rate
    plain = model.attention_params / model.active_layer_params
    return 1 / (plain / accelerator.flops_s + (1 - plain) / rate)


def peak_flops_s(accelerator: Accelerator, weights: WeightType) -> float:
    """Peak operations/s of products with weights of a format; see `matrix_flops_s`."""
    if kernels(accelerator, weights) != "native":
        return accelerator.flops_s
    speedup = {
        **dict.fromkeys(("fp8", "fp8_block", "mxfp4"), accelerator.fp8_speedup),
        "int8": accelerator.int8_speedup,
        "nvfp4": accelerator.fp4_speedup,
    }
    return accelerator.flops_s * speedup.get(weights, 1.0)
