"""Bytes of a stage: what fits, and what Llama-2 70B needs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapes import LLAMA_70B, MODELS, WINDOWED, alone, fixed, group_of, like, phases, priced_groups

from cost_model.base import PREFILL_TOKENS
from cost_model.calibrated import ZeroFit
from cost_model.lengths import BLOCK_TOKENS, Window
from cost_model.models import find_model
from cost_model.registry import make_cost_model

ROUNDING = 1e-10
MIXTURES = [model for model in MODELS if model.experts > 1]
layers = st.integers(1, 200)
requests = st.integers(1, 100_000)


@given(priced_groups(), phases, st.booleans(), st.booleans(), layers, requests)
def test_the_largest_that_fits_is_the_inverse_of_what_is_needed(priced, phase, first, last, n, batch):
    costs, group = priced
    memory = costs.stage_memory(phase, group, first, last)
    within, beyond = memory.limit * (1 + ROUNDING), memory.limit * (1 - ROUNDING)

    most = memory.max_batch(n)
    assert most == 0 or memory.needed(n, most) <= within
    assert memory.needed(n, most + 1) > beyond
    most = memory.max_layers(batch)
    assert most == 0 or memory.needed(most, batch) <= within
    assert memory.needed(most + 1, batch) > beyond


@given(priced_groups(), phases, st.booleans(), st.booleans(), layers, st.integers(1, 4096))
def test_memory_made_to_measure_holds_what_it_was_made_for(priced, phase, first, last, n, batch):
    costs, group = priced
    memory = costs.stage_memory(phase, group, first, last)
    enough = replace(memory, limit=memory.needed(n, batch) * (1 + ROUNDING))
    assert (enough.max_batch(n), enough.max_layers(batch)) == (batch, n)
    short = replace(memory, limit=memory.needed(n, batch) * (1 - ROUNDING))
    assert (short.max_batch(n), short.max_layers(batch)) == (batch - 1, n - 1)


@given(priced_groups(), phases, st.booleans(), st.booleans(), layers, requests)
def test_memory_is_affine_in_layers_and_in_requests(priced, phase, first, last, n, batch):
    costs, group = priced
    memory = costs.stage_memory(phase, group, first, last)
    a_layer = memory.needed(n + 1, batch) - memory.needed(n, batch)
    assert a_layer == pytest.approx(memory.per_layer + batch * memory.per_layer_request, rel=1e-6)
    a_request = memory.needed(n, batch + 1) - memory.needed(n, batch)
    assert a_request == pytest.approx(memory.per_request + n * memory.per_layer_request, rel=1e-3)
    assert min(a_layer, a_request, memory.fixed + 1) > 0


@given(priced_groups(), phases, st.booleans(), st.booleans())
def test_a_group_never_holds_less_than_its_weights_and_kv_cache(priced, phase, first, last):
    """Splitting over n devices saves at most a factor of n on each."""
    costs, group = priced
    split = costs.stage_memory(phase, group, first, last)
    whole = costs.stage_memory(phase, alone(group), first, last)
    for part in ("per_layer", "per_layer_request", "per_request", "fixed"):
        assert getattr(split, part) * group.degree >= getattr(whole, part) * (1 - 1e-12)


@given(st.sampled_from(MIXTURES), st.sampled_from([2, 4, 8]), phases, st.booleans(), st.booleans(), layers)
def test_every_attention_group_holds_attention_weights_and_its_share_of_the_requests(
    model, degree, phase, first, last, n
):
    """With one GPU per group: all of attention on each, 1/n of everything else, and the whole KV cache of
    1/n of the requests."""
    costs = ZeroFit(model, fixed(1000, 100))
    whole = costs.stage_memory(phase, group_of("H200", 1), first, last)
    split = costs.stage_memory(phase, group_of("H200", degree), first, last)
    grouped = replace(group_of("H200", degree), attention_dp=degree, expert_parallel=degree)
    own = costs.stage_memory(phase, grouped, first, last)
    assert own.per_layer_request * degree == pytest.approx(whole.per_layer_request)
    assert own.per_request * degree == pytest.approx(whole.per_request)
    rest = whole.per_layer - model.attention_bytes
    assert own.per_layer == pytest.approx(model.attention_bytes + rest / degree)
    assert (own.fixed, own.limit) == (split.fixed, split.limit)
    assert own.per_layer_request <= split.per_layer_request * (1 + 1e-12)
    assert own.needed(n, 64) == pytest.approx(
        own.fixed + n * (own.per_layer + 64 * own.per_layer_request) + 64 * own.per_request
    )


def test_attention_weights_of_known_models():
    """By hand: DeepSeek-V3 in fp8 blocks; gpt-oss, whose attention stays in 16 bits; Llama-2 70B."""
    deepseek, gpt_oss = find_model("deepseek-v3"), find_model("gpt-oss-120b")
    norms = 1536 + 512
    matrices = deepseek.attention_params - norms
    assert deepseek.attention_bytes == pytest.approx(matrices * deepseek.weight_bytes + norms * 2)
    assert gpt_oss.attention_bytes == gpt_oss.attention_params * 2
    assert LLAMA_70B.attention_bytes == 8192 * (2 * 8192 + 2 * 1024) * 2


def test_llama_70b_on_two_80_gib_cards():
    """By hand, bytes on each card: a layer is (8192 * (2 * 8192 + 2 * 1024) + 3 * 8192 * 28672 + 2 * 8192)
    = 855,654,400 parameters of 2 bytes over 2 cards; embedding and head have 2 * 32000 * 8192, split alike; a
    workspace for 2048 tokens of (2 * 8192 + 28672) values of 2 bytes; a token 80 * 2 * 4 * 128 * 2 of KV."""
    memory = ZeroFit(LLAMA_70B, fixed(768, 256)).stage_memory("decode", group_of("A100-80GB", 2), True, True)
    weights, ends, workspace, kv = 80 * 855_654_400, 524_288_000, 184_549_376, 163_840 * 1024
    assert memory.needed(80, 1) == weights + ends + workspace + kv
    usable = 0.9 * 80 * 1024**3
    assert memory.limit == usable
    assert memory.max_batch(80) == int((usable - weights - ends - workspace) // kv) == 48


def test_llama_70b_does_not_fit_one_card():
    memory = ZeroFit(LLAMA_70B, fixed(768, 256)).stage_memory("decode", group_of("A100-80GB", 1), True, True)
    assert memory.max_batch(80) == 0
    # 0.9 * 80 GiB hold 44 layers of 1.711 GB and the embedding and head, and nothing else.
    assert memory.max_layers(1) == 44


def test_the_papers_formula_gives_two_cards_far_fewer_requests():
    """12 H^2 B l / n = 64.4 GB of weights on each; a token 2 H B l / n + 4 H B = 1,376,256 bytes."""
    costs = make_cost_model("table1", LLAMA_70B, fixed(768, 256))
    memory = costs.stage_memory("decode", group_of("A100-80GB", 2), True, True)
    assert memory.max_batch(80) == ((80 * 1024**3 - 80 * 12 * 8192**2) // (1024 * 1_376_256)) == 15


def test_kv_cache_of_1024_tokens_of_llama_70b():
    """80 layers, keys and values, 8 heads of 128 elements, 2 bytes: 335 MB."""
    costs = ZeroFit(LLAMA_70B, fixed(1024, 128))
    assert costs.kv_bytes_per_layer * LLAMA_70B.layers == 1024 * 80 * 2 * 8 * 128 * 2 == 335_544_320


def test_ends_of_a_pipeline_hold_embedding_and_head():
    costs, group = ZeroFit(LLAMA_70B, fixed(512, 128)), group_of("A100-80GB", 2)
    held = {
        (a, z): costs.stage_memory("decode", group, a, z).fixed for a in (True, False) for z in (True, False)
    }
    table = 32000 * 8192 * 2 / 2
    assert held[True, False] - held[False, False] == table
    assert held[False, True] - held[False, False] == table
    assert held[True, True] - held[False, False] == 2 * table


def test_a_tied_head_is_held_once_by_a_single_stage():
    tied = like(LLAMA_70B, tied_embeddings=True)
    costs, group = ZeroFit(tied, fixed(512, 128)), group_of("A100-80GB", 2)
    assert (
        costs.stage_memory("decode", group, True, True).fixed
        == costs.stage_memory("decode", group, True, False).fixed
        == costs.stage_memory("decode", group, False, True).fixed
    )


def test_prefill_holds_the_prompt_and_decode_the_whole_request():
    costs, group = ZeroFit(LLAMA_70B, fixed(600, 200)), group_of("H100", 4)
    prompt, request = (
        costs.stage_memory(p, group, True, True).per_layer_request for p in ("prefill", "decode")
    )
    assert request / prompt == pytest.approx(800 / 600)


def test_a_window_and_a_block_bound_the_kv_cache():
    group = group_of("H100", 1)
    inside, beyond = ZeroFit(WINDOWED, fixed(1024, BLOCK_TOKENS)), ZeroFit(WINDOWED, fixed(8000, 500))
    assert beyond.stage_memory("decode", group, True, True) == inside.stage_memory(
        "decode", group, True, True
    )


def test_more_devices_than_kv_heads_hold_copies():
    """Eight KV heads on 16 devices: each holds one, as on 8."""
    costs = ZeroFit(LLAMA_70B, fixed(512, 128))
    eight, sixteen = (costs.stage_memory("decode", group_of("A100-80GB", n), True, True) for n in (8, 16))
    assert sixteen.per_layer_request == eight.per_layer_request == 640 * 2 * 128 * 2


def test_a_mixture_holds_all_its_experts():
    mixtral = find_model("mixtral-8x7b")
    memory = ZeroFit(mixtral, fixed(512, 128)).stage_memory("decode", group_of("A100-80GB", 1), False, False)
    assert memory.per_layer > 8 * 3 * 4096 * 14336 * 2


@given(phases, st.sampled_from(["gpt-oss-120b", "gemma-3-27b", "deepseek-v3"]), st.data())
def test_a_pipeline_stage_of_any_layers_has_room_for_them(phase, name, data):
    """Layers differ: the bytes of each run of layers, added up one by one, are at most those predicted, and
    those of all layers exactly these."""
    model, n = find_model(name), 8
    lengths = fixed(3000, 500)

    def held(window):
        if phase == "prefill":
            return lengths.kv_tokens_prefill(window, PREFILL_TOKENS)
        return lengths.kv_tokens_decode(window)

    full = set(model.full_attention_layers) if model.window else set(range(model.layers))
    window = Window(model.window.tokens) if model.window else None
    kv = model.kv_bytes_per_token_layer * (1 if model.latent else 1 / n)
    requests = [kv * held(None if layer in full else window) for layer in range(model.layers)]
    dense = model.layer_params if not model.dense_layers else dense_layer(model)
    mixture = model.largest_layer_bytes / 2
    weights = [2 / n * (dense if layer < model.dense_layers else mixture) for layer in range(model.layers)]
    first = data.draw(st.integers(0, model.layers - 1))
    end = data.draw(st.integers(first + 1, model.layers))

    costs = ZeroFit(model, lengths)
    group = group_of("H200", n)
    part = costs.stage_memory(phase, group, first == 0, False)
    needed = 16 * sum(requests[first:end]) + sum(weights[first:end])
    assert part.needed(end - first, 16) - part.fixed >= needed * (1 - 1e-12)
    whole = costs.stage_memory(phase, group, True, True)
    everything = 16 * sum(requests) + sum(weights)
    assert whole.needed(model.layers, 16) - whole.fixed == pytest.approx(everything)


def dense_layer(model):
    """Parameters of a layer with one feed-forward block instead of experts."""
    return like(model, dense_layers=model.layers).largest_layer_bytes / 2


def test_every_device_holds_the_whole_latent_cache():
    costs = ZeroFit(find_model("deepseek-v3"), fixed(512, 128))
    for n in (1, 4, 8):
        memory = costs.stage_memory("decode", group_of("H200", n), True, True)
        assert memory.per_layer_request == 640 * 576 * 2
