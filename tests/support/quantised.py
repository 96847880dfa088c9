"""Quantised checkpoints as the libraries that make them store them, and the same weights in float32."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import forward
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from safetensors.torch import load_file, save_file

Stored = tuple[dict[str, torch.Tensor], torch.Tensor]
"""The tensors of a matrix by suffix, and the matrix that they stand for in float32."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The outputs whose codes follow each other in a word, from the lowest bits on (AutoAWQ, WQLinear_GEMM)."""
LARGEST_FP8 = 448.0
_PLAIN = ("norm", "embed", "lm_head", ".gate.", "bias")


@dataclass
class Rounded:
    """weight[o, i] = (codes[o, i] - zeros[o, g]) * scales[o, g], where g = groups[i]; codes from 0 on."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor

    def value(self) -> torch.Tensor:
        scales, zeros = self.scales.float()[:, self.groups], self.zeros[:, self.groups]
        return (self.codes - zeros).float() * scales


def rounded(
    weight: torch.Tensor,
    bits: int,
    group: int,
    symmetric: bool,
    shuffled: bool = False,
    scales: torch.dtype = torch.float16,
) -> Rounded:
    """To the nearest codes, with a scale for each group of inputs; shuffled: groups are in no order."""
    inputs, top = weight.shape[1], 2**bits - 1
    groups = torch.arange(inputs) // (group if group > 0 else inputs)
    if shuffled:
        groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    found_scales, zeros = [], []
    for number in range(int(groups.max()) + 1):
        part = weight[:, groups == number]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        span = 2 * torch.maximum(-low, high) if symmetric else high - low
        scale = (span / top).clamp(min=1e-6).to(scales)
        middle = torch.full(scale.shape, (top + 1) // 2)
        zeros.append(middle if symmetric else (-low / scale.float()).round().clamp(1, top).long())
        found_scales.append(scale)
    found = Rounded(weight, torch.stack(found_scales, 1), torch.stack(zeros, 1), groups)
    steps = weight / found.scales.float()[:, groups] + found.zeros[:, groups]
    found.codes = steps.round().clamp(0, top).long()
    return found


def in_words(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[n, codes] -> [n, words] int32, the lowest bits first; `order` says which code comes next in a word."""
    each = 32 // bits
    words = torch.zeros(len(codes), codes.shape[1] // each, dtype=torch.int64)
    for place, which in enumerate(order or range(each)):
        words |= codes[:, which::each] << (bits * place)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def awq(weight: torch.Tensor, group: int) -> Stored:
    found = rounded(weight, 4, group, symmetric=False)
    words = {"qweight": found.codes.T, "qzeros": found.zeros.T}
    packed = {name: in_words(codes, 4, AWQ_ORDER) for name, codes in words.items()}
    return {**packed, "scales": found.scales.T}, found.value()


def gptq(
    weight: torch.Tensor, bits: int, group: int, symmetric: bool, desc_act: bool, less: int = 1
) -> Stored:
    """`less`: what is taken from zeros before they are stored."""
    found = rounded(weight, bits, group, symmetric, desc_act)
    stored = {
        "qweight": in_words(found.codes, bits).T,
        "qzeros": in_words(found.zeros.T - less, bits),
        "scales": found.scales.T,
        "g_idx": found.groups.int(),
    }
    return stored, found.value()


def packed(weight: torch.Tensor, bits: int, group: int, symmetric: bool, shuffled: bool = False) -> Stored:
    """compressed-tensors, pack-quantized."""
    found = rounded(weight, bits, group, symmetric, shuffled, torch.float32)
    middle = 2 ** (bits - 1)
    stored = {
        "weight_packed": pack_to_int32((found.codes - middle).to(torch.int8), bits),
        "weight_scale": found.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        zeros = (found.zeros - middle).to(torch.int8)
        stored["weight_zero_point"] = pack_to_int32(zeros, bits, packed_dim=0)
    if shuffled:
        stored["weight_g_idx"] = found.groups.int()
    return stored, found.value()


def bytes_of_8(weight: torch.Tensor, symmetric: bool) -> Stored:
    """compressed-tensors, int-quantized by channels."""
    found = rounded(weight, 8, -1, symmetric, scales=torch.float32)
    stored = {"weight": (found.codes - 128).to(torch.int8), "weight_scale": found.scales}
    if not symmetric:
        stored["weight_zero_point"] = (found.zeros - 128).to(torch.int8)
    return stored, found.value()


def static(stored: Stored, scale: float, zero: int | None = None) -> Stored:
    """With a scale, and perhaps a zero, for all inputs."""
    tensors = {**stored[0], "input_scale": torch.tensor([scale])}
    if zero is not None:
        tensors["input_zero_point"] = torch.tensor([zero], dtype=torch.int8)
    return tensors, stored[1]


def fp8(weight: torch.Tensor, rows: int, columns: int, suffix: str = "weight_scale") -> Stored:
    """E4M3 with a scale for each block of rows x columns; 0: of all of them. Scales per row are [rows, 1],
    one for the whole matrix has no dimension."""
    (outputs, inputs), tall, wide = weight.shape, rows or len(weight), columns or weight.shape[1]
    padded = torch.nn.functional.pad(weight, (0, -inputs % wide, 0, -outputs % tall)).abs()
    largest = padded.unflatten(1, (-1, wide)).amax(2).unflatten(0, (-1, tall)).amax(1)
    scales = largest.clamp(min=1e-6) / LARGEST_FP8
    whole = scales[torch.arange(outputs) // tall][:, torch.arange(inputs) // wide]
    codes = (weight / whole).to(torch.float8_e4m3fn)
    return {"weight": codes, suffix: scales if rows or columns else scales.squeeze()}, codes.float() * whole


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}


_BY_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
_STATIC = {**_BY_TOKEN, "strategy": "tensor", "dynamic": False}


def _compressed(layout: str, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    scheme: dict[str, Any] = {"targets": ["Linear"], "weights": {"dynamic": False, **weights}}
    if inputs is not None:
        scheme["input_activations"] = inputs
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head", "re:.*block_sparse_moe.gate$"],
    }


def _gptq(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, **more}


_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
_TO_16 = ["lm_head", "gate"]

FORMATS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Stored]]] = {
    "AWQ": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
        lambda weight: awq(weight, 64),
    ),
    "GPTQ 4 bits": (
        _gptq(4, 32, sym=True, desc_act=False),
        lambda weight: gptq(weight, 4, 32, symmetric=True, desc_act=False),
    ),
    "GPTQ 4 bits, groups of 128": (
        _gptq(4, 128, sym=True, desc_act=False),
        lambda weight: gptq(weight, 4, 128, symmetric=True, desc_act=False),
    ),
    "GPTQ 4 bits, desc_act, zeros": (
        _gptq(4, 16, sym=False, desc_act=True, checkpoint_format="gptq"),
        lambda weight: gptq(weight, 4, 16, symmetric=False, desc_act=True),
    ),
    "GPTQ 4 bits, version 2": (
        _gptq(4, -1, sym=False, desc_act=False, checkpoint_format="gptq_v2"),
        lambda weight: gptq(weight, 4, -1, symmetric=False, desc_act=False, less=0),
    ),
    "GPTQ 8 bits": (
        _gptq(8, 64, sym=False, desc_act=False),
        lambda weight: gptq(weight, 8, 64, symmetric=False, desc_act=False),
    ),
    "compressed-tensors int4": (
        _compressed("pack-quantized", **_INT4, symmetric=True),
        lambda weight: packed(weight, 4, 32, symmetric=True),
    ),
    "compressed-tensors int4, zeros": (
        _compressed("pack-quantized", **_INT4, symmetric=False),
        lambda weight: packed(weight, 4, 32, symmetric=False),
    ),
    "compressed-tensors int4, actorder": (
        _compressed("pack-quantized", **_INT4, symmetric=True, actorder="group"),
        lambda weight: packed(weight, 4, 32, symmetric=True, shuffled=True),
    ),
    "compressed-tensors int8, packed": (
        _compressed("pack-quantized", **_INT8, symmetric=True),
        lambda weight: packed(weight, 8, -1, symmetric=True),
    ),
    "compressed-tensors int8": (
        _compressed("int-quantized", **_INT8, symmetric=True),
        lambda weight: bytes_of_8(weight, symmetric=True),
    ),
    "compressed-tensors int8, zeros": (
        _compressed("int-quantized", **_INT8, symmetric=False),
        lambda weight: bytes_of_8(weight, symmetric=False),
    ),
    "W8A8": (
        _compressed("int-quantized", _BY_TOKEN, **_INT8, symmetric=True),
        lambda weight: bytes_of_8(weight, symmetric=True),
    ),
    "W8A8, zeros": (
        _compressed("int-quantized", {**_BY_TOKEN, "symmetric": False}, **_INT8, symmetric=False),
        lambda weight: bytes_of_8(weight, symmetric=False),
    ),
    "W8A8, static": (
        _compressed("int-quantized", _STATIC, **_INT8, symmetric=True),
        lambda weight: static(bytes_of_8(weight, symmetric=True), 0.03),
    ),
    "W8A8, static, zeros": (
        _compressed("int-quantized", {**_STATIC, "symmetric": False}, **_INT8, symmetric=True),
        lambda weight: static(bytes_of_8(weight, symmetric=True), 0.03, -20),
    ),
    "compressed-tensors fp8": (
        _compressed("float-quantized", **_FP8, strategy="channel"),
        lambda weight: fp8(weight, 1, 0),
    ),
    "compressed-tensors fp8, per tensor": (
        _compressed("float-quantized", **_FP8, strategy="tensor"),
        lambda weight: fp8(weight, 0, 0),
    ),
    "fp8 by blocks": (
        {"quant_method": "fp8", "weight_block_size": [16, 32], "modules_to_not_convert": _TO_16},
        lambda weight: fp8(weight, 16, 32, "weight_scale_inv"),
    ),
    "fp8 by blocks of 128": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": _TO_16},
        lambda weight: fp8(weight, 128, 128, "weight_scale_inv"),
    ),
    "FBGEMM fp8": (
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": _TO_16},
        lambda weight: fp8(weight, 1, 0),
    ),
    "Model Optimizer fp8": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": _TO_16},
        lambda weight: fp8(weight, 0, 0),
    ),
}

ROUNDED = [name for name in FORMATS if name.startswith("W8A8")]
"""Those whose activations are integers, too: transformers rounds them by compressed-tensors."""


NOT_ROUNDED = ("deepseek_v2", "deepseek_v3", "mixtral", "qwen3_moe", "opt")
"""Families whose activations transformers does not round as such files say: it reads no experts that are
stored so, and gives all tokens of OPT's feed-forward one scale."""
_NOTE = "rounding.json"
_NOT_MULTIPLIED = ("lm_head", "kv_b_proj")
"""Linear modules whose inputs stay as they are; docs/quantised.md says why those of the latter do."""


def the_same_in_transformers(family: str, name: str, stored: Path, plain: Path) -> Path:
    """The folder from which `checkpoints.by_transformers` makes a model that computes what a quantised one
    stands for: the same weights in float32; where activations are rounded, too, the quantised model itself,
    or for families that are NOT_ROUNDED the same weights with a note that inputs are to be rounded."""
    if name not in ROUNDED:
        return plain
    if family not in NOT_ROUNDED:
        return stored
    into, args = plain.with_name("rounded"), FORMATS[name][0]["config_groups"]["group_0"]["input_activations"]
    tensors = load_file(stored / "model.safetensors")

    def shared(suffix: str) -> float:
        return next((value.item() for key, value in tensors.items() if key.endswith(suffix)), 0)

    note = {"args": args, "scale": shared(".input_scale"), "zero": shared(".input_zero_point")}
    shutil.copytree(plain, into)
    (into / _NOTE).write_text(json.dumps(note))
    return into


def round_inputs(model: torch.nn.Module, folder: Path) -> None:
    """If a folder's note says so, let compressed-tensors round what modules of transformers multiply by
    weights that the quantised model has in integers, each token by itself."""
    if not (folder / _NOTE).exists():
        return
    note = json.loads((folder / _NOTE).read_text())
    args = QuantizationArgs(**note["args"])

    def rounded_input(x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(1, -1, x.shape[-1])
        if args.dynamic:
            scales, zeros = compute_dynamic_scales_and_zp(tokens, args, torch.nn.Module())
        else:
            scales, zeros = torch.tensor([note["scale"]]), torch.tensor([note["zero"]])
        return forward.fake_quantize(tokens, scales, zeros, args).view_as(x)

    def with_rounded_products(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*inputs: torch.Tensor) -> torch.Tensor:
            def product(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
                return linear(rounded_input(x), *weights)

            linear, torch.nn.functional.linear = torch.nn.functional.linear, product
            try:
                return compute(*inputs)
            finally:
                torch.nn.functional.linear = linear

        return run

    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, torch.nn.Linear) and last not in _NOT_MULTIPLIED:
            module.register_forward_pre_hook(lambda _, inputs: (rounded_input(inputs[0]),))
        elif last == "experts":
            module.forward = with_rounded_products(module.forward)


@contextmanager
def without_lowest_code() -> Iterator[None]:
    """Let compressed-tensors round tokens that have their own scales, but no zeros, to codes from -127 on.

    runtime/engine/torch/quantised/activations.py says why the engine does so."""
    as_usual = forward.calculate_range

    def narrower(args: QuantizationArgs, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        lowest, highest = as_usual(args, device)
        return (-highest if args.dynamic and args.symmetric else lowest), highest

    forward.calculate_range = narrower
    try:
        yield
    finally:
        forward.calculate_range = as_usual


def quantise(folder: Path, name: str, into: Path, plain: Path | None = None) -> None:
    """Write the model of a folder in a format, and with the same weights in float32."""
    config, store = FORMATS[name]
    shutil.copytree(folder, into)
    stored, values = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for tensor, weight in load_file(folder / "model.safetensors").items():
        if weight.dim() != 2 or any(part in tensor for part in _PLAIN):
            stored[tensor] = values[tensor] = weight
            continue
        parts, values[tensor] = store(weight.float())
        module = tensor.removesuffix(".weight")
        stored |= {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(stored, into / "model.safetensors", {"format": "pt"})
    if plain is not None:
        shutil.copytree(folder, plain)
        save_file(values, plain / "model.safetensors", {"format": "pt"})
    described = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps({**described, "quantization_config": config}))
