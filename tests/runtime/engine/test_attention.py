"""Attention over the paged cache, compared with a plain softmax in float64, for any batch."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from runtime import native
from runtime.engine.torch.attention import make_attention, weighted
from runtime.engine.torch.attention.base import Batch, Scoring
from runtime.kv_cache.formats import kv_format
from runtime.kv_cache.layout import Part
from runtime.kv_cache.pool import CacheShape, PagedCache
from runtime.kv_transfer.slices import Runs, count_tokens

BLOCK, BLOCKS = 4, 64
SIZES = [(6, 2, 8), (6, 2, 16), (10, 1, 64), (4, 4, 80)]  # heads, KV heads, head size
SINKS = torch.linspace(-3, 3, 10)
SCORINGS = {
    "plain": Scoring(),
    "window of one": Scoring(1),
    "window of 3": Scoring(3),
    "wide window": Scoring(100),
    "scale": Scoring(scale=0.7),
    "cap": Scoring(scale=2.0, cap=1.5),
    "sinks": Scoring(sinks=SINKS),
    "everything": Scoring(5, 0.4, 0.9, SINKS),
}


@pytest.fixture(params=["compiled", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "torch":
        monkeypatch.setattr(native, "serves", lambda dtype, device: False)
        monkeypatch.setattr(weighted, "_SCORES", 100)
    elif not native.serves(torch.float32, torch.device("cpu")):
        assert shutil.which("g++") is None, "installed without compiled kernels, which g++ can build"
        pytest.skip("neither compiled kernels nor a compiler")
    yield


def softmax_attention(query, keys, values, scoring):
    """Attention of one token: query [heads, dim] over keys and values [context, kv_heads, dim], in
    float64."""
    query, keys, values = query.double(), keys.double(), values.double()
    reach = min(len(keys), scoring.window or len(keys))
    scale = query.shape[1] ** -0.5 if scoring.scale is None else scoring.scale
    answer = torch.empty(query.shape, dtype=torch.float64)
    for head in range(len(query)):
        kv = head // (len(query) // keys.shape[1])
        weights = keys[-reach:, kv] @ query[head] * scale
        if scoring.cap is not None:
            weights = scoring.cap * (weights / scoring.cap).tanh()
        weights = weights.exp()
        rest = 0 if scoring.sinks is None else scoring.sinks[head].double().exp()
        answer[head] = weights / (weights.sum() + rest) @ values[-reach:, kv]
    return answer.flatten()


def random_batches(seed: int):
    """Requests of random lengths in chunks: (lengths of the chunks, table) per request, with scattered
    blocks."""
    rng = random.Random(seed)
    free = list(range(BLOCKS))
    rng.shuffle(free)
    for _ in range(rng.randint(1, 7)):
        parts = [rng.choice([1, 1, 1, 2, 5, 9]) for _ in range(rng.randint(1, 4))]
        count = -(-sum(parts) // BLOCK)
        table, free = free[:count], free[count:]
        yield parts, sorted(table) if rng.random() < 0.3 else table


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("seed", range(8))
def test_ragged_batches_attend_to_all_before_them(seed: int, scoring: str) -> None:
    attend_to_all_before(seed, scoring, "plain")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kv", ["fp8", "int8"])
@pytest.mark.parametrize(("seed", "scoring"), [*enumerate(["plain"] * 4), (5, "everything"), (6, "sinks")])
def test_packed_caches_are_attended_to_as_what_they_hold(seed: int, scoring: str, kv: str) -> None:
    """Also by the tokens that were stored in the same step."""
    attend_to_all_before(seed, scoring, kv)


def attend_to_all_before(seed: int, scoring: str, kv: str) -> None:
    """Chunks and decodes of random requests against a softmax over what a cache in this format holds."""
    torch.manual_seed(seed)
    heads, kv_heads, dim = SIZES[seed % len(SIZES)]
    how, form = SCORINGS[scoring], kv_format(kv)
    if how.sinks is not None:
        how = replace(how, sinks=how.sinks[:heads].contiguous())
    shape = CacheShape(Part(2, 4, 0, kv_heads), dim, torch.float32, torch.device("cpu"), format=form)
    cache = PagedCache(shape, BLOCKS, BLOCK)
    unwritten = 255 if form.is_packed else torch.nan  # 255: NaN in fp8, and as a scale of int8
    cache.pool.fill_(unwritten)
    attention = make_attention(cache)
    requests = list(random_batches(seed))
    data = [(torch.randn(sum(parts), 3, heads, dim)) for parts, _ in requests]
    done = [0] * len(requests)
    for turn in range(max(len(parts) for parts, _ in requests)):
        live = [n for n, (parts, _) in enumerate(requests) if turn < len(parts)]
        random.Random(seed).shuffle(live)
        counts = [requests[n][0][turn] for n in live]
        batch = Batch.make(
            attention,
            [[7] * count for count in counts],
            [done[n] for n in live],
            [requests[n][1] for n in live],
            [n % 2 == 0 for n in live],
        )
        rows = torch.cat([data[n][done[n] : done[n] + count] for n, count in zip(live, counts, strict=True)])
        query, key, value = rows[:, 0], rows[:, 1, :kv_heads], rows[:, 2, :kv_heads]
        attention.store(key, value, 3, batch)
        answer = attention.attend(query, key, value, 3, batch, how)
        row = 0
        for n, count in zip(live, counts, strict=True):
            for token in range(done[n], done[n] + count):
                seen = form.unpack(form.pack(data[n][: token + 1]), torch.float32)
                expected = softmax_attention(
                    data[n][token, 0], seen[:, 1, :kv_heads], seen[:, 2, :kv_heads], how
                )
                torch.testing.assert_close(answer[row].double(), expected, atol=1e-5, rtol=1e-5)
                assert batch.positions[row] == token
                row += 1
            done[n] += count
        ends = torch.tensor(counts).cumsum(0) - 1
        assert batch.sampled.tolist() == [int(ends[k]) for k, n in enumerate(live) if n % 2 == 0]
    assert form.unpack(cache.layer(2), torch.float32).isnan().all()


def test_slots_and_runs_name_the_same_places() -> None:
    shape = CacheShape(Part(0, 1, 0, 1), 2, torch.float32, torch.device("cpu"))
    cache = PagedCache(shape, 10, 4)
    table = [7, 8, 2, 3, 9]
    for first in range(20):
        for end in range(first, 20):
            slots = cache.slots(table, first, end).tolist()
            assert slots == [table[token // 4] * 4 + token % 4 for token in range(first, end)]
            runs = cache.runs(table, first, end)
            assert [slot for run in runs for slot in range(*run)] == slots
            assert all(a[1] != b[0] for a, b in pairwise(runs))
    assert cache.runs(table, 2, 9).tolist() == [[30, 36], [8, 9]]
    whole = Runs(cache.runs(table, 2, 19))
    assert whole.tokens == 17
    counts = (count_tokens, native.count_tokens) if native.copies() else (count_tokens,)
    for count in counts:
        assert count(whole.array, 39) == 17 and count(whole.array, 38) == -1
        for wrong in ([[-1, 3]], [[4, 4]], [[5, 4]], [[1, 2], [7, -(2**63)]]):
            assert count(np.array(wrong), 39) == -1
    for first in range(17):
        for end in range(first + 1, 18):
            part = Runs.from_bytes(whole.between(first, end).to_bytes())
            assert part.slots().tolist() == whole.slots()[first:end].tolist() and part.tokens == end - first
