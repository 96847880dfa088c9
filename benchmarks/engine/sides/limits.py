"""A side of benchmarks/engine/engine_speed.py: the limits that the machine sets.

PYTHONPATH=. python benchmarks/engine/sides/limits.py CHECKPOINT DTYPE

For a decode step there are two limits: bytes over bandwidth, with weights and KV cache read at the fastest
rate measured on this memory; and the time of its matrix products alone, by the fastest library call or our
kernel, plus reading the KV cache at that rate. For a prefill, the limit is the time of the products with
weights, without attention.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.engine.sides.protocol import Channel
from runtime.engine.torch.linear import Linear, by_onednn, onednn_works

READ_BYTES = 1 << 30
AT_LEAST_S = 0.5
Product = Callable[[torch.Tensor], torch.Tensor]


class Products:
    """All products of a step with weights, in order, by one kind of call."""

    def __init__(self, config: dict[str, int], dtype: torch.dtype, call: Callable[[torch.Tensor], Product]):
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        width = hidden // config["num_attention_heads"]
        projected = hidden + 2 * width * config["num_key_value_heads"]
        shapes = [(hidden, projected), (hidden, hidden), (hidden, 2 * inner), (inner, hidden)]
        self._inputs = (hidden, hidden, hidden, inner)
        self._layers = [
            [call(torch.randn(rows, columns, dtype=dtype)) for columns, rows in shapes]
            for _ in range(config["num_hidden_layers"])
        ]
        self._head = call(torch.randn(config["vocab_size"], hidden, dtype=dtype))
        per_layer = sum(rows * columns for rows, columns in shapes)
        weights = per_layer * config["num_hidden_layers"] + config["vocab_size"] * hidden
        self.weight_bytes = weights * dtype.itemsize
        self._dtype = dtype

    def seconds(self, rows: int, sampled: int) -> float:
        """Seconds of one step for a number of tokens, of which some need a next token."""
        inputs = [torch.randn(rows, columns, dtype=self._dtype) for columns in self._inputs]

        def step() -> None:
            for layer in self._layers:
                for product, x in zip(layer, inputs, strict=True):
                    product(x)
            self._head(inputs[0][:sampled])

        return typical_s(step)


def typical_s(action: Callable[[], object]) -> float:
    """Median seconds of an action, after one warm-up call."""
    action()
    seconds: list[float] = []
    while sum(seconds) < AT_LEAST_S:
        begun = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def read_bytes_s(data: torch.Tensor) -> float:
    """Bytes/s at which all cores read memory, by the fastest of several calls that do little else."""
    calls: Sequence[Callable[[], object]] = (data.sum, data.max, lambda: torch.mv(data, data[0]))
    return data.nbytes / min(typical_s(call) for call in calls)


def plain(weight: torch.Tensor) -> Product:
    return lambda x: F.linear(x, weight)


def transposed(weight: torch.Tensor) -> Product:
    turned = weight.t().contiguous()
    return lambda x: torch.mm(x, turned)


@torch.inference_mode()
def main(checkpoint: str, dtype_name: str) -> None:
    """Answer each case with the seconds of a decode step, or of prefilling all its prompts if one token is
    asked for."""
    channel, dtype = Channel(), getattr(torch, dtype_name)
    config = json.loads(Path(checkpoint, "config.json").read_text())
    calls: dict[str, Callable[[torch.Tensor], Product]] = {
        "F.linear": plain,
        "mm": transposed,
        "ours": Linear,
    }
    if onednn_works(dtype):
        calls["oneDNN packed"] = by_onednn
    ways = {name: Products(config, dtype, call) for name, call in calls.items()}
    kv_width = config["hidden_size"] // config["num_attention_heads"] * config["num_key_value_heads"]
    kv_bytes_token = 2 * config["num_hidden_layers"] * kv_width * dtype.itemsize
    data = torch.ones(1 << 10, READ_BYTES // 4 >> 10)
    channel.ready()
    for case in channel:
        batch, prompt = len(case["prompts"]), len(case["prompts"][0])
        decodes = case["new_tokens"] > 1
        rows = batch if decodes else batch * prompt
        products, call = min((way.seconds(rows, batch), name) for name, way in ways.items())
        bandwidth = read_bytes_s(data)
        kv_bytes = batch * (prompt + case["new_tokens"] / 2) * kv_bytes_token if decodes else 0
        weights = ways[call].weight_bytes
        answer = {
            "bytes_s": bandwidth,
            "call": call,
            "memory_s": (weights + kv_bytes) / bandwidth,
            "products_s": products + kv_bytes / bandwidth,
        }
        channel.send(answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
