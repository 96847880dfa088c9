"""Weights and KV caches with fewer bits: bytes, and which cards compute faster with them."""

from __future__ import annotations

import pytest
from shapes import LLAMA_70B, fixed, group_of

from cost_model.architecture import ModelArchitecture
from cost_model.calibrated import ZeroFit
from cost_model.dtypes import KV_BYTES, WEIGHT_BYTES, check_kernels, in_formats, kernels, matrix_flops_s
from cost_model.errors import InputError
from cost_model.hardware import CATALOGUE, of_generation
from cost_model.models import find_model

HEAVY, LIGHT = 8192, 1


def times(model, card, phase, batch):
    costs = ZeroFit(model, fixed(1024, 128))
    return costs.layer_s(phase, group_of(card, 1), batch) - 15e-6


@pytest.mark.parametrize(
    ("card", "weights", "speedup"),
    [
        ("H100", "fp8", 2),
        ("H100", "int8", 2),
        ("A100-80GB", "int8", 2),
        ("A100-80GB", "fp8", 1),
        ("V100", "int8", 1),
        ("H100", "int4", 1),
        ("T4", "int8", 2),
    ],
)
def test_prefill_gains_where_the_card_has_the_tensor_cores(card, weights, speedup):
    """Data sheets: fp8 from Ada and Hopper on, int8 from Turing on; int4 weights are unpacked to 16 bits.
    Attention, a fortieth of the work here, stays in 16 bits."""
    plain, packed = (
        times(LLAMA_70B, card, "prefill", 8),
        times(in_formats(LLAMA_70B, weights), card, "prefill", 8),
    )
    assert plain / packed == pytest.approx(speedup, rel=0.03)


@pytest.mark.parametrize(
    ("weights", "smaller"), [("fp8", 2), ("int8", 2), ("int4", 2 / WEIGHT_BYTES["int4"])]
)
def test_decode_of_one_request_gains_what_is_not_read(weights, smaller):
    """Weights are 99.8 % of the bytes that it reads."""
    plain, packed = (
        times(LLAMA_70B, "A100-80GB", "decode", 1),
        times(in_formats(LLAMA_70B, weights), "A100-80GB", "decode", 1),
    )
    assert plain / packed == pytest.approx(smaller, rel=0.02)


def test_int4_weights_of_70b_take_36_gb():
    """4 bits per weight and 20 more per 128 weights; GPTQ and AWQ checkpoints of 70B models have 35 to 37
    GB."""
    packed = in_formats(LLAMA_70B, "int4")
    memory = ZeroFit(packed, fixed(1024, 128)).stage_memory("decode", group_of("A100-80GB", 1), True, True)
    assert 80 * memory.per_layer == pytest.approx(35.6e9, rel=0.01)
    assert memory.fixed == pytest.approx(2 * 32000 * 8192 * 2 + 2048 * (2 * 8192 + 2 * 28672) * 2)


@pytest.mark.parametrize("kv", KV_BYTES)
def test_kv_format_changes_the_cache_and_nothing_else(kv):
    """Heads of 128 values; int8 has a scale of 4 bytes for each."""
    changed, width = in_formats(LLAMA_70B, kv=kv), 132 / 128 if kv == "int8" else KV_BYTES[kv]
    plain, other = (
        ZeroFit(m, fixed(1024, 128)).stage_memory("decode", group_of("H100", 8), True, True)
        for m in (LLAMA_70B, changed)
    )
    assert other.per_layer_request / plain.per_layer_request == width / 2
    assert (other.fixed, other.per_layer) == (plain.fixed, plain.per_layer)
    assert changed.kv_bytes_per_token == LLAMA_70B.kv_bytes_per_token * width / 2
    assert changed.kv_type == kv


def test_the_scale_of_a_latent_is_one_for_the_whole_vector():
    latent = in_formats(find_model("deepseek-v3"), kv="int8")
    assert latent.kv_bytes_per_token_layer == 512 + 64 + 4


@pytest.mark.parametrize("kv", KV_BYTES)
def test_placements_name_the_kv_format_only_where_bytes_do_not_tell_it(kv):
    model = in_formats(LLAMA_70B, kv=kv)
    written = model.model_dump()
    assert ("kv_type" in written) == (kv in ("fp16", "int8"))
    assert ModelArchitecture(**written) == model
    assert in_formats(model, kv="bf16") == LLAMA_70B


def test_counts_are_made_anew():
    LLAMA_70B.kv_bytes_per_token  # noqa: B018  (counts are cached on first use)
    assert in_formats(LLAMA_70B, "fp8", "fp8").kv_bytes_per_token == LLAMA_70B.kv_bytes_per_token / 2
    with pytest.raises(InputError, match="use one of fp32"):
        in_formats(LLAMA_70B, "fp7")


@pytest.mark.parametrize(
    ("card", "native", "weight_only", "refused"),
    [
        ("H100", "bf16 fp8 fp8_block int8", "int4 nvfp4 mxfp4", ""),
        ("L4", "bf16 fp8 fp8_block int8", "int4 nvfp4 mxfp4", ""),
        ("A100-80GB", "bf16 int8", "int4 fp8 fp8_block nvfp4 mxfp4", ""),
        ("RTX3090", "bf16 int8", "int4 fp8 fp8_block nvfp4 mxfp4", ""),
        ("B200", "bf16 fp8 fp8_block nvfp4 mxfp4", "int4 int8", ""),
        ("RTX5090", "bf16 fp8 fp8_block nvfp4 mxfp4", "int4 int8", ""),
        ("T4", "fp16 int8", "bf16 int4", "fp8 fp8_block nvfp4 mxfp4"),
        ("V100-16GB", "fp16", "bf16 int8 int4", "fp8 fp8_block nvfp4 mxfp4"),
        ("MI300X", "bf16 fp8 fp8_block", "mxfp4", "int8 int4 nvfp4"),
        ("P100", "fp16 fp32", "bf16", "fp8 fp8_block int8 int4 nvfp4 mxfp4"),
    ],
)
def test_kernels_are_those_of_vllm(card, native, weight_only, refused):
    accelerator = CATALOGUE[card]
    for kind, formats in (("native", native), ("weight-only", weight_only), ("none", refused)):
        assert {weights: kernels(accelerator, weights) for weights in formats.split()} == dict.fromkeys(
            formats.split(), kind
        )


def test_cpus_run_what_the_torch_engine_unpacks():
    cpu, formats = of_generation("cpu"), ("int4", "fp8", "fp8_block", "mxfp4")
    assert {weights: kernels(cpu, weights) for weights in formats} == dict.fromkeys(formats, "weight-only")
    assert kernels(cpu, "nvfp4") == "none"


def test_a_format_without_kernels_is_refused_naming_those_that_the_card_runs():
    with pytest.raises(InputError, match=r"T4 has no kernels for nvfp4 weights; use one of .*int8") as e:
        check_kernels([CATALOGUE["H100"], CATALOGUE["T4"]], "nvfp4", "--weights")
    assert "fp8" not in e.value.remedy


def test_weights_of_llama_8b_in_each_format():
    """6.98e9 parameters in matrices of layers; token table, LM head and norms are 1.05e9 more, in 16 bits."""
    model = find_model("llama-3-8b")
    in_layers = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    others = 2 * 128256 * 4096 + 65 * 4096
    widths = {"fp8": 8, "fp8_block": 8 + 32 / 128**2, "int4": 4 + 20 / 128, "nvfp4": 4.5}
    for weights, bits in widths.items():
        expected = in_layers * bits / 8 + 2 * others
        assert in_formats(model, weights).total_bytes == pytest.approx(expected, rel=1e-12)


def test_attention_that_is_not_quantised_is_computed_in_16_bits():
    model = in_formats(find_model("mixtral-8x7b"), "mxfp4")
    card = CATALOGUE["B200"]
    attention, active = model.attention_params, model.active_layer_params
    seconds = attention / card.flops_s + (active - attention) / (2 * card.flops_s)
    assert matrix_flops_s(card, model) == pytest.approx(active / seconds)
