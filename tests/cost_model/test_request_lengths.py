"""Means over a mixture of requests, compared with sums over its tokens and with a single class."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapes import LLAMA_70B, WINDOWED, batches, group_of, phases

from cost_model.lengths import BLOCK_TOKENS, RequestLengths, Window, attended_tokens, moved_tokens
from cost_model.registry import COST_MODELS, make_cost_model

classes = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 40), st.integers(1, 4)), min_size=1, max_size=4
)
windows = st.none() | st.integers(1, 100).map(Window)


@given(classes, windows)
def test_means_are_those_of_the_tokens_counted_one_by_one(mixture, window):
    """Token i of a prompt attends to min(i, window) tokens; the sums below are accurate to half a token."""
    lengths, cut = RequestLengths.of(mixture), window.tokens if window else 10**9
    requests = [(isl, osl) for isl, osl, weight in mixture for _ in range(weight)]
    assert lengths.isl == pytest.approx(np.mean([isl for isl, _ in requests]))
    assert lengths.osl == pytest.approx(np.mean([osl for _, osl in requests]))
    attended = [min(i, cut) for isl, _ in requests for i in range(1, isl + 1)]
    assert lengths.prompt_attended(window) == pytest.approx(np.mean(attended), abs=0.5 + 1e-9)
    # One entry per moment at which a request is in flight: prompt tokens in prefill, outputs in decode.
    prompts = [min(isl, cut + 64) for isl, _ in requests for _ in range(isl)]
    assert lengths.kv_tokens_prefill(window, 64) == pytest.approx(np.mean(prompts))
    whole = [min(isl + osl, cut + BLOCK_TOKENS) for isl, osl in requests for _ in range(osl)]
    assert lengths.kv_tokens_decode(window) == pytest.approx(np.mean(whole))
    moved = [min(isl, cut + (BLOCK_TOKENS - 3) / 2) for isl, _ in requests]
    assert lengths.kv_tokens_moved(window) == pytest.approx(np.mean(moved))
    context = [min(isl + osl / 2, cut) for isl, osl in requests for _ in range(osl)]
    assert lengths.decode_context(window) == pytest.approx(np.mean(context))


@given(classes, st.integers(1, 100), st.integers(0, 6), st.integers(1, 6), st.integers(0, 50))
def test_means_over_layers_of_which_some_have_a_window(mixture, tokens, limited, unlimited, past):
    """Each figure is the mean over the layers, one by one."""
    lengths, layers = RequestLengths.of(mixture), limited + unlimited
    window = Window(tokens, limited / layers)
    each = [Window(tokens)] * limited + [None] * unlimited
    for figure in (
        lengths.prompt_attended,
        lengths.decode_context,
        lengths.kv_tokens_prefill,
        lengths.kv_tokens_decode,
        lengths.kv_tokens_moved,
        lambda layer: attended_tokens(30, layer, past),
    ):
        assert figure(window) == pytest.approx(sum(map(figure, each)) / layers)


@given(st.floats(1, 1e5), st.floats(1, 1e5), st.floats(1e-3, 1e6), windows)
def test_one_class_is_itself_to_the_last_bit(isl, osl, weight, window):
    lengths, cut = RequestLengths.of([(isl, osl, weight)]), window.tokens if window else float("inf")
    assert (lengths.isl, lengths.osl) == (isl, osl)
    assert lengths.decode_context(window) == min(isl + osl / 2, cut)
    assert lengths.kv_tokens_prefill(window, 64) == min(isl, cut + 64)
    assert lengths.kv_tokens_decode(window) == min(isl + osl, cut + BLOCK_TOKENS)
    assert lengths.kv_tokens_moved(window) == min(isl, cut + (BLOCK_TOKENS - 3) / 2)


@given(
    classes,
    st.sampled_from(sorted(COST_MODELS)),
    st.sampled_from([LLAMA_70B, WINDOWED]),
    phases,
    batches,
    st.floats(1e-3, 1e3),
)
def test_costs_depend_on_shares_and_not_on_how_they_are_written(mixture, name, model, phase, batch, scale):
    """Splitting a class in two or scaling all weights changes no cost."""
    split = [(isl, osl, weight * scale / 2) for isl, osl, weight in mixture for _ in range(2)]
    one, two = (make_cost_model(name, model, RequestLengths.of(m)) for m in (mixture, split))
    group = group_of("A100-80GB", 2)
    assert one.layer_s(phase, group, batch) == pytest.approx(two.layer_s(phase, group, batch))
    memory = [costs.stage_memory(phase, group, True, True).needed(10, 8) for costs in (one, two)]
    assert memory[0] == pytest.approx(memory[1])


@given(windows, st.floats(0, 1), st.integers(1, 300), st.lists(st.integers(0, 300), max_size=6))
def test_chunks_move_what_their_prompt_moves(window, share, prompt, ends):
    window = window and Window(window.tokens, share)
    cuts = [0, *sorted(min(end, prompt) for end in ends), prompt]
    chunks = [moved_tokens(first, end, prompt, window) for first, end in pairwise(cuts)]
    assert sum(chunks) == pytest.approx(moved_tokens(0, prompt, prompt, window))
    assert min(chunks) >= 0


@given(windows, st.floats(0, 1), st.integers(0, 50))
def test_prompts_move_on_average_what_is_planned(window, share, more):
    """Of all lengths to the next block that are longer than the window."""
    window = window and Window(window.tokens, share)
    prompts = [120 + more + length for length in range(BLOCK_TOKENS)]
    lengths = RequestLengths.of([(prompt, 10, 1) for prompt in prompts])
    moved = [moved_tokens(0, prompt, prompt, window) for prompt in prompts]
    assert lengths.kv_tokens_moved(window) == pytest.approx(np.mean(moved))


def test_a_few_long_requests_fill_the_cache():
    """One request in a hundred is long, but half of the requests that are decoding are."""
    rare = RequestLengths.of([(10, 10, 99), (990, 990, 1)])
    assert rare.kv_tokens_decode() == pytest.approx((20 + 1980) / 2)
    assert rare.isl + rare.osl == pytest.approx(39.6)
