"""Kernels for GPUs against plain arithmetic in float64: on a GPU, or else in Triton's interpreter (see
tests/conftest.py)."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("the package triton is missing", allow_module_level=True)
ON_GPU = torch.cuda.is_available()

from runtime.engine.torch import compiled  # noqa: E402
from runtime.engine.torch.attention.base import Part  # noqa: E402
from runtime.engine.torch.attention.gpu import tiles_of  # noqa: E402
from runtime.engine.torch.gpu import kernels  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = {torch.float32: 2e-5} | ({torch.bfloat16: 2e-2, torch.float16: 3e-3} if ON_GPU else {})
SIZES = [(6, 2, 8), (10, 1, 64), (4, 4, 80), (32, 8, 128), (8, 4, 256)][: 5 if ON_GPU else 3]
"""Heads, KV heads, head size."""
BLOCK, CONTEXTS = 4, (1, 5, 130, 64)
SCORINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 3},
    "wide window": {"window": 1000},
    "cap": {"cap": 1.5, "scale": 2.0},
    "sinks": {"sinks": True},
    "everything": {"window": 66, "cap": 0.9, "sinks": True},
}


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize(("dtype", "splits"), [*product(DTYPES, (1, 4, 16) if ON_GPU else (1, 16))])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SIZES)
def test_single_tokens_attend_to_their_contexts(heads, kv_heads, dim, dtype, splits, scoring):
    torch.manual_seed(heads + splits)
    how = dict(SCORINGS[scoring])
    if "sinks" in how:
        how["sinks"] = torch.linspace(-3, 3, heads, device=DEVICE)
    pool = torch.full((2, 64 * BLOCK, kv_heads, dim), torch.nan, dtype=dtype, device=DEVICE)
    order = torch.randperm(64)
    tables = torch.zeros((len(CONTEXTS), 40), dtype=torch.int32)
    places = list[torch.Tensor]()
    for line, context in zip(tables, CONTEXTS, strict=True):
        count = -(-context // BLOCK)
        blocks, order = order[:count], order[count:]
        line[:count] = blocks
        places.append((blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:context].to(DEVICE))
        for side in pool:
            side[places[-1]] = torch.randn((context, kv_heads, dim), device=DEVICE).to(dtype)
    rows = torch.tensor([2, 0, 3, 1], device=DEVICE)
    fused = torch.randn((5, heads + 2, dim), device=DEVICE).to(dtype)
    query = fused[:, :heads]  # rows that are not adjacent
    output = torch.full((5, heads, dim), 7.0, dtype=dtype, device=DEVICE)
    contexts = torch.tensor(CONTEXTS, device=DEVICE)
    kernels.attend_paged(
        query, pool[0], pool[1], rows, tables.to(DEVICE), contexts, BLOCK, output, splits=splits, **how
    )
    assert (output[4] == 7).all()
    for row, slots in zip(rows.tolist(), places, strict=True):
        seen = slots[-how.get("window", len(slots)) :]
        key, value = (side[seen].double().repeat_interleave(heads // kv_heads, 1) for side in pool)
        scores = torch.einsum("hd,thd->ht", query[row].double(), key) * how.get("scale", dim**-0.5)
        if "cap" in how:
            scores = how["cap"] * (scores / how["cap"]).tanh()
        if "sinks" in how:
            scores = torch.cat([scores, how["sinks"].double()[:, None]], 1)
        weights = scores.softmax(1)[:, : len(seen)]
        expected = torch.einsum("ht,thd->hd", weights, value)
        off = (output[row].double() - expected).abs().max() / expected.abs().max()
        assert off < DTYPES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("queries", "kv_heads", "dim", "half"), [(6, 2, 16, 8), (6, 2, 80, 40), (4, 1, 32, 8)]
)
def test_heads_are_turned_and_stored(queries, kv_heads, dim, half, dtype):
    """Also where only a part of each head is turned."""
    torch.manual_seed(1)
    heads = torch.randn((5, queries + 2 * kv_heads, dim), device=DEVICE).to(dtype)
    pool = torch.full((2, 20, kv_heads, dim), 9.0, dtype=dtype, device=DEVICE)
    angles, slots = torch.randn((5, half), device=DEVICE), torch.tensor([3, 7, 1, 19, 0], device=DEVICE)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    expected = heads.double()
    low, high = expected[:, : queries + kv_heads, : 2 * half].clone().chunk(2, dim=-1)
    cosine, sine = cosines.double()[:, None], sines.double()[:, None]
    expected[:, : queries + kv_heads, :half] = low * cosine - high * sine
    expected[:, : queries + kv_heads, half : 2 * half] = high * cosine + low * sine
    kernels.turn_and_store(heads, cosines, sines, slots, pool[0], pool[1])
    torch.testing.assert_close(heads.double(), expected, atol=DTYPES[dtype], rtol=DTYPES[dtype])
    torch.testing.assert_close(pool[0][slots], heads[:, queries:-kv_heads], atol=0, rtol=0)
    torch.testing.assert_close(pool[1][slots], heads[:, -kv_heads:], atol=0, rtol=0)
    others = torch.tensor([slot for slot in range(20) if slot not in slots], device=DEVICE)
    assert (pool[:, others] == 9).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 96), (7, 3, 96), (1, 5000)])
def test_norms_round_before_they_multiply(shape, dtype):
    """But in a type that the weight has, not where it has another."""
    torch.manual_seed(2)
    x, weight = torch.randn(shape, device=DEVICE).to(dtype), torch.randn(shape[1:], device=DEVICE)
    scaled = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    expected = scaled.to(dtype).double() * weight.to(dtype).double()
    close = {"atol": DTYPES[dtype], "rtol": DTYPES[dtype]}
    torch.testing.assert_close(kernels.rms_norm(x, weight.to(dtype), 1e-5).double(), expected, **close)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5).double(), scaled * weight.double(), **close)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 100, 3000])
def test_gates(width, dtype):
    torch.manual_seed(3)
    gate_up = torch.randn((4, 2 * width), device=DEVICE).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    close = {"atol": DTYPES[dtype], "rtol": DTYPES[dtype]}
    torch.testing.assert_close(kernels.gate(gate_up).double(), expected, **close)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SIZES)
def test_chunks_attend_to_what_came_before(heads, kv_heads, dim, dtype, scoring):
    """Chunks that begin a prompt or go on, in tiles of a batch, some of which are empty."""
    torch.manual_seed(heads)
    how = dict(SCORINGS[scoring])
    if "sinks" in how:
        how["sinks"] = torch.linspace(-3, 3, heads, device=DEVICE)
    pool = torch.full((2, 96 * BLOCK, kv_heads, dim), torch.nan, dtype=dtype, device=DEVICE)
    order = torch.randperm(96)
    chunks = [(0, 5, 0), (5, 21, 60), (26, 1, 9), (27, 33, 0)]
    """First row, length, position."""
    tables = torch.zeros((len(chunks), 40), dtype=torch.int32)
    places, parts = list[torch.Tensor](), list[Part]()
    for line, (first, length, offset) in zip(tables, chunks, strict=True):
        context = offset + length
        count = -(-context // BLOCK)
        blocks, order = order[:count], order[count:]
        line[:count] = blocks
        parts.append(Part(first, length, offset, blocks.tolist()))
        places.append((blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:context].to(DEVICE))
        for side in pool:
            side[places[-1]] = torch.randn((context, kv_heads, dim), device=DEVICE).to(dtype)
    tiles = torch.from_numpy(np.concatenate([tiles_of(parts, 16), np.zeros((3, 4), np.int32)])).to(DEVICE)
    query = torch.randn((61, heads, dim), device=DEVICE).to(dtype)
    output = torch.full_like(query, 7.0)
    kernels.attend_tiles(
        query, pool[0], pool[1], tiles, tables.to(DEVICE), BLOCK, output, tile_tokens=16, **how
    )
    assert (output[60] == 7).all()
    for (first, length, offset), slots in zip(chunks, places, strict=True):
        for token in range(length):
            seen = slots[: offset + token + 1][-how.get("window", len(slots)) :]
            key, value = (side[seen].double().repeat_interleave(heads // kv_heads, 1) for side in pool)
            scores = torch.einsum("hd,thd->ht", query[first + token].double(), key)
            scores *= how.get("scale", dim**-0.5)
            if "cap" in how:
                scores = how["cap"] * (scores / how["cap"]).tanh()
            if "sinks" in how:
                scores = torch.cat([scores, how["sinks"].double()[:, None]], 1)
            weights = scores.softmax(1)[:, : len(seen)]
            expected = torch.einsum("ht,thd->hd", weights, value)
            off = (output[first + token].double() - expected).abs().max() / expected.abs().max()
            assert off < DTYPES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_without_a_slot_go_nowhere(dtype):
    """With and without turning."""
    torch.manual_seed(4)
    heads = torch.randn((3, 6, 24), device=DEVICE).to(dtype)
    slots = torch.tensor([4, -1, 0], device=DEVICE)
    pool = torch.full((2, 6, 2, 24), 9.0, dtype=dtype, device=DEVICE)
    kernels.store(heads[:, 2:4], slots, pool[0])
    kept = pool.clone()
    kept[0][slots[[0, 2]]] = heads[[0, 2], 2:4]
    assert torch.equal(pool, kept)
    angles = torch.zeros((3, 12), dtype=dtype, device=DEVICE)
    kernels.turn_and_store(heads, angles.cos(), angles.sin(), slots, pool[0], pool[1])
    kept[0][slots[[0, 2]]], kept[1][slots[[0, 2]]] = heads[[0, 2], 2:4], heads[[0, 2], 4:]
    assert torch.equal(pool, kept)


def test_kernels_can_be_tried_out():
    kernels.try_out(torch.float32, torch.device(DEVICE), 80)


def test_where_kernels_do_not_run_torch_computes(monkeypatch):
    """A card that is too old or too small, or a machine without a compiler."""

    def fail(*_: object) -> None:
        raise RuntimeError("failed to find a C compiler")

    monkeypatch.setattr(kernels, "try_out", fail)
    assert not compiled.triton_runs(torch.float32, torch.device("cuda", 0), 12)
    assert compiled.compiled_kernels(torch.float16, torch.device("cuda", 0)) is None
    assert not compiled.triton_runs(torch.float32, torch.device("cpu"), 12)
    compiled.triton_runs.cache_clear()
