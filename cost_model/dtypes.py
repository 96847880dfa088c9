"""Number formats: bytes of weights and of KV values, and which tensor cores compute with them.

Quantised checkpoints keep token table and LM head in 16 bits, and so do the counts (`activation_bytes`).
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
    """The model with its weights and its KV cache in other formats (None: as they are); KeyError if unknown.

    Activations stay as they are where weights get fewer bits: their format follows from the weights', see
    `matrix_flops_s`.
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

    With fp8 and int8 weights, activations are quantised on the way where the card has tensor cores for it;
    elsewhere, and with int4, weights are unpacked to 16 bits.
    """
    speedup = {"fp8": accelerator.fp8_speedup, "int8": accelerator.int8_speedup}
    return accelerator.flops_s * speedup.get(model.weight_type, 1.0)
