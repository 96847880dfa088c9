"""How quantisation methods store matrices: a function for each, and `FORMATS` with all of them.

Where a part of a matrix ends inside a word of several codes, or inside a group, the whole word and the
group's scales are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from cost_model.quantization import WeightScheme
from runtime.engine.torch.quantised.activations import Activations
from runtime.engine.torch.quantised.part import (
    SCALES,
    Part,
    offset,
    per_word,
    trimmed,
    unpacked,
    words,
)
from runtime.engine.torch.quantised.weight import Kind, QuantisedWeight

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word the codes of eight outputs are."""


def awq(part: Part, scheme: WeightScheme) -> QuantisedWeight:
    """AutoAWQ (GEMM): qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]."""
    kind, (outputs, inputs), rows = Kind.INT4, part.shape, part.rows[1:]
    count = -(-inputs // (scheme.group or inputs))

    def codes(suffix: str, length: int, lines: tuple[int, int] | None) -> torch.Tensor:
        packed = part.read(suffix, (length, outputs // per_word(kind)), ("I32",), lines, words(rows, kind))
        in_words = unpacked(packed, kind).T.contiguous().unflatten(0, (-1, per_word(kind)))
        return trimmed(in_words[:, list(_AWQ_PLACES)].flatten(0, 1).T, rows, kind).T

    return part.weight(
        kind,
        codes("qweight", inputs, part.columns[1:]),
        part.read("scales", (count, outputs), SCALES, None, rows).T,
        codes("qzeros", count, None) if part.has("qzeros") else None,
        part.groups(scheme),
    )


def gptq(part: Part, scheme: WeightScheme) -> QuantisedWeight:
    """GPTQ: qweight [in * bits / 32, out], qzeros [groups, out * bits / 32], scales [groups, out].

    A zero is stored less one, unless `checkpoint_format` is gptq_v2. g_idx [in] has each input's
    group, in any order (desc_act).
    """
    kind = _integers(scheme)
    (outputs, inputs), rows, columns = part.shape, part.rows[1:], part.columns[1:]
    count = -(-inputs // (scheme.group or inputs))
    packed = part.read("qweight", (inputs // per_word(kind), outputs), ("I32",), words(columns, kind), rows)
    packed_zeros = part.read("qzeros", (count, outputs // per_word(kind)), ("I32",), None, words(rows, kind))
    zeros = trimmed(unpacked(packed_zeros, kind), rows, kind).T
    if part.checkpoint.config.values["quantization_config"].get("checkpoint_format") != "gptq_v2":
        zeros = (zeros + 1) & (2**kind.bits - 1)
    alike = scheme.symmetric and bool((zeros == kind.middle).all())
    return part.weight(
        kind,
        trimmed(unpacked(packed.T, kind), columns, kind),
        part.read("scales", (count, outputs), SCALES, None, rows).T,
        None if alike else zeros,
        part.groups(scheme),
    )


def compressed_tensors(part: Part, scheme: WeightScheme) -> QuantisedWeight:
    """compressed-tensors, and what has the same tensors: fp8, FBGEMM, Model Optimizer.

    Codes are in weight_packed [out, in * bits / 32], with weight_zero_point [out * bits / 32, groups]; or in
    weight [out, in] of 8 bits, with weight_zero_point like the scales. weight_scale is for the whole matrix,
    for outputs [out, 1], for groups of inputs [out, groups], or for blocks (there also weight_scale_inv).
    Where inputs are rounded in the same way for all tokens, input_scale and perhaps input_zero_point say how.
    """
    kind = Kind.FP8 if scheme.weight_type.startswith("fp8") else _integers(scheme)
    suffix = "weight_scale_inv" if part.has("weight_scale_inv") else "weight_scale"
    scales, groups = _scales(part, scheme, suffix, SCALES)
    zeroed, rows, columns = part.has("weight_zero_point") and not scheme.symmetric, *_spans(part)
    zeros: torch.Tensor | None = None
    if part.has("weight_packed"):
        shape = part.shape[0], -(-part.shape[1] // per_word(kind))
        packed = part.read("weight_packed", shape, ("I32",), rows, words(columns, kind))
        codes = trimmed(unpacked(packed, kind), columns, kind)
        if zeroed:
            shape = -(-part.shape[0] // per_word(kind)), scales.shape[1]
            packed = part.read("weight_zero_point", shape, ("I32",), words(rows, kind))
            zeros = trimmed(unpacked(packed.T, kind), rows, kind).T
    else:
        types = ("F8_E4M3",) if kind == Kind.FP8 else ("I8",)
        codes = offset(part.read("weight", part.shape, types, rows, columns), kind)
        if zeroed:
            zeros = offset(_scales(part, scheme, "weight_zero_point", ("I8",))[0], kind)
    weight = part.weight(kind, codes, scales, zeros, groups)
    return replace(weight, activations=_activations(part, scheme))


Format = Callable[[Part, WeightScheme], QuantisedWeight]
FORMATS: dict[str, Format] = {
    "awq": awq,
    "gptq": gptq,
    "compressed-tensors": compressed_tensors,
    "fp8": compressed_tensors,
    "fbgemm_fp8": compressed_tensors,
    "modelopt": compressed_tensors,
}
"""By `quant_method`."""


def _activations(part: Part, scheme: WeightScheme) -> Activations | None:
    """How the inputs of a matrix are rounded."""
    rule = scheme.activations
    if rule is None or not rule.static:
        return None if rule is None else Activations(rule.symmetric)
    scale, zero = part.read_one("input_scale", SCALES), torch.zeros(())
    if not rule.symmetric:
        zero = part.read_one("input_zero_point", ("I8",))
    return Activations(rule.symmetric, torch.stack((scale, zero)))


def _scales(
    part: Part, scheme: WeightScheme, suffix: str, types: tuple[str, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales [rows, groups] of all groups of the matrix, and the group of each column of the part."""
    (outputs, inputs), rows = part.shape, part.rows[1:]
    stored = part.checkpoint.stored_shape(f"{part.name}.{suffix}")
    groups = part.groups(scheme, "weight_g_idx")
    if stored in ((), (1,), (1, 1)) and outputs > 1:
        return part.read(suffix, stored, types).view(1, 1).expand(rows[1] - rows[0], 1), groups
    if scheme.block is not None:
        tall, wide = scheme.block
        blocks = part.read(suffix, (-(-outputs // tall), -(-inputs // wide)), types)
        of_rows = torch.arange(*rows, device=blocks.device) // tall
        return blocks[of_rows], torch.arange(*part.columns[1:], device=blocks.device) // wide
    shape = (outputs, -(-inputs // scheme.group) if scheme.group else 1)[: len(stored)]
    return part.read(suffix, shape, types, rows).view(rows[1] - rows[0], -1), groups


def _spans(part: Part) -> tuple[tuple[int, int], tuple[int, int]]:
    return part.rows[1:], part.columns[1:]


def _integers(scheme: WeightScheme) -> Kind:
    return Kind.INT4 if scheme.weight_type == "int4" else Kind.INT8
