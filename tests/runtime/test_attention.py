"""Attention over the paged cache against a plain softmax in float64, whatever is in the batch."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from runtime.engine.attention import Batch, attend
from runtime.engine.cache import CacheShape, PagedCache
from runtime.kv_layout import Part

HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 6, 2, 8, 4, 64


def softmax_attention(query, keys, values, window):
    """One token: query [heads, dim] over keys, values [context, kv_heads, dim], in float64."""
    query, keys, values = query.double(), keys.double(), values.double()
    reach = min(len(keys), window or len(keys))
    answer = torch.empty(HEADS, DIM, dtype=torch.float64)
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        scores = keys[-reach:, kv] @ query[head] / DIM**0.5
        answer[head] = scores.softmax(0) @ values[-reach:, kv]
    return answer.flatten()


def random_batches(seed: int):
    """Requests of random lengths in chunks: (lengths of the parts, table) per request, blocks scattered."""
    rng = random.Random(seed)
    free = list(range(BLOCKS))
    rng.shuffle(free)
    for _ in range(rng.randint(1, 7)):
        parts = [rng.choice([1, 1, 1, 2, 5, 9]) for _ in range(rng.randint(1, 4))]
        count = -(-sum(parts) // BLOCK)
        table, free = free[:count], free[count:]
        yield parts, sorted(table) if rng.random() < 0.3 else table


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("seed", range(12))
def test_ragged_batches_attend_to_all_before_them(seed: int, window: int | None) -> None:
    torch.manual_seed(seed)
    shape = CacheShape(Part(2, 4, 0, KV_HEADS), DIM, torch.float32, torch.device("cpu"))
    cache = PagedCache(shape, BLOCKS, BLOCK)
    cache.pool.fill_(torch.nan)
    requests = list(random_batches(seed))
    data = [(torch.randn(sum(parts), 3, HEADS, DIM)) for parts, _ in requests]
    done = [0] * len(requests)
    for turn in range(max(len(parts) for parts, _ in requests)):
        live = [n for n, (parts, _) in enumerate(requests) if turn < len(parts)]
        random.Random(seed).shuffle(live)
        counts = [requests[n][0][turn] for n in live]
        batch = Batch.make(
            cache,
            [[7] * count for count in counts],
            [done[n] for n in live],
            [requests[n][1] for n in live],
            [n % 2 == 0 for n in live],
        )
        rows = torch.cat([data[n][done[n] : done[n] + count] for n, count in zip(live, counts, strict=True)])
        query, key, value = rows[:, 0], rows[:, 1, :KV_HEADS], rows[:, 2, :KV_HEADS]
        answer = attend(query, key, value, 3, batch, window)
        row = 0
        for n, count in zip(live, counts, strict=True):
            for token in range(done[n], done[n] + count):
                seen = data[n][: token + 1]
                expected = softmax_attention(
                    data[n][token, 0], seen[:, 1, :KV_HEADS], seen[:, 2, :KV_HEADS], window
                )
                torch.testing.assert_close(answer[row].double(), expected, atol=1e-5, rtol=1e-5)
                assert batch.positions[row] == token
                row += 1
            done[n] += count
        ends = torch.tensor(counts).cumsum(0) - 1
        assert batch.sampled.tolist() == [int(ends[k]) for k, n in enumerate(live) if n % 2 == 0]
    assert cache.layer(2).isnan().all()


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
    assert cache.runs(table, 2, 9) == [(30, 36), (8, 9)]
