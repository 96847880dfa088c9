"""Weights and KV caches with fewer bits: bytes, and which cards compute faster with them."""

from __future__ import annotations

import pytest
from shapes import LLAMA_70B, fixed, group_of

from cost_model.calibrated import ZeroFit
from cost_model.dtypes import KV_BYTES, WEIGHT_BYTES, in_formats

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
    changed = in_formats(LLAMA_70B, kv=kv)
    plain, other = (
        ZeroFit(m, fixed(1024, 128)).stage_memory("decode", group_of("H100", 8), True, True)
        for m in (LLAMA_70B, changed)
    )
    assert other.per_layer_request / plain.per_layer_request == KV_BYTES[kv] / 2
    assert (other.fixed, other.per_layer) == (plain.fixed, plain.per_layer)
    assert changed.kv_bytes_per_token == LLAMA_70B.kv_bytes_per_token * KV_BYTES[kv] / 2


def test_counts_are_made_anew():
    LLAMA_70B.kv_bytes_per_token  # noqa: B018  (counts are cached on first use)
    assert in_formats(LLAMA_70B, "fp8", "fp8").kv_bytes_per_token == LLAMA_70B.kv_bytes_per_token / 2
    with pytest.raises(KeyError):
        in_formats(LLAMA_70B, "fp7")
