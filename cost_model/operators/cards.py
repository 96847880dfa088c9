"""What operators need to know of a GPU beside its data sheet's rates, and of a number format."""

from __future__ import annotations

import re
from typing import NamedTuple

from cost_model.hardware import Accelerator


class Card(NamedTuple):
    """A GPU's peaks for one operator: operations/s of the format, bytes/s of its memory, and how many units
    (streaming multiprocessors) compute side by side."""

    flops_s: float
    bandwidth_bytes_s: float
    units: float


class Format(NamedTuple):
    """Bytes of one weight (scales included) and of one activation of a product, and what it computes in."""

    weight_bytes: float
    input_bytes: float
    computed_in: str


FORMATS = {
    "bfloat16": Format(2.0, 2.0, "bfloat16"),
    "fp8": Format(1.0, 1.0, "fp8"),
    "fp8_block": Format(1.0, 1.0, "fp8"),
    "int8_wo": Format(1.0, 2.0, "bfloat16"),
    "int4_wo": Format(0.5 + 2.5 / 128, 2.0, "bfloat16"),
    "w4a16_mxfp4": Format(0.5 + 1.0 / 32, 2.0, "bfloat16"),
    "nvfp4": Format(0.5 + 1.0 / 16, 0.5 + 1.0 / 16, "nvfp4"),
}
"""fp8: scales per tensor or channel; fp8_block: per 128 x 128 weights; _wo, w4a16: only weights are
quantised. int4 has a 16-bit scale and a 4-bit zero per 128 weights (GPTQ, AWQ), nvfp4 an 8-bit scale per 16
values, mxfp4 one per 32."""

KV_BYTES = {"bfloat16": 2.0, "fp8": 1.0}

_UNITS = {
    "B300": 148, "B200": 148, "GB200": 152, "GB300": 152, "RTX5090": 170, "RTXPRO6000": 188,
    "H200": 132, "H100-PCIe": 114, "H100-NVL": 132, "H100": 132, "H800": 132, "H20": 78,
    "L40S": 142, "L40": 142, "L4": 58, "RTX4090": 128,
    "A100-80GB": 108, "A100-40GB": 108, "A800-80GB": 108, "A30": 56, "A40": 84, "A10G": 80, "A6000": 84,
    "RTX3090": 82, "V100-32GB": 80, "V100-16GB": 80, "T4": 40, "P100": 56, "P100-12GB": 56,
    "MI300X": 304, "MI325X": 304,
}  # fmt: skip
"""Streaming multiprocessors (compute units of AMD's), from the data sheets and architecture white papers."""

_GENERATIONS = (
    ("blackwell", re.compile(r"G?B[23]00|RTX-?5\d\d\d|RTX-?PRO|RTX-?PRO-?6000")),
    ("hopper", re.compile(r"G?H(20|100|200|800)(?!\d)")),
    ("ada", re.compile(r"L4(0S?)?(?!\d)|RTX-?4\d\d\d")),
    ("ampere", re.compile(r"A(10|30|40|100|800|6000)G?(?!\d)|RTX-?3\d\d\d|V100|T4|P100")),
)
"""The generation by whose measured card a card is predicted; older ones count as Ampere."""

_FLOPS_PER_UNIT = 4e12
"""Operations/s of one unit, for cards that are not listed: between A100's 2.9 and H100's 7.5."""


def generation(accelerator: Accelerator) -> str | None:
    """blackwell, hopper, ada or ampere; None if the name tells nothing."""
    return next((name for name, cards in _GENERATIONS if cards.match(accelerator.name)), None)


def units(accelerator: Accelerator) -> float:
    """Streaming multiprocessors; estimated from the peak for a card that is not listed."""
    known = _UNITS.get(accelerator.name)
    return float(known) if known else max(8.0, accelerator.flops_s / _FLOPS_PER_UNIT)


def computes_in(accelerator: Accelerator, number_format: str) -> str:
    """The format that tensor cores compute in: bfloat16 where the card lacks those of the format, which is
    then unpacked (as Marlin kernels do)."""
    wanted = FORMATS[number_format].computed_in
    if wanted == "nvfp4" and generation(accelerator) != "blackwell":
        return "bfloat16"
    return "bfloat16" if wanted == "fp8" and accelerator.fp8_speedup == 1.0 else wanted


def card_of(accelerator: Accelerator, number_format: str) -> Card:
    """The card's peaks for products in a format (a key of FORMATS)."""
    speedup = {"bfloat16": 1.0, "fp8": accelerator.fp8_speedup, "nvfp4": 2.0 * accelerator.fp8_speedup}
    flops_s = accelerator.flops_s * speedup[computes_in(accelerator, number_format)]
    return Card(flops_s, accelerator.memory_bandwidth_bytes_s, units(accelerator))
