"""Time the operators of the torch engine on a GPU, as tables that `hexgen2 calibrate --operators` reads.

    python -m benchmarks.engine.gpu_operators --output FOLDER [--gpu NAME]

Products with weights in bfloat16 (torch's), attention of single tokens over a paged cache (our kernel), and
of whole prompts (torch's), for the shapes of models of 1 to 70 billion parameters on one to eight GPUs.
Caches of the card are cleared before each run; times are medians. An operator that is shorter than its launch
from Python (up to 100 us of ours) is shown too long. NAME is what the cluster file calls the
card; without it, what the driver says.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from triton.testing import do_bench

from runtime.engine.torch.gpu import kernels

DEVICE, DTYPE, BLOCK = torch.device("cuda:0"), torch.bfloat16, 16
ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
WEIGHTS = (
    *((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
    *((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)),
    *((10240, 8192), (57344, 8192), (8192, 28672), (2560, 8192), (14336, 8192), (8192, 7168), (8192, 2048)),
)
"""Outputs and inputs of the matrices of Llamas of 1, 8 and 70 billion parameters, the last also in four
parts."""
HEADS = ((32, 8, 64), (32, 8, 128), (64, 8, 128), (16, 2, 128), (8, 1, 128), (32, 32, 128), (56, 56, 128))
"""Query heads, KV heads, head size."""
CONTEXTS, BATCHES = (128, 512, 2048, 8192, 32768), (1, 4, 16, 64, 128, 256)
PROMPTS = (128, 512, 1024, 2048, 4096, 8192)
MOST_BYTES = 24 << 30
TURN_MS = 12.0


def main() -> None:
    """Write three tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--gpu", help="what the cluster file calls the card")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    gpu = arguments.gpu or torch.cuda.get_device_name().replace("NVIDIA ", "").replace(" ", "-")
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, rows in {"gemm": products, "decode_attention": decodes, "prefill_attention": prefills}.items():
        began, path = time.monotonic(), arguments.output / f"{gpu}_{name}.csv"
        found = list(rows())
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(found[0]))
            writer.writeheader()
            writer.writerows(found)
        print(f"{path.name}: {len(found)} rows in {time.monotonic() - began:.0f} s", flush=True)


def timed_ms(run: Callable[[], object]) -> float:
    """The median of some runs."""
    return float(do_bench(run, warmup=3, rep=TURN_MS, return_mode="median"))


@torch.inference_mode()
def products() -> Iterator[dict[str, object]]:
    """m x k times k x n."""
    for n, k in WEIGHTS:
        weight = torch.randn((n, k), device=DEVICE, dtype=DTYPE)
        for m in ROWS:
            if m * n > 1 << 29:
                continue
            x = torch.randn((m, k), device=DEVICE, dtype=DTYPE)
            taken = timed_ms(lambda: F.linear(x, weight))  # noqa: B023
            source = "torch.nn.functional.linear"
            yield {
                "gemm_dtype": "bfloat16",
                "kernel_source": source,
                "m": m,
                "n": n,
                "k": k,
                "latency_ms": taken,
            }


@torch.inference_mode()
def decodes() -> Iterator[dict[str, object]]:
    """One token of each of some requests over so many tokens each, in scattered blocks."""
    for heads, kv_heads, dim in HEADS:
        for batch in BATCHES:
            for context in CONTEXTS:
                blocks = -(-context // BLOCK)
                slots = batch * blocks * BLOCK
                if 2 * slots * kv_heads * dim * DTYPE.itemsize > MOST_BYTES:
                    continue
                pool = torch.empty((2, slots, kv_heads, dim), device=DEVICE, dtype=DTYPE).normal_()
                order = torch.randperm(batch * blocks, device=DEVICE).to(torch.int32).view(batch, blocks)
                query = torch.randn((batch, heads, dim), device=DEVICE, dtype=DTYPE)
                output, rows = torch.empty_like(query), torch.arange(batch, device=DEVICE)
                contexts = torch.full((batch,), context, device=DEVICE)
                splits = kernels.splits_for(batch, kv_heads, DEVICE)

                def attend() -> None:
                    kernels.attend_paged(
                        *(query, pool[0], pool[1], rows, order, contexts, BLOCK, output),  # noqa: B023
                        splits=splits,  # noqa: B023
                    )

                yield {
                    **_columns("hexgen2 attend_paged", batch),
                    "isl": 1,
                    "step": context - 1,
                    **_heads(heads, kv_heads, dim),
                    "latency_ms": timed_ms(attend),
                }


@torch.inference_mode()
def prefills() -> Iterator[dict[str, object]]:
    """Prompts, each attending to itself."""
    for heads, kv_heads, dim in HEADS:
        for batch in (1, 4):
            for length in PROMPTS:
                query = torch.randn((batch, heads, length, dim), device=DEVICE, dtype=DTYPE)
                key = torch.randn((batch, kv_heads, length, dim), device=DEVICE, dtype=DTYPE)

                def attend() -> torch.Tensor:
                    return F.scaled_dot_product_attention(
                        *(query, key, key),  # noqa: B023
                        is_causal=True,
                        enable_gqa=True,
                    )

                yield {
                    **_columns("torch scaled_dot_product_attention", batch),
                    "isl": length,
                    **_heads(heads, kv_heads, dim),
                    "latency_ms": timed_ms(attend),
                }


def _columns(source: str, batch: int) -> dict[str, object]:
    kinds = {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}
    return {"kernel_source": source, **kinds, "batch_size": batch}


def _heads(heads: int, kv_heads: int, dim: int) -> dict[str, object]:
    return {"num_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim, "window_size": 0}


if __name__ == "__main__":
    main()
