"""Number formats: bytes of weights and KV values, and the peak rates of the tensor cores that use them.

Quantised checkpoints keep the token table and the LM head in 16 bits, so they have `activation_bytes`.
"""

from __future__ import annotations

from cost_model.architecture import ModelArchitecture, WeightType
from cost_model.hardware import Accelerator

# int4: 4 bits and, for each group of 128 weights, a 16-bit scale and a 4-bit zero (GPTQ and AWQ defaults).
WEIGHT_BYTES: dict[WeightType, float] = {
    "fp32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": (4 + 20 / 128) / 8,
}
KV_BYTES: dict[str, float] = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}


def in_formats(
    model: ModelArchitecture, weights: WeightType | None = None, kv: str | None = None
) -> ModelArchitecture:
    """The model with weights and KV cache in other formats (None: unchanged); KeyError for an unknown one.

    Activations keep 16 bits if weights get fewer; how they are computed with is up to `matrix_flops_s`.
    """
    changes: dict[str, object] = {}
    if weights is not None:
        changes |= {"weight_type": weights, "weight_bytes": WEIGHT_BYTES[weights]}
        changes |= {"activation_bytes": max(2.0, WEIGHT_BYTES[weights])}
    if kv is not None:
        changes["kv_value_bytes"] = KV_BYTES[kv]
    return ModelArchitecture(**{**model.model_dump(), **changes})


def matrix_flops_s(accelerator: Accelerator, model: ModelArchitecture) -> float:
    """Peak operations/s of products of activations with this model's weights.

    With fp8 and int8 weights, activations are quantised on the fly if the card has tensor cores for the
    format; otherwise, and with int4, weights are unpacked to 16 bits."""
    speedup = {"fp8": accelerator.fp8_speedup, "int8": accelerator.int8_speedup}
    return accelerator.flops_s * speedup.get(model.weight_type, 1.0)
