"""The sampler compared with transformers' logits processors, closed forms and exact probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from runtime.engine.torch.sampling.draw import UNSETTLED
from runtime.engine.torch.sampling.noise import draw_keys, gumbel, token_hashes
from runtime.engine.torch.sampling.penalties import History
from runtime.engine.torch.sampling.rules import CANDIDATES, BatchRules
from runtime.engine.torch.sampling.sampler import Sampler
from runtime.protocol.message import Sampling, TokenLogprobs

CPU = torch.device("cpu")
VOCAB = 1000
Past = tuple[Sequence[int], Sequence[int]]
NOTHING: Past = ((), ())


def sample(
    logits: torch.Tensor,
    samplings: Sequence[Sampling],
    indices: Sequence[int] | None = None,
    histories: Sequence[Past] | None = None,
) -> tuple[tuple[int, ...], tuple[TokenLogprobs | None, ...]]:
    """Sample tokens for rows without history."""
    sampler, names = Sampler(), [f"r{row}" for row in range(len(samplings))]
    for name, sampling, history in zip(names, samplings, histories or [NOTHING] * len(names), strict=True):
        sampler.start(name, sampling, history)
    return sampler.sample(logits, names, indices or [0] * len(names))


def draws(logits: torch.Tensor, count: int, **rule: Any) -> np.ndarray:
    """How often each token is drawn, over many seeds."""
    rules = [Sampling(seed=seed, **rule) for seed in range(count)]
    tokens, _ = sample(logits.expand(count, -1), rules)
    return np.bincount(tokens, minlength=len(logits))


def peaked(seed: int, vocab: int = VOCAB, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


def warped(logits: torch.Tensor, **rule: Any) -> torch.Tensor:
    """The distribution from which transformers samples. It applies min_p last, while vLLM and this engine
    apply it first, so no rule here combines it with top_k or top_p."""
    scores, ids = logits[None], torch.zeros(1, 1, dtype=torch.long)
    chain: list[Any] = [TemperatureLogitsWarper(float(rule["temperature"]))]
    chain += [TopKLogitsWarper(rule["top_k"])] if "top_k" in rule else []
    chain += [TopPLogitsWarper(rule["top_p"])] if "top_p" in rule else []
    chain += [MinPLogitsWarper(rule["min_p"])] if "min_p" in rule else []
    for warper in chain:
        scores = warper(ids, scores)
    return scores[0].double().softmax(-1)


def fits(counts: np.ndarray, probabilities: torch.Tensor) -> float:
    """p-value of a chi-square test; tokens that are hardly ever expected count as one."""
    expected = probabilities.numpy() * counts.sum()
    often = expected >= 5
    observed, due = counts[often], expected[often]
    if rest := expected[~often].sum():
        observed, due = np.append(observed, counts[~often].sum()), np.append(due, rest)
    if len(due) < 2:
        return 1.0
    return float(stats.chisquare(observed, due * observed.sum() / due.sum()).pvalue)


RULES = {
    "plain": {"temperature": 0.7},
    "hot": {"temperature": 2.0},
    "top_k": {"temperature": 1.0, "top_k": 20},
    "top_k of all": {"temperature": 1.0, "top_k": VOCAB},
    "wide top_k": {"temperature": 1.5, "top_k": VOCAB - 5},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "wide top_p": {"temperature": 2.0, "top_p": 0.98},
    "narrow top_p": {"temperature": 1.0, "top_p": 1e-6},
    "top_k and top_p": {"temperature": 1.3, "top_k": 40, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.02},
    "wide min_p": {"temperature": 2.0, "min_p": 1e-5},
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("spread", [3.0, 0.5])
def test_draws_are_from_the_distribution_of_transformers(name: str, spread: float) -> None:
    logits = peaked(5, spread=spread)
    probabilities = warped(logits, **RULES[name])
    counts = draws(logits, 6000, **RULES[name])
    assert not counts[probabilities.numpy() == 0].any()
    assert fits(counts, probabilities) > 1e-3


@settings(deadline=None, max_examples=100)
@given(
    sixteenths=st.lists(st.integers(-128, 128), min_size=2, max_size=12, unique=True),
    temperature=st.floats(0.2, 3),
    top_k=st.integers(1, 14),
    top_p=st.floats(0.05, 0.99),
    min_p=st.floats(0, 0.5),
)
def test_limits_together_keep_what_their_definitions_say(
    sixteenths: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """min_p, then top_k, then top_p of the rest, one token at a time, in float64."""
    logits = torch.tensor(sixteenths) / 16
    whole = (logits.double() / temperature).softmax(-1)
    ordered = sorted(range(len(logits)), key=lambda token: -whole[token])
    left = [token for token in ordered if whole[token] >= min_p * whole[ordered[0]]][:top_k]
    kept, mass, close = [], 0.0, False
    for token in left:
        close |= abs(mass - top_p) < 1e-5
        if mass < top_p:
            kept.append(token)
        mass += float(whole[token] / whole[left].sum())
    assume(not close and (whole / whole.max() - min_p).abs().min() > 1e-5)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    tokens, _ = sample(logits.expand(300, -1), [sampling] * 300, range(300))
    assert set(tokens) <= set(kept)
    assert {token for token in kept if whole[token] > 0.06} <= set(tokens)


def test_what_ties_with_the_last_token_kept_is_kept() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    for rule in ({"top_k": 2}, {"top_p": 0.5}):
        counts = draws(logits, 400, temperature=1.0, **rule)
        assert (counts > 0).tolist() == [True, True, True, True, False]
    flat = torch.zeros(VOCAB)
    assert (draws(flat, 4 * VOCAB, temperature=1.0, top_k=3) > 0).sum() > VOCAB / 2


@pytest.mark.parametrize("rule", [{"top_p": 0.95}, {"top_k": 30}, {"min_p": 0.01}])
def test_a_glance_at_the_likeliest_tokens_draws_as_the_whole_vocabulary_does(rule: dict[str, float]) -> None:
    logits = torch.stack([peaked(seed, 5000, spread) for seed in range(20) for spread in (1.0, 2.5, 5.0)])
    samplings = [Sampling(temperature=0.9, seed=row, **rule) for row in range(len(logits))]
    rules = BatchRules(samplings, [None] * len(logits), 5000, CPU)
    quick, exact = (rules.choose(logits, range(len(logits)), exactly) for exactly in (False, True))
    settled = quick != UNSETTLED
    assert torch.equal(quick[settled], exact[settled]) and settled.sum() > 15
    assert sample(logits, samplings, range(len(logits)))[0] == tuple(exact.tolist())


# what a token depends on

rules_of_rows = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 0, 5, 900]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([(), ((3, 5.0), (9, -100.0))]),
    seed=st.integers(0, 2**63 - 1),
    min_tokens=st.sampled_from([0, 3]),
    stop_token_ids=st.sampled_from([(), (1, 2)]),
    logprobs=st.sampled_from([-1, 0, 3]),
)
histories = st.tuples(*[st.lists(st.integers(0, VOCAB - 1), max_size=30)] * 2)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.tuples(rules_of_rows, histories, st.integers(0, 6)), min_size=1, max_size=9),
    spread=st.sampled_from([0.1, 2.0, 6.0]),
    data=st.data(),
)
def test_company_changes_nothing(
    rows: list[tuple[Sampling, Past, int]], spread: float, data: st.DataObject
) -> None:
    samplings, past, indices = zip(*rows, strict=True)
    logits = torch.stack([peaked(row, spread=spread) for row in range(len(rows))])
    tokens, details = sample(logits, samplings, indices, past)
    order = data.draw(st.permutations(range(len(rows))))[: data.draw(st.integers(1, len(rows)))]
    pick = [[each[row] for row in order] for each in (samplings, indices, past, tokens, details)]
    alone = sample(logits[list(order)], *pick[:3])
    assert list(alone[0]) == pick[3]
    for one, other in zip(alone[1], pick[4], strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.chosen == pytest.approx(other.chosen, abs=1e-5)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


PENALISED = {"presence_penalty": 0.4, "frequency_penalty": 0.9, "repetition_penalty": 1.2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_moves_goes_on_as_if_it_had_stayed(temperature: float) -> None:
    """Each token is sampled by a new sampler that knows the past only from the history."""
    sampling = Sampling(temperature=temperature, seed=4, **PENALISED)
    prompt, logits = [5, 6, 6, 900], [peaked(index, spread=1.0) for index in range(40)]
    stays = Sampler()
    stays.start("r", sampling, (prompt, ()))
    output: list[int] = []
    for index, row in enumerate(logits):
        moved, _ = sample(row[None], [sampling], [index], [(prompt, output)])
        (token,), _ = stays.sample(row[None], ["r"], [index])
        assert moved == (token,)
        output.append(token)


def test_seed_and_index_make_other_draws_and_nothing_else_does() -> None:
    logits = peaked(3, spread=1.0).expand(200, -1)
    same = Sampling(temperature=1.0, seed=1)
    over_indices = sample(logits, [same] * 200, range(200))[0]
    over_seeds = sample(logits, [Sampling(temperature=1.0, seed=seed) for seed in range(200)])[0]
    assert len(set(over_indices)) > 100 and len(set(over_seeds)) > 100
    torch.rand(3)
    assert sample(logits, [same] * 200, range(200))[0] == over_indices
    assert len(set(sample(logits, [same] * 200, [7] * 200)[0])) == 1


def test_last_digits_of_the_logits_hardly_ever_change_a_draw() -> None:
    logits = torch.stack([peaked(row, spread=2.0) for row in range(500)])
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    nudged = logits * (1 + 1e-6 * noise)
    for rule in ({}, {"top_k": 50}, {"top_p": 0.9}):
        samplings = [Sampling(temperature=1.0, seed=row, **rule) for row in range(500)]
        before, after = sample(logits, samplings)[0], sample(nudged, samplings)[0]
        assert sum(one != other for one, other in zip(before, after, strict=True)) <= 1


def test_greedy_is_the_largest_logit_whatever_else_is_asked() -> None:
    logits = torch.stack([peaked(row) for row in range(6)])
    limits: list[dict[str, Any]] = [
        {},
        {"top_k": 3},
        {"top_p": 0.1},
        {"min_p": 0.5},
        {"seed": 9},
        {"logprobs": 2},
    ]
    tokens, _ = sample(logits.bfloat16(), [Sampling(**rule) for rule in limits])
    assert list(tokens) == logits.bfloat16().float().argmax(-1).tolist()
    tiny = [Sampling(temperature=1e-30, seed=row) for row in range(6)]
    assert list(sample(logits, tiny)[0]) == logits.argmax(-1).tolist()


# changes to the logits

TOKENS = st.lists(st.integers(0, 19), max_size=30)


def adjusted(logits: torch.Tensor, sampling: Sampling, past: Past = NOTHING, index: int = 0) -> torch.Tensor:
    history = History(*past) if sampling.needs_history else None
    rules = BatchRules([sampling], [history], logits.shape[-1], CPU)
    return rules.adjust(logits[None], [index], in_place=False)[0]


@given(prompt=TOKENS, output=TOKENS, penalty=st.floats(0.2, 3))
def test_the_repetition_penalty_is_that_of_transformers(
    prompt: list[int], output: list[int], penalty: float
) -> None:
    logits = peaked(1, 20)
    given = adjusted(logits, Sampling(repetition_penalty=penalty), (prompt, output))
    expected = logits[None].clone()
    if prompt + output:
        ids = torch.tensor([prompt + output])
        expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, expected)
    torch.testing.assert_close(given, expected[0])


@given(prompt=TOKENS, output=TOKENS, presence=st.floats(-2, 2), frequency=st.floats(-2, 2))
def test_presence_and_frequency_count_the_output(
    prompt: list[int], output: list[int], presence: float, frequency: float
) -> None:
    logits = peaked(2, 20)
    rule = Sampling(presence_penalty=presence, frequency_penalty=frequency)
    expected = [
        value - presence * (token in output) - frequency * output.count(token)
        for token, value in enumerate(logits.tolist())
    ]
    given = adjusted(logits, rule, (prompt, output))
    torch.testing.assert_close(given, torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_penalties_count_each_token_as_it_comes() -> None:
    """With a frequency penalty of 2 and flat logits, every token appears once before any appears twice."""
    sampler = Sampler()
    sampler.start("r", Sampling(frequency_penalty=2.0), ([1, 1, 1], ()))
    logits = torch.linspace(1, 0, 50)[None]
    tokens = [sampler.sample(logits, ["r"], [index])[0][0] for index in range(100)]
    assert tokens == [*range(50)] * 2
    assert torch.equal(logits, torch.linspace(1, 0, 50)[None])


def test_bias_and_ends_before_min_tokens() -> None:
    logits = peaked(3, 20)
    rule = Sampling(logit_bias=((4, 100.0), (7, -100.0)), min_tokens=2, stop_token_ids=(5, 6))
    expected = logits.clone()
    expected[4] += 100
    expected[7] -= 100
    torch.testing.assert_close(adjusted(logits, rule, index=2), expected)
    expected[[5, 6]] = -math.inf
    torch.testing.assert_close(adjusted(logits, rule, index=1), expected)
    ignoring = Sampling(min_tokens=2, stop_token_ids=(5, 6), ignore_eos=True)
    assert torch.equal(adjusted(logits, ignoring), logits)


# logits that are not numbers

BROKEN = {
    "one NaN": [1.0, math.nan, 3.0, 2.0],
    "one infinite": [1.0, 2.0, math.inf, 0.0],
    "NaN and ruled out": [math.nan, -math.inf, 0.5, -math.inf],
}


@pytest.mark.parametrize("rule", [{}, {"temperature": 0.01}, {"temperature": 0.01, "top_p": 0.9}])
@pytest.mark.parametrize("name", BROKEN)
def test_what_is_not_a_number_is_ruled_out(name: str, rule: dict[str, float]) -> None:
    rows = torch.tensor([[0.0, 0.0, 0.0, 9.0], BROKEN[name]])
    wide = torch.cat([rows, torch.full((2, 2 * CANDIDATES), -math.inf)], -1)
    for logits in (rows, wide):
        assert sample(logits, [Sampling(seed=3, **rule)] * 2)[0] == (3, 2)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("rule", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2, "logprobs": 1}])
def test_where_nothing_is_left_all_tokens_are_alike(value: float, rule: dict[str, Any]) -> None:
    samplings = [Sampling(seed=seed, **rule) for seed in range(60)]
    tokens, _ = sample(torch.full((60, 6), value), samplings)
    assert set(tokens) == ({0} if not rule else set(range(6)))


# log probabilities


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = torch.stack([peaked(row, 50) for row in range(4)])
    rule = {"temperature": 0.1, "top_k": 1, "presence_penalty": 2.0, "logit_bias": ((7, 100.0),)}
    counts = [2, -1, 0, 50]
    tokens, details = sample(logits, [Sampling(logprobs=count, **rule) for count in counts])
    assert tokens == (7, 7, 7, 7) and details[1] is None
    expected = logits.double().log_softmax(-1)
    for row in (0, 2, 3):
        detail = details[row]
        assert detail is not None and detail.chosen == pytest.approx(float(expected[row, 7]), abs=1e-5)
        best = expected[row].topk(counts[row])
        assert [token for token, _ in detail.top] == best.indices.tolist()
        assert [value for _, value in detail.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_more_logprobs_than_tokens_are_all_of_them() -> None:
    _, (detail,) = sample(torch.zeros(1, 3), [Sampling(logprobs=20)])
    assert detail is not None and len(detail.top) == 3


# the noise


def uniforms(draws: Sequence[tuple[int, int]], vocab: int) -> np.ndarray:
    noise = gumbel(token_hashes(vocab, CPU), draw_keys(draws, CPU)).double().numpy()
    return 1 - np.exp(-np.exp(-noise))


@pytest.mark.parametrize("along", ["index", "seed"])
def test_noise_is_uniform_and_neighbours_are_independent(along: str) -> None:
    values = uniforms([(n, 3) if along == "seed" else (3, n) for n in range(100)], 20_000)
    assert stats.kstest(values[::3].ravel(), "uniform").pvalue > 1e-3
    pairs = {
        "next token": (values[:, :-1], values[:, 1:]),
        "token + 256": (values[:, :-256], values[:, 256:]),
        "next draw": (values[:-1], values[1:]),
        "next draw's next token": (values[:-1, :-1], values[1:, 1:]),
    }
    for name, (one, other) in pairs.items():
        table = np.histogram2d(one.ravel(), other.ravel(), bins=32, range=[[0, 1]] * 2)[0]
        assert stats.chisquare(table.ravel()).pvalue > 1e-3, name


def test_the_noise_of_draws_and_of_tokens_is_uncorrelated() -> None:
    values = uniforms([(11, index) for index in range(1500)], 200)
    for table in (values, values.T[:, :1500]):
        among = np.corrcoef(table.T)[np.triu_indices(table.shape[1], 1)] * math.sqrt(len(table))
        if table is values:
            assert stats.kstest(among, "norm").pvalue > 1e-3
        assert np.abs(among).max() < 6


def test_the_largest_noise_of_a_vocabulary_is_as_large_as_it_should_be() -> None:
    """The maximum of n Gumbel variables is again Gumbel, shifted by log(n): this checks the tail, which
    decides the draw."""
    vocab = 32_000
    keys = draw_keys([(9, index) for index in range(2000)], CPU)
    largest = [gumbel(token_hashes(vocab, CPU), part).amax(-1) for part in keys.split(50)]
    assert stats.kstest(torch.cat(largest).numpy() - math.log(vocab), "gumbel_r").pvalue > 1e-3


def test_no_two_draws_have_the_same_noise() -> None:
    """32-bit keys would give about ten equal pairs."""
    keys = draw_keys([(seed, index) for seed in range(300) for index in range(1000)], CPU)
    noise = gumbel(token_hashes(2, CPU), keys)
    assert len(noise.unique(dim=0)) == len(keys)


def test_winners_of_one_draw_say_nothing_of_the_next() -> None:
    noise = gumbel(token_hashes(8, CPU), draw_keys([(5, index) for index in range(40_000)], CPU))
    winners = noise.argmax(-1).numpy()
    assert stats.chisquare(np.bincount(winners, minlength=8)).pvalue > 1e-3
    assert stats.chisquare(np.bincount(winners[:-1] * 8 + winners[1:], minlength=64)).pvalue > 1e-3
