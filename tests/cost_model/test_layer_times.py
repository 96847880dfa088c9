"""Properties that the search relies on for every card and model, and the calibrated model term by term."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from shapes import (
    FP32,
    LLAMA_70B,
    MODELS,
    WINDOWED,
    alone,
    batches,
    fixed,
    group_of,
    like,
    phases,
    priced_groups,
)

from cost_model.calibrated import Calibrated, ZeroFit
from cost_model.coefficients import Base, CoefficientSet
from cost_model.engines.model import EngineSteps
from cost_model.errors import InputError
from cost_model.hardware import CATALOGUE, NO_LINK, Link
from cost_model.models import find_model
from cost_model.registry import make_cost_model

WHOLE = 1 - 1e-12
PEAK = CoefficientSet(
    name="peak",
    source="",
    base=Base(compute_efficiency=1.0, memory_efficiency=1.0, layer_overhead_s=0.0, all_reduce_overhead_s=0.0),
)


@given(priced_groups(), phases, batches)
def test_a_group_is_never_faster_than_its_devices_together(priced, phase, batch):
    costs, group = priced
    assert group.degree * costs.layer_s(phase, group, batch) >= WHOLE * costs.layer_s(
        phase, alone(group), batch
    )
    assert group.degree * costs.edge_s(phase, group, batch, True) >= WHOLE * costs.edge_s(
        phase, alone(group), batch, True
    )


@settings(deadline=None)
@given(priced_groups(), phases, batches, batches)
def test_no_smaller_batch_passes_more_requests_than_the_fastest(priced, phase, a, b):
    """Decode steps may have any number of requests: micro-batches divide them."""
    costs, group = priced
    small, large = sorted((a, b) if phase == "decode" else (math.ceil(a), math.ceil(b)))
    best = costs.fastest_batch(phase, group, large)
    assert best <= large
    assert best / costs.layer_s(phase, group, best) >= WHOLE * small / costs.layer_s(phase, group, small)


@given(priced_groups(), phases, batches, batches)
def test_a_larger_batch_never_lowers_the_rate(priced, phase, a, b):
    """Requests/s of a layer, of a stage with embedding or head, and of a hop rise with the batch."""
    costs, group = priced
    assume(not isinstance(costs, EngineSteps))  # Their rates fall where a tile begins.
    small, large = sorted((a, b))
    for time_s in (
        lambda batch: costs.layer_s(phase, group, batch),
        lambda batch: costs.layer_s(phase, group, batch) + costs.edge_s(phase, group, batch, True),
        lambda batch: costs.hop_s(phase, group.link, batch),
    ):
        assert large / time_s(large) >= WHOLE * small / time_s(small)


@given(priced_groups(), phases, batches, batches)
def test_a_larger_batch_never_takes_less_time(priced, phase, a, b):
    costs, group = priced
    small, large = sorted((a, b))
    assert costs.layer_s(phase, group, large) >= WHOLE * costs.layer_s(phase, group, small)
    assert costs.edge_s(phase, group, large, True) >= WHOLE * costs.edge_s(phase, group, small, True)
    assert costs.hop_s(phase, group.link, large) >= WHOLE * costs.hop_s(phase, group.link, small)


@given(priced_groups(), phases, batches, st.booleans())
def test_times_are_finite_and_positive(priced, phase, batch, last):
    costs, group = priced
    assert 0 < costs.layer_s(phase, group, batch) < math.inf
    assert 0 <= costs.edge_s(phase, group, batch, last) < math.inf
    assert 0 < costs.hop_s(phase, group.link, batch) < math.inf
    assert 0 < costs.prefill_batch() < math.inf
    assert 0 < costs.kv_bytes_per_layer < math.inf


@pytest.mark.parametrize("card", sorted(CATALOGUE))
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_card_and_every_model(card, model):
    """The properties above at the degrees and batches that plans use, for every pair of card and model."""
    for name in ("table1", "zero-fit", "calibrated"):
        costs = make_cost_model(name, model, fixed(763, 232))
        for phase in ("prefill", "decode"):
            one = {b: costs.layer_s(phase, group_of(card, 1), b) for b in (1, 8, 64, 256)}
            for degree in model.tensor_degrees(16):
                times = [costs.layer_s(phase, group_of(card, degree), b) for b in one]
                assert all(t >= WHOLE * one[b] / degree for b, t in zip(one, times, strict=True))
                rates = [b / t for b, t in zip(one, times, strict=True)]
                assert rates == sorted(rates) or max(rates) / min(rates) < 1 + 1e-9


def test_decode_of_llama_70b_by_hand():
    """Batch 32, context 1024, 4 A100 (312 TFLOP/s, 2039 GB/s at 0.8; 200 GB/s, at 512 KiB 56 % of
    them): weights 855,654,400 * 2 / 4 bytes, KV 32 * 1024 * 2 * 2 * 128 * 2 bytes, 2 all-reduces of 4
    messages of 3.1 us and 1.5 * 32 * 16384 bytes."""
    costs = ZeroFit(LLAMA_70B, fixed(960, 128))
    rate = 0.8 * 2039e9
    weights, kv = 427_827_200 / rate, 33_554_432 / rate
    all_reduce = 10e-6 + 4 * 3.1e-6 + 1.5 * 32 * 16384 / (0.56 * 200e9)
    expected = weights + kv + 15e-6 + 2 * all_reduce
    assert costs.layer_s("decode", group_of("A100-80GB", 4), 32) == pytest.approx(expected)


def test_prefill_of_llama_70b_by_hand():
    """2 prompts of 1024 tokens on one H100 (989.4 TFLOP/s at 0.5): 2 FLOPs for each of 855,654,400 parameters
    and token, 4 * 8192 for each of the 512 tokens that a token attends to on average."""
    costs = ZeroFit(LLAMA_70B, fixed(1024, 128))
    flops = 2048 * (2 * 855_654_400 + 4 * 8192 * 512)
    assert costs.layer_s("prefill", group_of("H100", 1), 2) == pytest.approx(flops / (0.5 * 989.4e12) + 15e-6)


def test_the_head_costs_the_last_stage_only():
    """One position per prompt passes the head, so at a small batch the time is that of reading its
    weights."""
    costs, group = ZeroFit(LLAMA_70B, fixed(512, 128)), group_of("A100-80GB", 2)
    assert costs.edge_s("decode", group, 8, last=False) == 0
    for phase in ("prefill", "decode"):
        assert costs.edge_s(phase, group, 8, last=True) == pytest.approx(
            32000 * 8192 * 2 / 2 / (0.8 * 2039e9)
        )


@pytest.mark.parametrize(("degree", "messages"), [(2, 2), (3, 4), (4, 4), (8, 6), (16, 8)])
def test_latency_of_an_all_reduce_grows_with_the_logarithm_of_the_group(degree, messages):
    costs, group = Calibrated(LLAMA_70B, fixed(512, 128), coefficients=PEAK), group_of("A100-80GB", degree)
    without = costs.layer_s("decode", replace(group, link=NO_LINK), 1)
    latency_only = costs.layer_s("decode", replace(group, link=Link(float("inf"), 1e-5)), 1)
    assert latency_only - without == pytest.approx(2 * messages * 1e-5)


def test_a_mixture_reads_the_experts_that_some_token_chose():
    mixtral = find_model("mixtral-8x7b")
    costs = Calibrated(mixtral, fixed(0, 0), coefficients=PEAK)
    lone = group_of("H100", 1)
    rate = lone.accelerator.memory_bandwidth_bytes_s / 2
    expert = 3 * 4096 * 14336
    rest = mixtral.layer_params - 8 * expert
    # One token reads two experts, two tokens 8 * (1 - 0.75^2) = 3.5 of them.
    assert costs.layer_s("decode", lone, 1) == pytest.approx((rest + 2 * expert) / rate)
    assert costs.layer_s("decode", lone, 2) == pytest.approx((rest + 3.5 * expert) / rate)
    assert costs.layer_s("decode", lone, 64) == pytest.approx((rest + 8 * expert) / rate)


@pytest.mark.parametrize(("isl", "window"), [(10, 4), (7, 7), (5, 100), (2000, 1024)])
def test_a_window_cuts_what_a_prompt_attends_to(isl, window):
    """Token i of a prompt attends to min(i, window) tokens, itself included; the tolerance is half a token
    each."""
    windowed, lone = like(WINDOWED, sliding_window=window), group_of("H100", 1)
    lone = replace(lone, accelerator=replace(lone.accelerator, memory_bandwidth_bytes_s=1e30))
    costs = Calibrated(windowed, fixed(isl, 0), coefficients=PEAK)
    flops = costs.layer_s("prefill", lone, 1) * lone.accelerator.flops_s
    attention = flops - 2 * windowed.active_layer_params * isl
    attended = attention / (4 * windowed.heads * windowed.head_dim * isl)
    mean = sum(min(i, window) for i in range(1, isl + 1)) / isl
    assert attended == pytest.approx(mean, abs=0.5)


def test_a_window_bounds_the_context_of_decode():
    group = group_of("H100", 1)
    inside, beyond = Calibrated(WINDOWED, fixed(1024, 0)), Calibrated(WINDOWED, fixed(8000, 500))
    assert beyond.layer_s("decode", group, 16) == inside.layer_s("decode", group, 16)


def test_fp32_reads_twice_the_bytes():
    half = like(FP32, weight_bytes=2.0, activation_bytes=2.0, kv_value_bytes=2.0)
    group = group_of("A100-80GB", 1)
    full_s, half_s = (
        Calibrated(m, fixed(512, 128), coefficients=PEAK).layer_s("decode", group, 4) for m in (FP32, half)
    )
    assert full_s == pytest.approx(2 * half_s)


@pytest.mark.parametrize(("isl", "prompts"), [(256, 8), (700, 2048 / 700), (2048, 1), (8192, 0.25)])
def test_prefill_steps_hold_2048_tokens(isl, prompts):
    assert Calibrated(LLAMA_70B, fixed(isl, 1)).prefill_batch() == prompts


def test_an_unknown_cost_model_names_the_known_ones():
    with pytest.raises(InputError, match="use one of vllm, sglang, trtllm, calibrated, zero-fit, table1"):
        make_cost_model("oracle", LLAMA_70B, fixed(512, 128))
