"""Compare the compiled kernels with torch's operators: one thread, this processor's instructions, and float32
unless a line says otherwise.

    python -m benchmarks.engine.kernel_speed [--rounds 5]

Measures matrix products with weights [4096, 768] for several row counts, in float32 and in bfloat16, these
also beside our own in float32; products with quantised weights [4096, 4096], also with rows that become
integers of 16 bits ("rounded"), and of integers on both sides (W8A8), beside our own with the same in
float32; products with 16 experts of weights [1536, 768], in float32 and in mxfp4, of which each row uses 2,
and of integers on both sides, these in one call beside one for each expert and beside our own in float32;
and, for two shapes of heads, attention of the next tokens of 8 requests, and of a prompt of 512 tokens over a
context of 512; the next tokens also with KV caches in fp8 and int8, beside our own in float32. Prints
milliseconds, the best of several rounds in which the sides take turns: each computation takes a few
milliseconds, and anything else that runs can only add to it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from cost_model.lengths import BLOCK_TOKENS
from runtime import native
from runtime.engine.torch import mxfp4
from runtime.engine.torch.quantised.activations import Activations
from runtime.engine.torch.quantised.integers import IntegerProduct, IntegerWeight
from runtime.engine.torch.quantised.packed import PackedWeight
from runtime.engine.torch.quantised.rounded import RoundedWeight
from runtime.engine.torch.quantised.weight import Kind, QuantisedWeight
from runtime.kv_cache.formats import kv_format
from runtime.options import TORCH_PACKED_KV

OUTPUTS, INPUTS = 4096, 768
ROWS = (1, 3, 8, 32, 128, 512)
WIDE, GROUP, QUANTISED_ROWS = 4096, 128, (1, 2, 4, 8, 32, 512)
EXPERTS, CHOSEN, EXPERT_OUTPUTS = 16, 2, 1536
HEADS = ((12, 4, 64), (32, 8, 128))
CONTEXT, REQUESTS = 512, 8
AT_LEAST_S = 0.02

Side = Callable[[], object]
Packed = PackedWeight | RoundedWeight


def best_ms(sides: tuple[Side, ...], rounds: int) -> list[float]:
    """The best milliseconds of each side, in turns, each repeated often enough to fill AT_LEAST_S."""
    found = [float("inf")] * len(sides)
    for _ in range(rounds + 1):  # the first round warms up
        for k, side in enumerate(sides):
            begun, calls = time.perf_counter(), 0
            while (took := time.perf_counter() - begun) < AT_LEAST_S or not calls:
                side()
                calls += 1
            found[k] = min(found[k], 1e3 * took / calls)
    return found


def product(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Side, Side]:
    """Our matrix product and torch's."""
    x, weight = torch.randn(rows, INPUTS, dtype=dtype), torch.randn(OUTPUTS, INPUTS, dtype=dtype)
    packed = native.pack(weight)
    return lambda: native.linear(x, packed, None, OUTPUTS), lambda: F.linear(x, weight)


def product_in_bfloat16(rows: int) -> tuple[Side, Side, Side]:
    """The same in bfloat16, and ours in float32."""
    return *product(rows, torch.bfloat16), product(rows)[0]


def quantised_product(kind: Kind, rows: int, form: type[Packed] = PackedWeight) -> tuple[Side, Side]:
    """Our product with quantised weights in a form, and ours with weights in float32."""
    x, plain = torch.randn(rows, WIDE), native.pack(torch.randn(WIDE, WIDE))
    codes = torch.randint(0, 2**kind.bits - 1, (WIDE, WIDE), dtype=torch.uint8) & 119  # no NaN of FP8
    scales = torch.rand(WIDE, WIDE // GROUP).half()
    groups = torch.arange(WIDE) // GROUP
    packed = form(QuantisedWeight(kind, codes, scales, None, groups)).product(None)
    return lambda: packed(x), lambda: native.linear(x, plain, None, WIDE)


def integer_product(rows: int) -> tuple[Side, Side]:
    """Our product of integers, of which each row has its scale, and ours in float32."""
    x, plain = torch.randn(rows, WIDE), native.pack(torch.randn(WIDE, WIDE))
    codes = torch.randint(0, 256, (WIDE, WIDE), dtype=torch.uint8)
    one, activations = torch.zeros(WIDE, dtype=torch.int64), Activations(symmetric=True)
    weight = QuantisedWeight(Kind.INT8, codes, torch.rand(WIDE, 1), None, one, activations)
    integers = IntegerProduct(IntegerWeight(weight, activations))
    return lambda: integers(x), lambda: native.linear(x, plain, None, WIDE)


def experts(rows: int) -> tuple[Side, Side]:
    """Ours multiplies all experts in one call; torch's one after the other, those that have rows."""
    torch.manual_seed(rows)
    weights = torch.randn(EXPERTS, EXPERT_OUTPUTS, INPUTS)
    chosen = torch.rand(rows, EXPERTS).topk(CHOSEN).indices.flatten()
    x, counts = torch.randn(len(chosen), INPUTS), chosen.bincount(minlength=EXPERTS).tolist()
    grouped = native.Grouped([native.pack(weight) for weight in weights], [], EXPERT_OUTPUTS)

    def by_torch() -> None:
        parts = zip(x.split(counts), weights, strict=True)
        torch.cat([F.linear(part, weight) for part, weight in parts if len(part)])

    return lambda: grouped(x, counts), by_torch


def experts_in_mxfp4(rows: int) -> tuple[Side, Side]:
    """The same with weights in mxfp4, which torch's side expands first."""
    torch.manual_seed(rows)
    size = (EXPERTS, EXPERT_OUTPUTS, INPUTS // mxfp4.BLOCK)
    blocks = torch.randint(0, 256, (*size, mxfp4.BLOCK_BYTES), dtype=torch.uint8)
    scales = torch.randint(120, 130, size, dtype=torch.uint8)
    chosen = torch.rand(rows, EXPERTS).topk(CHOSEN).indices.flatten()
    x, counts = torch.randn(len(chosen), INPUTS), chosen.bincount(minlength=EXPERTS).tolist()
    parts = list(zip(blocks, scales, strict=True))
    grouped = mxfp4.Mxfp4Panels.grouped([mxfp4.Mxfp4Panels(*part, None) for part in parts])
    apart = [mxfp4.Expanding(*part, None) for part in parts]

    def by_torch() -> None:
        pairs = zip(x.split(counts), apart, strict=True)
        torch.cat([product(part) for part, product in pairs if len(part)])

    return lambda: grouped(x, counts), by_torch


def experts_in_integers(rows: int) -> tuple[Side, Side, Side]:
    """The same of integers on both sides, in one call and in one for each expert; and ours in float32."""
    torch.manual_seed(rows)
    codes = torch.randint(0, 256, (EXPERTS, EXPERT_OUTPUTS, INPUTS), dtype=torch.uint8)
    one, activations = torch.zeros(INPUTS, dtype=torch.int64), Activations(symmetric=True)
    scales, chosen = torch.rand(EXPERT_OUTPUTS, 1), torch.rand(rows, EXPERTS).topk(CHOSEN).indices.flatten()
    x, counts = torch.randn(len(chosen), INPUTS), chosen.bincount(minlength=EXPERTS).tolist()
    weights = [QuantisedWeight(Kind.INT8, each, scales, None, one, activations) for each in codes]
    apart = [IntegerProduct(IntegerWeight(each, activations)) for each in weights]
    grouped = IntegerProduct.grouped(apart)

    def one_by_one() -> None:
        parts = zip(x.split(counts), apart, strict=True)
        torch.cat([product(part) for part, product in parts if len(part)])

    return lambda: grouped(x, counts), one_by_one, experts(rows)[0]


def next_tokens(heads: int, kv_heads: int, dim: int) -> tuple[Side, Side]:
    """Ours reads the blocks of a cache; torch's goes request by request over contiguous keys and values."""
    keys, values = torch.randn(2, REQUESTS * CONTEXT, kv_heads, dim)
    query = torch.randn(REQUESTS, heads, dim)
    output, blocks = torch.empty_like(query), CONTEXT // BLOCK_TOKENS
    spans = native.Spans.make(
        [(one, 0, CONTEXT, range(one * blocks, (one + 1) * blocks)) for one in range(REQUESTS)]
    )
    k, v = (part.view(REQUESTS, CONTEXT, kv_heads, dim).transpose(1, 2) for part in (keys, values))

    def by_torch() -> None:
        for one in range(REQUESTS):
            F.scaled_dot_product_attention(
                query[one, None, :, None], k[one, None], v[one, None], enable_gqa=True
            )

    return lambda: native.attend_paged(query, keys, values, spans, BLOCK_TOKENS, output), by_torch


def next_tokens_packed(kv: str, heads: int, kv_heads: int, dim: int) -> tuple[Side, Side]:
    """Both read the blocks of a cache: one in 8 bits, and one in float32."""
    plain, form = torch.randn(2, REQUESTS * CONTEXT, kv_heads, dim), kv_format(kv)
    packed, query, blocks = form.pack(plain), torch.randn(REQUESTS, heads, dim), CONTEXT // BLOCK_TOKENS
    spans = native.Spans.make(
        [(one, 0, CONTEXT, range(one * blocks, (one + 1) * blocks)) for one in range(REQUESTS)]
    )
    output = torch.empty_like(query)

    def side(cached: torch.Tensor, kind: int) -> Side:
        return lambda: native.attend_paged(
            query, cached[0], cached[1], spans, BLOCK_TOKENS, output, kind=kind
        )

    return side(packed, form.kind), side(plain, native.PLAIN_KV)


def prompt(heads: int, kv_heads: int, dim: int) -> tuple[Side, Side]:
    """Ours reads the blocks of a cache; torch's reads contiguous keys and values."""
    keys, values = torch.randn(2, CONTEXT, kv_heads, dim)
    query = torch.randn(CONTEXT, heads, dim)
    output, table = torch.empty_like(query), np.arange(CONTEXT // BLOCK_TOKENS, dtype=np.int32)
    q, k, v = (part.transpose(0, 1)[None] for part in (query, keys, values))
    return (
        lambda: native.attend_chunk(query, keys, values, table, 0, None, BLOCK_TOKENS, output),
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    )


def main() -> None:
    """Print one line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not native.serves(torch.float32, torch.device("cpu")):
        raise SystemExit("there are no compiled kernels: reinstall with a C++ compiler available")
    print(f"{torch.backends.cpu.get_cpu_capability()}; ms of ours, of torch, ratio")
    for rows in ROWS:
        ours, torchs = best_ms(product(rows), options.rounds)
        rate = f"{2 * rows * OUTPUTS * INPUTS / ours / 1e6:.0f} GFLOP/s"
        print(f"product of {rows:3} rows          {ours:8.2f} {torchs:8.2f} {torchs / ours:6.2f}  {rate}")
    for rows in ROWS:
        ours, torchs, in_float32 = best_ms(product_in_bfloat16(rows), options.rounds)
        rate = f"{2 * rows * OUTPUTS * INPUTS / ours / 1e6:.0f} GFLOP/s"
        label = f"bfloat16 product of {rows:3} rows"
        more = f"{in_float32 / ours:.2f} beside ours in float32"
        print(f"{label:28}{ours:8.2f} {torchs:8.2f} {torchs / ours:6.2f}  {rate}, {more}")
    forms: list[tuple[Kind, type[Packed], str]] = [(kind, PackedWeight, "product") for kind in Kind]
    if native.multiplies_words():
        forms += [(kind, RoundedWeight, "rounded product") for kind in (Kind.INT4, Kind.INT8)]
    for kind, form, name in forms:
        for rows in QUANTISED_ROWS:
            ours, in_float32 = best_ms(quantised_product(kind, rows, form), options.rounds)
            label = f"{kind.name.lower()} {name} of {rows:3} rows"
            print(f"{label:28}{ours:8.2f} {in_float32:8.2f} {in_float32 / ours:6.2f}  beside ours in float32")
    for rows in QUANTISED_ROWS:
        ours, in_float32 = best_ms(integer_product(rows), options.rounds)
        label = f"W8A8 product of {rows:3} rows"
        print(f"{label:28}{ours:8.2f} {in_float32:8.2f} {in_float32 / ours:6.2f}  beside ours in float32")
    for label, sides in (("experts of", experts), ("experts in mxfp4 of", experts_in_mxfp4)):
        for rows in ROWS:
            ours, torchs = best_ms(sides(rows), options.rounds)
            print(f"{f'{label} {rows} rows':28}{ours:8.2f} {torchs:8.2f} {torchs / ours:6.2f}")
    for rows in ROWS:
        ours, apart, in_float32 = best_ms(experts_in_integers(rows), options.rounds)
        label, more = f"W8A8 experts of {rows} rows", f"{in_float32 / ours:.2f} beside ours in float32"
        print(f"{label:28}{ours:8.2f} {apart:8.2f} {apart / ours:6.2f}  beside one call for each, {more}")
    for name, make in ((f"next token of {REQUESTS}", next_tokens), (f"prompt of {CONTEXT}", prompt)):
        for shape in HEADS:
            ours, torchs = best_ms(make(*shape), options.rounds)
            label = f"{name}, {shape[0]} heads of {shape[2]}"
            print(f"{label:28}{ours:8.2f} {torchs:8.2f} {torchs / ours:6.2f}")
    for kv in TORCH_PACKED_KV:
        for shape in HEADS:
            ours, in_float32 = best_ms(next_tokens_packed(kv, *shape), options.rounds)
            label = f"KV in {kv}, {shape[0]} heads of {shape[2]}"
            print(f"{label:28}{ours:8.2f} {in_float32:8.2f} {in_float32 / ours:6.2f}  beside ours in float32")


if __name__ == "__main__":
    main()
