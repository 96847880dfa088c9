"""The compiled kernels compared with torch's operators in float64, for every build that this processor
runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from runtime import native
from runtime.engine.torch import mxfp4
from runtime.kv_cache.formats import KV_FORMATS, kv_format

pytestmark = pytest.mark.usefixtures("each_build")

ROWS = [1, 7, 300]
PACKED = [name for name, form in KV_FORMATS.items() if form.is_packed]
TYPES_OF_PRODUCTS = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16),
]
"""Of x and of the weights."""
HEADS = [(4, 2, 16), (9, 1, 256), (5, 5, 96), (6, 2, 128), (4, 4, 192), (5, 1, 576)]


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets how many threads compute, until the end of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 12, 13, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (31, 40), (32, 7), (33, 100), (300, 3000)])
def test_products(outputs: int, inputs: int, rows: int, biased: bool) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    bias = torch.randn(outputs) if biased else None
    packed = native.pack(weight), None if bias is None else native.pack_bias(bias), outputs
    result = native.linear(x, *packed)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-6 * inputs)
    alone = torch.cat([native.linear(row.unsqueeze(0), *packed) for row in x])
    assert torch.equal(result, alone), "a row's result depends on the others"


@pytest.mark.parametrize("by_pairs", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 12, 13, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (31, 40), (32, 7), (33, 100), (300, 3000)])
def test_products_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch, outputs: int, inputs: int, rows: int, biased: bool, by_pairs: bool
) -> None:
    """Within the bound of float32 sums in any order (Higham, Accuracy and Stability of Numerical Algorithms,
    2002, section 3.1), rounded once: both ways to multiply."""
    if by_pairs and not native.multiplies_pairs():
        pytest.skip("this build or this processor has no products of pairs")
    monkeypatch.setattr(native, "multiplies_pairs", lambda: by_pairs)
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inputs).bfloat16(), torch.randn(outputs, inputs).bfloat16()
    bias = torch.randn(outputs).bfloat16() if biased else None
    packed = native.pack(weight), None if bias is None else native.pack_bias(bias), outputs
    result = native.linear(x, *packed)
    assert result.dtype == torch.bfloat16
    added = torch.zeros(outputs) if bias is None else bias
    exact = F.linear(x.double(), weight.double(), added.double())
    terms = F.linear(x.double().abs(), weight.double().abs(), added.double().abs())
    allowed = (inputs + 1) * torch.finfo(torch.float32).eps * terms
    assert ((result.double() - exact).abs() <= allowed + 2**-8 * (exact.abs() + allowed)).all()
    alone = torch.cat([native.linear(row.unsqueeze(0), *packed) for row in x])
    assert torch.equal(result, alone), "a row's result depends on the others"


@pytest.mark.parametrize("types", TYPES_OF_PRODUCTS)
@pytest.mark.parametrize("counts", [[500], [130, 0, 1, 250, 12, 13]])
def test_any_number_of_threads_has_the_same_products(
    counts: list[int], types: tuple[torch.dtype, torch.dtype], threads: Callable[[int], None]
) -> None:
    torch.manual_seed(len(counts))
    x, weights = torch.randn(sum(counts), 550).to(types[0]), torch.randn(len(counts), 600, 550).to(types[1])
    packed = [native.pack(weight) for weight in weights]
    parts = list(zip(x.split(counts), packed, strict=True))
    alone = torch.cat([native.linear(row[None], weight, None, 600) for rows, weight in parts for row in rows])
    for count in (1, 2, 3, 8):
        threads(count)
        assert torch.equal(native.Grouped(packed, [], 600)(x, counts), alone)
        assert torch.equal(native.linear(x[: counts[0]], packed[0], None, 600), alone[: counts[0]])


@pytest.mark.parametrize("by_pairs", [False, True])
def test_infinities_and_nan_in_bfloat16(monkeypatch: pytest.MonkeyPatch, by_pairs: bool) -> None:
    """They go through a product as they are, and to no neighbour."""
    if by_pairs and not native.multiplies_pairs():
        pytest.skip("this build or this processor has no products of pairs")
    monkeypatch.setattr(native, "multiplies_pairs", lambda: by_pairs)
    weight = torch.eye(40).bfloat16()
    x = torch.zeros(3, 40).bfloat16()
    weight[weight == 0] = 0.5
    x[0, 4], x[1, 7], x[2, 5] = torch.inf, torch.nan, 3e38
    result = native.linear(x, native.pack(weight), None, 40)
    assert result[0].isposinf().all() and result[1].isnan().all()
    assert torch.equal(result[2], x[2, 5] * weight[:, 5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("counts", [[3], [0, 1, 40, 0], [2, 0, 0, 300, 1]])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (33, 100), (300, 700)])
def test_grouped_products(
    outputs: int, inputs: int, counts: list[int], biased: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(outputs)
    x, weights = torch.randn(sum(counts), inputs), torch.randn(len(counts), outputs, inputs)
    x, weights = x.to(dtype), weights.to(dtype)
    packed = [native.pack(weight) for weight in weights]
    biases = [native.pack_bias(bias) for bias in torch.randn(len(counts), outputs)] if biased else []
    parts = zip(x.split(counts), packed, biases or [None] * len(counts), strict=True)
    each = torch.cat([native.linear(rows, weight, bias, outputs) for rows, weight, bias in parts])
    assert torch.equal(native.Grouped(packed, biases, outputs)(x, counts), each)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 4, 13, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (33, 100), (300, 700)])
def test_products_of_heads(outputs: int, inputs: int, rows: int, dtype: torch.dtype) -> None:
    """Each head by its own weights, in rows that are apart; also where all heads have the same x. What lies
    between the results stays as it is."""
    torch.manual_seed(rows)
    weights = torch.randn(3, outputs, inputs).to(dtype)
    packed = native.pack_heads(weights)
    wide, result = (
        torch.randn(rows, 3, inputs + 6).to(dtype),
        torch.full((rows, 3, outputs + 5), 7.0).to(dtype),
    )
    x = wide[..., 4:-2]
    for same in (False, True):
        asked = x[:, :1].contiguous().expand(-1, 3, -1) if same else x
        native.multiply_heads(asked, packed, result[..., 2:-3])
        for head, weight in enumerate(weights):
            alone = native.linear(asked[:, head].contiguous(), native.pack(weight), None, outputs)
            assert torch.equal(result[:, head, 2:-3], alone)
    assert (result[..., :2] == 7).all() and (result[..., -3:] == 7).all()
    if outputs % 2 == 0:
        turned = native.transposed_head(packed[1], outputs)
        assert torch.equal(turned, native.pack_heads(weights[1:2].transpose(1, 2)))


def test_heads_in_bfloat16_that_begin_within_a_pair_are_refused() -> None:
    packed, x = native.pack_heads(torch.zeros(3, 8, 4).bfloat16()), torch.zeros(5, 3, 7).bfloat16()[..., :4]
    with pytest.raises(ValueError, match=r"\(21, 7\) values apart; in bfloat16, make both even"):
        native.multiply_heads(x, packed, torch.empty(5, 3, 8).bfloat16())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("counts", [[1], [0, 7, 40, 0]])
@pytest.mark.parametrize(("outputs", "blocks"), [(1, 1), (33, 3), (200, 20)])
def test_products_with_mxfp4(outputs: int, blocks: int, counts: list[int], biased: bool) -> None:
    torch.manual_seed(outputs)
    codes = torch.randint(0, 256, (len(counts), outputs, blocks, 16), dtype=torch.uint8)
    scales = torch.randint(120, 130, (len(counts), outputs, blocks), dtype=torch.uint8)
    biases = torch.randn(len(counts), outputs) if biased else [None] * len(counts)
    x = torch.randn(sum(counts), 32 * blocks)
    parts = list(zip(codes, scales, biases, strict=True))
    result = mxfp4.Mxfp4Panels.grouped([mxfp4.Mxfp4Panels(*part) for part in parts])(x, counts)
    pairs = zip(parts, x.split(counts), strict=True)
    expected = torch.cat([mxfp4.Expanding(*part)(rows) for part, rows in pairs])
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-3)
    alone = mxfp4.Mxfp4Panels(*parts[1 % len(parts)])
    rows = x[counts[0] :] if len(counts) > 1 else x
    assert torch.equal(alone(rows[:1]), result[len(x) - len(rows) :][:1]), "a row's result depends on others"
    rounded = alone(rows[:1].bfloat16())
    assert torch.equal(rounded, alone(rows[:1].bfloat16().float()).bfloat16())


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [5, 48, 771])
def test_rms_norm(rows: int, width: int) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, width) * 30, torch.randn(width)
    expected = F.rms_norm(x.double(), (width,), weight.double(), 1e-5)
    found = native.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    apart = torch.cat([x, torch.full((rows, 3), torch.nan)], dim=1)[:, :width]
    assert torch.equal(native.rms_norm(apart, weight, 1e-5), found)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [5, 48, 771])
def test_rms_norm_in_bfloat16(rows: int, width: int) -> None:
    """A weight in bfloat16 multiplies rounded numbers, one in float32 those before they are rounded."""
    torch.manual_seed(rows)
    x, weight = (torch.randn(rows, width) * 30).bfloat16(), torch.randn(width).bfloat16()
    scaled = native.rms_norm(x.float(), torch.ones(width), 1e-5)
    assert torch.equal(native.rms_norm(x, weight, 1e-5), scaled.bfloat16() * weight)
    wide = weight.float() + 1
    assert torch.equal(native.rms_norm(x, wide, 1e-5), (scaled * wide).bfloat16())


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [5, 48, 771])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    """Also of values that are far from zero; in bfloat16 as in float32, and rounded once."""
    torch.manual_seed(rows)
    x = (torch.randn(rows, width) * 30 + 500).to(dtype)
    weight, bias = torch.randn(width).to(dtype), torch.randn(width).to(dtype)
    found = native.layer_norm(x, weight, bias, 1e-5)
    if dtype == torch.float32:
        expected = F.layer_norm(x.double(), (width,), weight.double(), bias.double(), 1e-5)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    else:
        expected = native.layer_norm(x.float(), weight.float(), bias.float(), 1e-5)
        assert torch.equal(found, expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(1, 3), (4, 1001), (70, 520)])
def test_relu_is_that_of_torch(size: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(size[0])
    x = torch.randn(size).to(dtype)
    x.view(-1)[:3] = torch.tensor([torch.nan, -0.0, torch.inf])
    expected = x.relu()
    assert native.relu(x) is x
    torch.testing.assert_close(x, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("dim", [16, 20])
@pytest.mark.parametrize(
    "types", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)]
)
def test_norms_of_heads_in_place(rows: int, dim: int, types: tuple[torch.dtype, torch.dtype]) -> None:
    """As norms of rows; heads that are not normed stay as they are."""
    torch.manual_seed(rows)
    heads, weight = (torch.randn(rows, 5, dim) * 30).to(types[0]), torch.randn(3, dim).to(types[1])
    expected = heads.clone()
    for head in range(3):
        expected[:, head] = native.rms_norm(heads[:, head].contiguous(), weight[head], 1e-5)
    native.norm_heads(heads[:, :3], weight, 1e-5)
    assert torch.equal(heads, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(1, 3), (4, 1001), (70, 520)])
def test_sums_and_conversions_are_those_of_torch(size: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(size[0])
    x, y = torch.randn(size).to(dtype), (torch.randn(size) * 100).to(dtype)
    expected = x + y
    assert native.add(x, y) is x
    assert torch.equal(x, expected)
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    assert torch.equal(native.converted(x, other), x.to(other))
    assert native.converted(x, dtype) is x
    assert torch.equal(native.converted(x.half(), dtype), x.half().to(dtype))


def test_values_on_other_devices_are_converted_by_torch() -> None:
    """No kernel gets their addresses."""
    elsewhere = torch.ones(3, 4, dtype=torch.bfloat16, device="meta")
    assert native.converted(elsewhere, torch.float32).dtype == torch.float32
    assert native.take_columns(elsewhere, torch.zeros(2, dtype=torch.int32, device="meta")).shape == (3, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", ROWS)
def test_columns_in_another_order(rows: int, dtype: torch.dtype) -> None:
    x, order = torch.randn(rows, 203).to(dtype), torch.randperm(203)[:150].int()
    assert torch.equal(native.take_columns(x, order), x[:, order.long()].float())


@pytest.mark.parametrize("is_gelu", [False, True])
@pytest.mark.parametrize("width", [3, 64, 1001])
def test_gate_in_bfloat16(width: int, is_gelu: bool) -> None:
    """As in float32, and rounded once."""
    gate_up = (torch.randn(7, 2 * width) * 20).bfloat16()
    gate_up.view(-1)[:3] = torch.tensor([-1e4, 1e4, torch.nan])
    expected = native.gate(gate_up.float(), is_gelu).bfloat16()
    torch.testing.assert_close(native.gate(gate_up, is_gelu), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("is_gelu", [False, True])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [3, 64, 1001])
def test_gate(rows: int, width: int, is_gelu: bool) -> None:
    torch.manual_seed(rows)
    gate_up = torch.randn(rows, 2 * width) * (3 if is_gelu else 20)
    gate_up.view(-1)[:3] = torch.tensor([-1e4, 1e4, -0.0])
    gate, up = gate_up.double().chunk(2, dim=-1)
    curve = F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)
    found = native.gate(gate_up, is_gelu).double()
    torch.testing.assert_close(found, curve * up, rtol=1e-5, atol=1e-6)


def test_what_is_no_number_stays_none() -> None:
    x = torch.ones(2, 64)
    x[1, 7] = torch.nan
    assert native.gate(x).isnan().nonzero().tolist() == [[1, 7]]
    assert native.rms_norm(x, torch.ones(64), 1e-5).isnan().all(1).tolist() == [False, True]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("queries", "kv_heads", "dim", "turns"), [(4, 2, 16, 16), (3, 3, 10, 6), (7, 1, 64, 64)]
)
def test_turning_and_storing(rows: int, queries: int, kv_heads: int, dim: int, turns: int) -> None:
    """Pairs are complex numbers that rotate by an angle; the last values of a head may stay."""
    torch.manual_seed(rows)
    heads = torch.randn(rows, queries + 2 * kv_heads, dim)
    angles = torch.randn(rows, turns // 2) * 5
    slots = torch.randperm(rows + 9)[:rows]
    cache = torch.full((2, rows + 9, kv_heads, dim), torch.nan)
    wide = copy.deepcopy(heads).double()
    pairs = torch.complex(*wide[..., :turns].chunk(2, dim=-1)) * torch.exp(1j * angles.double()).unsqueeze(1)
    turned = torch.cat((pairs.real, pairs.imag, wide[..., turns:]), dim=-1)
    native.turn_and_store(heads, angles.cos(), angles.sin(), slots, *cache)
    key_heads = slice(queries, queries + kv_heads)
    torch.testing.assert_close(heads[:, :queries].double(), turned[:, :queries], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache[0, slots].double(), turned[:, key_heads], rtol=1e-5, atol=1e-5)
    assert torch.equal(cache[1, slots].double(), wide[:, queries + kv_heads :])
    assert cache.isnan().sum() == 2 * 9 * kv_heads * dim


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", ROWS)
def test_turning_latents(rows: int, dtype: torch.dtype, neighbours: bool) -> None:
    """In bfloat16 as in float32, and rounded once."""
    torch.manual_seed(rows)
    heads, nope, rank, half = 3, 10, 40, 6
    queries = torch.randn(rows, heads, nope + 2 * half).to(dtype)
    kept = torch.randn(rows, 7 + rank + 2 * half).to(dtype)[:, 7:]
    weight, angles = torch.randn(rank).to(dtype), torch.randn(rows, half) * 5
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    output = torch.full((rows, heads, 5 + 2 * half), torch.nan).to(dtype)
    key = native.turn_latents(queries, kept, weight, 1e-6, cosines, sines, neighbours, output[..., 5:])

    def turned(x: torch.Tensor) -> torch.Tensor:
        low, high = (
            x.double().unflatten(-1, (half, 2) if neighbours else (2, half)).unbind(-1 if neighbours else -2)
        )
        by = torch.complex(cosines.double(), sines.double()).view(rows, *([1] * (x.dim() - 2)), half)
        pairs = torch.complex(low, high) * by
        return torch.cat((pairs.real, pairs.imag), dim=-1).to(dtype)

    off = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.01, "atol": 0.01}
    torch.testing.assert_close(output[..., 5:], turned(queries[..., nope:]), **off)
    torch.testing.assert_close(key[:, rank:], turned(kept[:, rank:]), **off)
    assert torch.equal(key[:, :rank], native.rms_norm(kept[:, :rank], weight, 1e-6))
    assert output[..., :5].isnan().all()


def test_every_number_near_a_code_of_fp8_becomes_the_code_of_torch() -> None:
    """Codes, the middles between two, and their neighbours; what is too large; and what is no number."""
    form = kv_format("fp8")
    codes = form.unpack(torch.arange(256, dtype=torch.uint8), torch.float32)
    codes = codes[codes.isfinite()].sort().values
    middles = (codes[1:] + codes[:-1]) / 2
    near = [middles.nextafter(torch.tensor(end)) for end in (-torch.inf, torch.inf)]
    others = torch.tensor([torch.nan, torch.inf, -torch.inf, 449.0, 464.0, -480.0, 1e30, 1e-40])
    heads = torch.cat([codes, middles, *near, others]).view(-1, 1, 1)
    cache = torch.zeros(len(heads), 1, 1, dtype=torch.uint8)
    native.store_heads(heads, torch.arange(len(heads)), cache, form.kind)
    assert torch.equal(cache, form.pack(heads))


@pytest.mark.parametrize("kv", PACKED)
@pytest.mark.parametrize("dim", [1, 8, 16, 20, 80, 576])
def test_stored_heads_are_the_bytes_of_torch(dim: int, kv: str) -> None:
    """Of any size and magnitude; of zeros, and of what is nearly zero."""
    torch.manual_seed(dim)
    form, heads = kv_format(kv), torch.randn(40, 5, dim) * 10 ** torch.empty(40, 5, 1).uniform_(-6, 4)
    heads[0], heads[1], heads[2, 0] = 0, 1e-44, 1e30
    slots = torch.randperm(50)[:40]
    cache = torch.full((50, 3, form.width(dim)), 255, dtype=torch.uint8)
    native.store_heads(heads[:, 1:4], slots, cache, form.kind)
    assert torch.equal(cache[slots], form.pack(heads[:, 1:4]))
    assert (cache == 255).all(dim=(1, 2)).sum() == 10


@pytest.mark.parametrize("kv", PACKED)
def test_turned_keys_are_packed(kv: str) -> None:
    torch.manual_seed(3)
    form, heads, angles = kv_format(kv), torch.randn(7, 4 + 2 * 2, 10), torch.randn(7, 5)
    plain, slots = heads.clone(), torch.randperm(9)[:7]
    cache = torch.zeros(2, 9, 2, 10)
    native.turn_and_store(plain, angles.cos(), angles.sin(), slots, *cache)
    packed = torch.zeros(2, 9, 2, form.width(10), dtype=torch.uint8)
    native.turn_and_store(heads, angles.cos(), angles.sin(), slots, *packed, form.kind)
    assert torch.equal(heads, plain) and torch.equal(packed[:, slots], form.pack(cache[:, slots]))


@pytest.mark.parametrize("kv", KV_FORMATS)
@pytest.mark.parametrize(("kv_heads", "dim", "turns"), [(2, 16, 16), (3, 10, 6), (1, 64, 64)])
def test_turning_and_storing_in_bfloat16(kv_heads: int, dim: int, turns: int, kv: str) -> None:
    """As in float32, rounded once, and stored as torch does."""
    torch.manual_seed(dim)
    heads, angles = torch.randn(7, 4 + 2 * kv_heads, dim).bfloat16(), torch.randn(7, turns // 2) * 5
    form, slots, wide = kv_format(kv), torch.randperm(9)[:7], heads.float()
    cosines, sines = angles.cos().bfloat16(), angles.sin().bfloat16()
    floats = torch.zeros(2, 9, kv_heads, dim)
    native.turn_and_store(wide, cosines.float(), sines.float(), slots, *floats)
    cache = torch.zeros(2, 9, kv_heads, form.width(dim), dtype=form.stored_dtype(torch.bfloat16))
    native.turn_and_store(heads, cosines, sines, slots, *cache, form.kind)
    assert torch.equal(heads[:, : 4 + kv_heads], wide[:, : 4 + kv_heads].bfloat16())
    stored = form.pack(floats.bfloat16())
    assert torch.equal(cache[:, slots], stored[:, slots])
    cache.zero_()
    native.store_heads(heads[:, 4 : 4 + kv_heads], slots, cache[0], form.kind)
    assert torch.equal(cache[0, slots], stored[0, slots])


@pytest.mark.parametrize("kv", KV_FORMATS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_attention_in_bfloat16(heads: int, kv_heads: int, dim: int, kv: str) -> None:
    """That of the same numbers in float32, rounded once, for a chunk of a prompt and for its last token."""
    torch.manual_seed(dim)
    block, length, offset = 16, 40, 30
    table, form = torch.randperm(8)[:5], kv_format(kv)
    query = torch.randn(length, heads + 3, dim).bfloat16()[:, :heads]
    stored = form.pack(torch.randn(2, 8 * block, kv_heads, dim).bfloat16())
    floats = stored if form.is_packed else stored.float()
    answers = torch.empty(2, length, heads, dim), torch.empty(2, length, heads, dim, dtype=torch.bfloat16)
    spans = native.Spans.make([(length - 1, 3, offset + length, table.tolist())])
    for asked, cache, (chunk, single) in zip((query.float(), query), (floats, stored), answers, strict=True):
        how = table.int().numpy(), offset, 20, block
        native.attend_chunk(asked, *cache, *how, chunk, kind=form.kind)
        single.zero_()
        native.attend_paged(asked, *cache, spans, block, single, kind=form.kind)
    torch.testing.assert_close(answers[1], answers[0].bfloat16(), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("kv", KV_FORMATS)
@pytest.mark.parametrize("spread", [1.0, 100.0])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_attention_of_many_tokens(heads: int, kv_heads: int, dim: int, spread: float, kv: str) -> None:
    """Contexts of one to many blocks, with uniform weights, and with all weight on one token."""
    torch.manual_seed(dim)
    block, contexts = 16, [1, 15, 16, 17, 200, 333]
    tables = torch.randperm(60).tolist()
    query = torch.randn(len(contexts), heads + 3, dim)[:, :heads]
    form = kv_format(kv)
    stored = form.pack(torch.randn(2, 60 * block, kv_heads, dim) * spread)
    keys, values = form.unpack(stored, torch.float32)
    singles = [(row, row % 2, end, tables[6 * row : 6 * row + 30]) for row, end in enumerate(contexts)]
    output = torch.empty(len(contexts), heads, dim)
    native.attend_paged(query, *stored, native.Spans.make(singles), block, output, kind=form.kind)
    for row, first, end, table in singles:
        slots = torch.tensor([table[t // block] * block + t % block for t in range(first, end)])
        seen = [part[slots].repeat_interleave(heads // kv_heads, dim=1).double() for part in (keys, values)]
        expected = F.scaled_dot_product_attention(
            query[row].double().unsqueeze(1), *(part.transpose(0, 1) for part in seen)
        )
        torch.testing.assert_close(output[row].double(), expected[:, 0], rtol=2e-4, atol=2e-5 * spread)


@pytest.mark.parametrize("kv", KV_FORMATS)
@pytest.mark.parametrize("window", [None, 1, 20, 1000])
@pytest.mark.parametrize("offset", [0, 5, 150])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_attention_of_prompts(
    heads: int, kv_heads: int, dim: int, offset: int, window: int | None, kv: str
) -> None:
    """Each token of a chunk sees itself and the tokens before it, within the window."""
    torch.manual_seed(offset)
    block, length = 16, 77
    end = offset + length
    table = torch.randperm(20)[: -(-end // block)]
    query = torch.randn(length, heads + 3, dim)[:, :heads]
    keys, values = torch.full((2, 20 * block, kv_heads, dim), torch.nan)
    slots = (table[:, None] * block + torch.arange(block)).flatten()[:end]
    keys[slots], values[slots] = torch.randn(2, end, kv_heads, dim)
    output, form = torch.empty(length, heads, dim), kv_format(kv)
    stored = form.pack(torch.stack([keys, values]))
    keys, values = form.unpack(stored, torch.float32)
    how = table.int().numpy(), offset, window, block, output
    native.attend_chunk(query, *stored, *how, kind=form.kind)
    ages = torch.arange(offset, end)[:, None] - torch.arange(end)
    seen = [part[slots].repeat_interleave(heads // kv_heads, dim=1).double() for part in (keys, values)]
    expected = F.scaled_dot_product_attention(
        query.transpose(0, 1).double(),
        *(part.transpose(0, 1) for part in seen),
        attn_mask=(ages >= 0) & (ages < (window or end)),
    )
    torch.testing.assert_close(output.double(), expected.transpose(0, 1), rtol=1e-4, atol=1e-5)


def test_sizes_that_are_not_compiled_are_left_to_torch() -> None:
    assert native.attends_to(64)
    assert not native.attends_to(40)


def runs_of(rng: np.random.Generator, slots: int, tokens: int) -> np.ndarray:
    """That many tokens in runs of random lengths, in random order: [runs, 2]."""
    chosen = np.sort(rng.permutation(slots)[:tokens])
    parts = np.split(chosen, np.flatnonzero(np.diff(chosen) > 1) + 1)
    cut = [half for part in parts for half in np.split(part, [rng.integers(0, len(part) + 1)]) if len(half)]
    return np.array([(cut[at][0], cut[at][-1] + 1) for at in rng.permutation(len(cut))])


@pytest.mark.parametrize("past_caches", [False, True])
@pytest.mark.parametrize(
    ("item", "row"), [(1, 1), (96, 96), (256, 512), (200, 1000), (4096, 4096), (70001, 70001)]
)
@pytest.mark.parametrize("seed", range(4))
def test_copies_of_tokens(seed: int, item: int, row: int, past_caches: bool) -> None:
    """From a pool to a buffer or back; only the tokens change."""
    rng = np.random.default_rng(seed)
    slots, planes, tokens = 97, 3, int(rng.integers(1, 90))
    widths, shifts = (row, item), (int(rng.integers(0, row - item + 1)), int(rng.integers(0, 64)))

    def views(memory: np.ndarray) -> list[np.ndarray]:
        both = [
            np.ndarray((planes, slots), f"V{item}", each.data, shift, (slots * width, width))
            for each, width, shift in zip(memory, widths, shifts, strict=True)
        ]
        return both[::-1] if seed % 2 else both

    memory = rng.integers(0, 256, (2, planes * slots * row + 64), np.uint8)
    expected = memory.copy()
    into_runs, source_runs = runs_of(rng, slots, tokens), runs_of(rng, slots, tokens)
    to, at = (np.concatenate([np.arange(*run) for run in runs]) for runs in (into_runs, source_runs))
    into, source = views(expected)
    into[:, to] = source[:, at]
    into, source = views(memory)
    native.copy_tokens(into, into_runs, source, source_runs, past_caches)
    assert np.array_equal(memory, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("seed", range(4))
def test_rows_go_to_their_places_in_panels(dtype: torch.dtype, seed: int) -> None:
    """In parts of any size, from any output on; also infinities, and numbers below the normal ones."""
    rng = np.random.default_rng(seed)
    outputs, inputs, width = (int(size) for size in (*rng.integers(1, 150, 2), native.panel_width()))
    weight = torch.randn(outputs, inputs + 3).to(dtype)
    weight[rng.integers(outputs), :4] = torch.tensor([torch.inf, -torch.inf, 3e-7, -0.0]).to(dtype)
    weight = weight[:, 3:] if seed % 2 else weight[:, :inputs]
    packed = native.empty_panels(outputs, inputs)
    cuts = [0, *sorted(rng.integers(0, outputs + 1, 3).tolist()), outputs]
    for first, end in pairwise(cuts):
        native.pack_rows(packed, first, weight[first:end])
    padded = torch.zeros(-(-outputs // width) * width, inputs)
    padded[:outputs] = weight.float()
    expected = padded.view(-1, width, inputs).transpose(1, 2)
    assert torch.equal(packed, expected)
    assert torch.equal(packed.signbit(), expected.signbit())
    if dtype == torch.float32:
        assert torch.equal(native.pack(weight), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
def test_rows_go_to_their_places_in_panels_of_pairs(dtype: torch.dtype, seed: int) -> None:
    """Odd numbers of inputs, too, which zeros make even."""
    rng = np.random.default_rng(seed)
    outputs, inputs, width = (int(size) for size in (*rng.integers(1, 150, 2), native.panel_width()))
    weight = torch.randn(outputs, inputs + 3).to(dtype)
    weight[rng.integers(outputs), :4] = torch.tensor([torch.inf, -torch.inf, 3e-7, -0.0]).to(dtype)
    weight = weight[:, 3:] if seed % 2 else weight[:, :inputs]
    packed = native.empty_panels(outputs, inputs, torch.bfloat16)
    cuts = [0, *sorted(rng.integers(0, outputs + 1, 3).tolist()), outputs]
    for first, end in pairwise(cuts):
        native.pack_rows(packed, first, weight[first:end])
    padded = torch.zeros(-(-outputs // width) * width, inputs + inputs % 2).bfloat16()
    padded[:outputs, :inputs] = weight.bfloat16()
    expected = padded.view(-1, width, padded.shape[1] // 2, 2).transpose(1, 2)
    assert torch.equal(packed.view(torch.int16), expected.contiguous().view(torch.int16))
