"""Time steps of the torch engine on a GPU, beside transformers and what the card allows.

    python -m benchmarks.engine.gpu_speed [--sizes 1b,8b] [--rounds 5] [--quick] [--profile]

Random Llamas of 1.2 and 8 billion parameters (the shapes of Llama 3.2 1B and Llama 3.1 8B) in bfloat16, on
one GPU: decode steps of 1, 8, 32 and 128 sequences with contexts of 128 and 2,048 tokens, and prompts of 512
and 4,096 tokens. A step of ours is all that a worker does for it, from the driver's message to the tokens on
the host; `eager` is the same with every kernel launched by itself; transformers runs its forward pass with a
cache of its own and takes the likeliest tokens. The limit is the larger of two times: the bytes of weights
and caches at the speed of a copy, and the operations at that of the largest matrix product, both measured
here. Sides take turns; times are medians in ms. First, greedy tokens of both are compared but for near-ties.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from runtime.engine.rank import Rank
from runtime.engine.torch.engine import TorchEngine
from runtime.kv_cache.pool import PagedCache
from runtime.protocol.between_workers import SequenceStart, SequenceStep, Step
from runtime.protocol.message import PROTOCOL_VERSION, Sampling, StageShape
from runtime.protocol.to_workers import Configure

SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
}
KV_HEADS, VOCABULARY, BLOCK = 8, 128256, 16
BATCHES, CONTEXTS, PROMPTS = (1, 8, 32, 128), (128, 2048), (512, 4096)
DEVICE, DTYPE = torch.device("cuda:0"), torch.bfloat16


def main() -> None:
    """Print the tables that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", default="1b,8b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few batches and contexts")
    parser.add_argument("--profile", action="store_true", help="where the time of our steps goes")
    parser.add_argument("--alone", action="store_true", help="without transformers")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    limits = Limits.measured()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    print(f"copy {limits.bytes_s / 1e12:.2f} TB/s, product {limits.flops_s / 1e12:.0f} TFLOP/s", flush=True)
    for name in arguments.sizes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            table(name, Path(folder), arguments, limits)


@dataclass(frozen=True)
class Limits:
    """What the card does at most: bytes/s of a copy, read or written, and FLOP/s of a product."""

    bytes_s: float
    flops_s: float

    @classmethod
    def measured(cls) -> Limits:
        """Of a copy of 4 GiB and a product of 8192 x 8192 x 8192."""
        here = torch.empty(1 << 32, dtype=torch.uint8, device=DEVICE)
        there = torch.empty_like(here)
        a = torch.randn(8192, 8192, device=DEVICE, dtype=DTYPE)
        copy_s = median_s(lambda: there.copy_(here), 10)
        product_s = median_s(lambda: a @ a, 10)
        return cls(2 * here.numel() / copy_s, 2 * 8192**3 / product_s)

    def least_ms(self, size_bytes: float, flops: float) -> float:
        """The least time for so many bytes and operations."""
        return 1e3 * max(size_bytes / self.bytes_s, flops / self.flops_s)


def median_s(run: Callable[[], object], rounds: int) -> float:
    """Seconds until the device has done it, after two unmeasured turns."""
    taken = []
    for _ in range(rounds + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[2:])


def write_checkpoint(name: str, folder: Path) -> None:
    """Random weights, a file for each layer."""
    config = LlamaConfig(
        **SHAPES[name],
        num_key_value_heads=KV_HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=name == "1b",
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    hidden, ffn = config.hidden_size, config.intermediate_size
    kv = KV_HEADS * hidden // config.num_attention_heads
    files: dict[str, dict[str, tuple[int, ...]]] = {
        f"layer-{layer}.safetensors": {
            f"model.layers.{layer}.{part}.weight": shape
            for part, shape in {
                "self_attn.q_proj": (hidden, hidden),
                "self_attn.k_proj": (kv, hidden),
                "self_attn.v_proj": (kv, hidden),
                "self_attn.o_proj": (hidden, hidden),
                "mlp.gate_proj": (ffn, hidden),
                "mlp.up_proj": (ffn, hidden),
                "mlp.down_proj": (hidden, ffn),
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
            }.items()
        }
        for layer in range(config.num_hidden_layers)
    }
    ends = {"model.embed_tokens.weight": (VOCABULARY, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        ends["lm_head.weight"] = (VOCABULARY, hidden)
    files["ends.safetensors"] = ends
    torch.manual_seed(0)
    index = {}
    for file, tensors in files.items():
        made = {}
        for tensor, shape in tensors.items():
            if len(shape) == 1:
                made[tensor] = torch.ones(shape, dtype=DTYPE)
            else:
                made[tensor] = (torch.randn(shape, device=DEVICE) * 0.02).to(DTYPE).cpu()
            index[tensor] = file
        save_file(made, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index, "metadata": {}}))


class Ours:
    """A worker's engine, driven step by step."""

    def __init__(self, folder: Path, tokens: int) -> None:
        layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
        stages = (StageShape(workers=("w/0",), first_layer=0, end_layer=layers),)
        config = Configure(
            protocol=PROTOCOL_VERSION,
            worker="w/0",
            replica="w",
            role="colocated",
            stages=stages,
            checkpoint=str(folder),
            device=str(DEVICE),
            dtype="bfloat16",
            kv_budget_tokens=tokens,
            block_tokens=BLOCK,
            max_batch=max(BATCHES),
            max_prefill_tokens=max(PROMPTS),
            max_mixed_tokens=512,
            steps_in_flight=1,
            reuse_prefixes=False,
            host="127.0.0.1",
            secret="",
            threads=4,
        )
        began = time.perf_counter()
        self.engine = TorchEngine(config, Rank.find(stages, "w/0"))
        self.engine.load()
        print(f"loaded in {time.perf_counter() - began:.1f} s", flush=True)
        assert isinstance(self.engine.cache, PagedCache)
        self.pool, self._number = self.engine.cache.pool, 0

    def step(self, tokens: list[list[int]], position: int, tables: dict[str, list[int]]) -> list[int]:
        """Run tokens of several requests, all from one position on."""
        self._number += 1
        sequences = tuple(
            SequenceStep(request_id=str(n), tokens=tuple(some), position=position, index=0, samples=True)
            for n, some in enumerate(tokens)
        )
        result = self.engine.run(
            Step(step=self._number, starts=(), sequences=sequences), tables, {}, on_layer=None
        )
        assert result is not None
        return list(result.tokens)

    def turns(
        self, tokens: list[list[int]], position: int, tables: dict[str, list[int]]
    ) -> dict[str, Callable[[], object]]:
        """The step as it runs, and with every kernel launched by itself."""
        runner = self.engine._runner
        graphs = runner._graphs

        def eager() -> None:
            runner._graphs = None
            self.step(tokens, position, tables)
            runner._graphs = graphs

        return {"ours": lambda: self.step(tokens, position, tables), "eager": eager}

    def begin(self, count: int) -> None:
        """Have the engine know so many requests."""
        starts = tuple(
            SequenceStart(request_id=str(n), sampling=Sampling(max_tokens=9)) for n in range(count)
        )
        self.engine.begin(Step(step=0, starts=starts, sequences=()))

    def tables(self, count: int, tokens: int) -> dict[str, list[int]]:
        """Scattered blocks for so many requests."""
        each = -(-tokens // BLOCK)
        order = list(range(self.engine.cache.blocks))
        random.Random(0).shuffle(order)
        return {str(n): order[n * each : (n + 1) * each] for n in range(count)}


def table(name: str, folder: Path, arguments: Any, limits: Limits) -> None:
    """All steps of a model."""
    write_checkpoint(name, folder)
    batches = BATCHES[::3] if arguments.quick else BATCHES
    ours = Ours(folder, max(batches) * (max(CONTEXTS) + 2 * BLOCK) + 2 * BLOCK)
    ours.begin(max(batches))
    ours.pool.normal_()
    model = None
    if not arguments.alone:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE, device_map=DEVICE)
        model.eval()
        agree(ours, model)
        ours.pool.normal_()
    shape = SHAPES[name]
    layers, head = shape["num_hidden_layers"], shape["hidden_size"] // shape["num_attention_heads"]
    kv_bytes = 2 * layers * KV_HEADS * head * DTYPE.itemsize
    hidden, ffn = shape["hidden_size"], shape["intermediate_size"]
    per_layer = hidden * (2 * hidden + 2 * KV_HEADS * head + 3 * ffn)
    head_weights = VOCABULARY * hidden
    weights = layers * per_layer + head_weights
    print(f"\n{name}, {weights / 1e9:.2f} billion weights read by a step")
    print(f"{'step, ms':28}{'ours':>9}{'eager':>9}{'transf.':>9}{'limit':>8}{'over it':>9}{'of limit':>9}")
    for batch in batches:
        for context in CONTEXTS:
            tokens, tables = [[17 + n] for n in range(batch)], ours.tables(batch, context)
            turns = ours.turns(tokens, context - 1, tables)
            if model is not None:
                turns["theirs"] = theirs_decode(model, batch, context, layers, head)
            least = limits.least_ms(
                2 * weights + batch * context * kv_bytes,
                2 * weights * batch + 4 * layers * hidden * batch * context,
            )
            report(f"decode {batch} at {context}", turns, arguments, least)
            del turns
            torch.cuda.empty_cache()
    for length in PROMPTS:
        tokens = [[(31 * k) % VOCABULARY for k in range(length)]]
        turns = ours.turns(tokens, 0, ours.tables(1, length))
        if model is not None:
            turns["theirs"] = theirs_prefill(model, tokens)
        flops = 2 * layers * per_layer * length + 2 * head_weights + 2 * layers * hidden * length**2
        report(f"prefill {length}", turns, arguments, limits.least_ms(2 * weights, flops))
    print(f"memory: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at most", flush=True)


def report(name: str, turns: dict[str, Callable[[], object]], arguments: Any, least_ms: float) -> None:
    """One line: both sides in turns."""
    taken: dict[str, list[float]] = {side: [] for side in turns}
    for _ in range(arguments.rounds):
        for side, run in turns.items():
            taken[side].append(1e3 * median_s(run, 5))
    ours = statistics.median(taken["ours"])
    theirs = statistics.median(taken["theirs"]) if "theirs" in taken else float("nan")
    eager = statistics.median(taken["eager"])
    shares = f"{theirs / ours:>9.2f}{least_ms / ours:>9.2f}"
    print(f"{name:28}{ours:>9.2f}{eager:>9.2f}{theirs:>9.2f}{least_ms:>8.2f}{shares}", flush=True)
    if arguments.profile:
        profile(turns["ours"])


def profile(run: Callable[[], object]) -> None:
    """The kernels of a step that take longest, and the share of the time in which the GPU did nothing."""
    run()
    with torch.profiler.profile() as found:
        began = time.perf_counter()
        for _ in range(5):
            run()
        torch.cuda.synchronize()
        whole_us = 1e6 * (time.perf_counter() - began) / 5
    events = [e for e in found.key_averages() if e.self_device_time_total > 0]
    busy_us = sum(e.self_device_time_total for e in events) / 5
    print(f"    busy {busy_us:.0f} of {whole_us:.0f} us")
    for event in sorted(events, key=lambda e: -e.self_device_time_total)[:8]:
        print(f"    {event.self_device_time_total / 5:>9.0f} us {event.count // 5:>5} x {event.key[:80]}")


@torch.inference_mode()
def agree(ours: Ours, model: Any) -> None:
    """Greedy tokens of both, up to where the two likeliest are closer than rounding."""
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (5, 100, 300, 7)]
    tables = ours.tables(1, 512)
    for prompt in prompts:
        found = list(prompt)
        token = ours.step([prompt], 0, tables)[0]
        ties = 0
        for _ in range(24):
            logits = model(torch.tensor([found], device=DEVICE)).logits[0, -1].float()
            best = logits.topk(2)
            gap = float(best.values[0] - logits[token])
            if token != int(best.indices[0]):
                assert gap < 0.15 * float(logits.std()), f"another token, {gap} below the likeliest"
                ties += 1
            found.append(token)
            token = ours.step([[token]], len(found) - 1, tables)[0]
        print(f"prompt of {len(prompt)}: 24 tokens agree, {ties} near-ties", flush=True)


def theirs_decode(model: Any, batch: int, context: int, layers: int, head: int) -> Callable[[], object]:
    """A step of transformers after so many tokens."""
    size = (batch, KV_HEADS, context - 1, head)
    ids = torch.ones((batch, 1), dtype=torch.int64, device=DEVICE)
    cache = DynamicCache()
    for layer in range(layers):
        cache.update(
            torch.randn(size, dtype=DTYPE, device=DEVICE),
            torch.randn(size, dtype=DTYPE, device=DEVICE),
            layer,
        )

    @torch.inference_mode()
    def run() -> list[int]:
        output = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        tokens = output.logits[:, -1].argmax(-1).tolist()
        cache.crop(-1)
        return tokens

    return run


def theirs_prefill(model: Any, tokens: list[list[int]]) -> Callable[[], object]:
    """A prompt."""
    ids = torch.tensor(tokens, device=DEVICE)

    @torch.inference_mode()
    def run() -> list[int]:
        return model(ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1).tolist()

    return run


if __name__ == "__main__":
    main()
