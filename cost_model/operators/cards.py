"""What operators need to know of a GPU and of a number format."""

from __future__ import annotations

from typing import NamedTuple

from cost_model.architecture import WeightType
from cost_model.dtypes import WEIGHT_BYTES, kernels, peak_flops_s
from cost_model.gpu_catalogue import DATA_SHEETS
from cost_model.hardware import Accelerator

_PROCESSORS = {sheet.name: sheet.processors for sheet in DATA_SHEETS if sheet.processors is not None}

_FLOPS_S_PER_UNIT = 5e12
"""16-bit peak of one unit, where their number is not known: between A100's 2.9e12 and H100's 7.5e12."""


class Card(NamedTuple):
    """A GPU as products in one format see it.

    flops_s : peak of what the tensor cores compute in; bandwidth_bytes_s : of the memory
    units : streaming multiprocessors (or compute units), which work side by side
    weight_bytes, input_bytes : of one weight, scales included, and of one activation
    """

    flops_s: float
    bandwidth_bytes_s: float
    units: float
    weight_bytes: float
    input_bytes: float


def card_of(accelerator: Accelerator, weights: WeightType) -> Card:
    """The card in a format. Where it has no kernels of the format's own, weights are unpacked to 16 bits."""
    return Card(
        peak_flops_s(accelerator, weights),
        accelerator.memory_bandwidth_bytes_s,
        units(accelerator),
        WEIGHT_BYTES[weights],
        _input_bytes(accelerator, weights),
    )


def units(accelerator: Accelerator) -> float:
    """Streaming multiprocessors; estimated from the peak where the catalogue has no figure."""
    known = _PROCESSORS.get(accelerator.name)
    return float(known) if known else max(8.0, float(round(accelerator.flops_s / _FLOPS_S_PER_UNIT)))


def stand_in(accelerator: Accelerator, weights: WeightType) -> WeightType:
    """The format whose numbers are nearest to those of one that was not measured: what is computed in."""
    if kernels(accelerator, weights) != "native" or weights == "fp16":
        return "bf16"
    return weights if weights in ("bf16", "nvfp4") else "fp8"


def _input_bytes(accelerator: Accelerator, weights: WeightType) -> float:
    """Bytes of one activation of a product: quantised like the weights (with mxfp4, to fp8), or 16 bits."""
    if kernels(accelerator, weights) != "native":
        return 2.0
    return 1.0 if weights == "mxfp4" else WEIGHT_BYTES[weights]
