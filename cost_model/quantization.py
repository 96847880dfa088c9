"""The formats of a checkpoint's weights and KV cache, from the `quantization_config` of its config.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cost_model.architecture import WeightType
from cost_model.dtypes import KV_BYTES, WEIGHT_BYTES
from cost_model.errors import InputError

_ATTENTION = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.self_attn")
_MAX_GROUP = 1 << 20


@dataclass(frozen=True)
class ActivationScheme:
    """How a checkpoint rounds activations to integers of 8 bits: each token by its own scale, or, where it is
    static, all by a scale in the file; symmetric, or with a zero, too."""

    symmetric: bool
    static: bool


@dataclass(frozen=True)
class WeightScheme:
    """How a checkpoint stores its quantised matrices.

    Attributes
    ----------
    weight_bytes : of a weight, with its scales and zeros
    group : inputs that share a scale and a zero; None: all of them
    block : outputs and inputs that share a scale, if it is for blocks
    symmetric : all zeros are the same, so that nobody needs to keep them
    method : the `quant_method`
    activations : of products with weights of 8 bits; None: they are not rounded, or in another way
    """

    weight_type: WeightType
    weight_bytes: float
    group: int | None = None
    block: tuple[int, int] | None = None
    symmetric: bool = True
    method: str = ""
    activations: ActivationScheme | None = None


@dataclass(frozen=True)
class _Quantization:
    """The raw keys, read with the errors that a user can act on."""

    raw: Mapping[str, Any]
    source: str
    within: str

    def error(self, key: str, problem: str, remedy: str) -> InputError:
        """An error about a key of this part of the file."""
        return InputError(self.source, f"{self.within}.{key}" if key else self.within, problem, remedy)

    def unknown(self, key: str, known: str) -> InputError:
        """An error about a value that nothing here models."""
        value = self.raw.get(key)
        shown = "is missing" if value is None else f"{ascii(value)[:60]} is not known"
        return self.error(key, shown, f"use a checkpoint with one of {known}, or one in 16 bits")

    def integer(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """The first of `keys` that is there, as a whole number."""
        key = next((k for k in keys if self.raw.get(k) is not None), keys[0])
        value = self.raw.get(key, default)
        if value is None and default is not None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MAX_GROUP:
            problem = "is missing" if value is None else f"is {ascii(value)[:60]}"
            raise self.error(key, problem, f"it must be a whole number from {least} to {_MAX_GROUP}")
        return value

    def part(self, key: str) -> _Quantization:
        """The object under a key; without entries if there is none."""
        value = self.raw.get(key) or {}
        if not isinstance(value, dict):
            raise self.error(key, "is not a JSON object", "take the model's own config.json")
        return _Quantization(value, self.source, f"{self.within}.{key}")


def quantised_formats(quantization: object, source: str, key: str, layers: int) -> dict[str, Any]:
    """What a `quantization_config` says about weights and KV cache, as fields of ModelArchitecture.

    Knows the methods fp8, fbgemm_fp8, awq, gptq, compressed-tensors, modelopt and mxfp4 as vLLM and
    transformers write them. Attention counts as not quantised where the config excludes it in every layer.

    Parameters
    ----------
    source, key : the file and the name of the object in it, for errors
    layers : of the model

    Raises
    ------
    InputError : another method, a number of bits without kernels, or several formats of weights side by side
    """
    config = _checked(quantization, source, key)
    scheme = weight_scheme(quantization, source, key)
    return {
        "weight_type": scheme.weight_type,
        "weight_bytes": scheme.weight_bytes,
        "only_experts_quantised": scheme.weight_type == "mxfp4" or _excludes_attention(config, layers),
        **_kv_cache(config),
    }


def weight_scheme(quantization: object, source: str, key: str) -> WeightScheme:
    """How matrices are stored, according to a `quantization_config`; see `quantised_formats`."""
    config = _checked(quantization, source, key)
    method = config.raw.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise config.unknown("quant_method", ", ".join(_METHODS))
    return replace(_METHODS[method](config), method=method)


def _checked(quantization: object, source: str, key: str) -> _Quantization:
    if not isinstance(quantization, dict):
        raise InputError(source, key, "is not a JSON object", "take the model's own config.json")
    return _Quantization(quantization, source, key)


def _kv_cache(config: _Quantization) -> dict[str, Any]:
    """The format of the KV cache, where the checkpoint has scales for one: with them, engines use it unless
    told otherwise. Nothing where it says none."""
    algorithm = config.raw.get("kv_cache_quant_algo")
    if isinstance(algorithm, str):
        if algorithm.upper() != "FP8":
            raise config.unknown("kv_cache_quant_algo", "FP8")
        return {"kv_value_bytes": KV_BYTES["fp8"]}
    if config.raw.get("kv_cache_scheme") is None:
        return {}
    scheme = config.part("kv_cache_scheme")
    if (scheme.integer("num_bits"), scheme.raw.get("type")) != (8, "float"):
        raise scheme.unknown("num_bits", "8 bits of the type float")
    return {"kv_value_bytes": KV_BYTES["fp8"]}


def _fp8(config: _Quantization) -> WeightScheme:
    """Per tensor or channel, or by blocks with an fp32 scale each (DeepSeek V3)."""
    if config.raw.get("weight_block_size") is not None:
        return _fp8_by_blocks(config, "weight_block_size")
    return WeightScheme("fp8", WEIGHT_BYTES["fp8"])


def _fp8_by_blocks(config: _Quantization, key: str) -> WeightScheme:
    block = config.raw.get(key)
    sides = block if isinstance(block, list) else []
    whole = all(isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= _MAX_GROUP for n in sides)
    if len(sides) != 2 or not whole:
        raise config.error(key, f"is {ascii(block)[:60]}", "it must be two whole numbers, such as [128, 128]")
    return WeightScheme("fp8_block", 1 + 4 / (sides[0] * sides[1]), block=(sides[0], sides[1]))


def _awq(config: _Quantization) -> WeightScheme:
    """4 bits; per group a 16-bit scale and, unless symmetric, a zero of 4 bits."""
    if config.integer("bits", "w_bit", default=4) != 4:
        raise config.unknown("bits", "4 bits")
    group = config.integer("group_size", "q_group_size", default=128, least=-1)
    return _grouped(4, group, config.raw.get("zero_point") is False)


def _gptq(config: _Quantization) -> WeightScheme:
    """4 or 8 bits; per group a 16-bit scale and, unless `sym`, a zero as wide as a weight. Files have the
    zeros of symmetric weights, too, but no engine keeps them."""
    bits = config.integer("bits")
    if bits not in (4, 8):
        raise config.unknown("bits", "4 or 8 bits")
    group = config.integer("group_size", default=128, least=-1)
    return _grouped(bits, group, config.raw.get("sym") is True)


def _grouped(bits: int, group: int, symmetric: bool) -> WeightScheme:
    """Integers of 4 or 8 bits with a 16-bit scale per group; -1 and 0: a group is a whole channel."""
    of_group = 16 + (0 if symmetric else bits)
    width = bits / 8 if group <= 0 else (bits + of_group / group) / 8
    kept = None if group <= 0 else group
    return WeightScheme("int4" if bits == 4 else "int8", width, group=kept, symmetric=symmetric)


def _modelopt(config: _Quantization) -> WeightScheme:
    """NVIDIA Model Optimizer, which names its algorithm."""
    algorithm = config.raw.get("quant_algo")
    if not isinstance(algorithm, str) and config.raw.get("config_groups"):
        return _compressed_tensors(config)
    formats: dict[str, WeightType] = {"FP8": "fp8", "FP8_PB_WO": "fp8_block", "NVFP4": "nvfp4"}
    if not isinstance(algorithm, str) or algorithm.upper() not in formats:
        raise config.unknown("quant_algo", ", ".join(formats))
    weights = formats[algorithm.upper()]
    return WeightScheme(weights, WEIGHT_BYTES[weights])


def _compressed_tensors(config: _Quantization) -> WeightScheme:
    """Groups of layers with a scheme each, whose weights must be the same for all."""
    groups = config.part("config_groups")
    parts = [groups.part(name) for name in groups.raw]
    found = {_scheme(part.part("weights")) for part in parts}
    if len(found) != 1:
        problem = "is missing" if not found else "has several formats side by side"
        raise config.error("config_groups", problem, "use a checkpoint with one format of weights")
    scheme, activations = found.pop(), {_activations(part.part("input_activations")) for part in parts}
    rounded = scheme.weight_type == "int8" and len(activations) == 1
    return replace(scheme, activations=activations.pop() if rounded else None)


def _activations(inputs: _Quantization) -> ActivationScheme | None:
    """Integers of 8 bits, by tokens as they come or by a scale for all."""
    raw = inputs.raw
    static = not raw.get("dynamic", False)
    if (raw.get("num_bits"), raw.get("type", "int")) != (8, "int"):
        return None
    if raw.get("strategy") != ("tensor" if static else "token"):
        return None
    return ActivationScheme(raw.get("symmetric") is not False, static)


def _scheme(weights: _Quantization) -> WeightScheme:
    """The format of one scheme of compressed-tensors."""
    bits, kind, strategy = (
        weights.integer("num_bits"),
        weights.raw.get("type", "int"),
        weights.raw.get("strategy"),
    )
    if kind == "float" and bits == 8:
        return _fp8_by_blocks(weights, "block_structure") if strategy == "block" else WeightScheme("fp8", 1.0)
    group = weights.integer("group_size", default=-1, least=-1)
    if kind == "float" and bits == 4 and group in (16, 32):
        fp4: WeightType = "nvfp4" if group == 16 else "mxfp4"
        return WeightScheme(fp4, WEIGHT_BYTES[fp4])
    if kind == "int" and bits in (4, 8):
        return _grouped(bits, group, weights.raw.get("symmetric") is not False)
    raise weights.unknown("num_bits", "int 4 or 8, float 8, or float 4 in groups of 16 or 32")


def _mxfp4(config: _Quantization) -> WeightScheme:
    """OpenAI's gpt-oss: only the experts."""
    return WeightScheme("mxfp4", WEIGHT_BYTES["mxfp4"])


_METHODS: dict[str, Callable[[_Quantization], WeightScheme]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "mxfp4": _mxfp4,
}


def _excludes_attention(config: _Quantization, layers: int) -> bool:
    """Whether the names that are left in 16 bits cover the attention of all layers: by a pattern, or one by
    one. Patterns are not evaluated, since a file could hold one that takes for ever."""
    listed: list[str] = []
    for key in ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules"):
        names = config.raw.get(key)
        listed += [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    of_attention = [name for name in listed if "self_attn" in name]
    if any("*" in name.split("self_attn")[0] for name in of_attention) or "self_attn" in of_attention:
        return True
    return len({match[1] for name in of_attention if (match := _ATTENTION.search(name))}) >= layers
