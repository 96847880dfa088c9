"""Time how long a worker of the torch engine takes to load its weights, and measure its peak memory.

    python -m benchmarks.engine.engine_start                       a random Llama of about 1 GB, in bfloat16
    python -m benchmarks.engine.engine_start --cold                read from the disk
    python -m benchmarks.engine.engine_start --model-path FOLDER
    python -m benchmarks.engine.engine_start --launch              also `hexgen2 launch` until the first token

Compares the peak with the bytes that the rank holds, for a single rank, one of two that divide columns (tp)
and one of two that divide layers (pp), beside transformers' from_pretrained; and the seconds with those of
plainly reading all files, into a small buffer and into new memory. The sides take turns. Each load has its
own process. Its peak (VmHWM) is counted from the memory of the process after all imports. Without --cold, the
files are in the page cache: the seconds are those of copying and packing, not of a disk. The second copy of a
tied head counts only in the peak. --launch starts a server of one worker on all cores, and stops the clock
when a client has the first token; its peak is that of the whole worker process.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
import torch
from safetensors.torch import save_file

from benchmarks.serving.fleet import EXAMPLES, launched, make_placement
from cost_model.config import architecture_from_folder
from runtime.engine.rank import Rank
from runtime.engine.torch.collectives import Collectives
from runtime.engine.torch.loader import DTYPES
from runtime.engine.torch.models import load_stage
from runtime.protocol.message import StageShape

HEAD_DIM = 128
_BUFFER_BYTES = 4 << 20


@dataclass(frozen=True)
class Start:
    """One load: seconds, bytes that stay, and the peak above the memory at the start."""

    seconds: float
    held_bytes: int
    peak_bytes: int


def write_llama(folder: Path, *, hidden: int, ffn: int, layers: int, vocab: int, dtype: str) -> None:
    """Write a random Llama with four query heads per KV head, one shard per layer, and a tokenizer."""
    sys.path.append(str(EXAMPLES))
    from make_checkpoint import train_tokenizer

    train_tokenizer().save_pretrained(folder)
    kv_width = hidden // 4
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD_DIM,
        "num_key_value_heads": kv_width // HEAD_DIM,
        "head_dim": HEAD_DIM,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "dtype": dtype,
    }
    edges = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden), "model.norm": (hidden,)}
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv_width, hidden),
        "self_attn.v_proj": (kv_width, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    shards = [edges, *({f"model.layers.{n}.{name}": layer[name] for name in layer} for n in range(layers))]
    files = {}
    for number, shapes in enumerate(shards):
        file = f"model-{number:05}.safetensors"
        tensors = {f"{name}.weight": torch.randn(shape).to(DTYPES[dtype]) for name, shape in shapes.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(tensors, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "config.json").write_text(json.dumps(config))


def start_engine(folder: str, dtype: str, degree: int, stages: int = 1) -> Start:
    """Load the last rank of the last stage."""
    layers = json.loads(Path(folder, "config.json").read_text())["num_hidden_layers"]
    ends = [layers * number // stages for number in range(stages + 1)]
    shapes = tuple(
        StageShape(
            workers=tuple(f"worker-{first}-{rank}" for rank in range(degree)),
            first_layer=first,
            end_layer=end,
        )
        for first, end in pairwise(ends)
    )
    rank, cpu = Rank(shapes, stages - 1, degree - 1), torch.device("cpu")
    torch.set_num_threads(1)
    before, began = _memory_bytes("VmRSS"), time.perf_counter()
    stage = load_stage(folder, dtype, cpu, Collectives(rank, cpu))
    seconds = time.perf_counter() - began
    return Start(seconds, stage.checkpoint.bytes_read, _memory_bytes("VmHWM") - before)


def launch(folder: str, dtype: str) -> Start:
    """Start `hexgen2 launch` and wait for a token."""
    held = architecture_from_folder(Path(folder)).total_bytes
    with tempfile.TemporaryDirectory() as work:
        room_gib = 2 * held / 2**30 + 2
        placement = make_placement(Path(work), Path(folder), True, isl=16, osl=4, memory_gib=room_gib)
        began = time.perf_counter()
        with launched(placement, Path(folder), "--dtype", dtype) as (url, server):
            model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
            asked = {"model": model, "prompt": [1, 2, 3], "max_tokens": 1}
            httpx.post(f"{url}/v1/completions", json=asked, timeout=60).raise_for_status()
            seconds = time.perf_counter() - began
            peak = max(_memory_bytes("VmHWM", child) for child in server.children(recursive=True))
    return Start(seconds, round(held), peak)


def read_plainly(folder: str, anew: bool) -> Start:
    """Read all files, into a buffer of 4 MB, or each byte into new memory."""
    files = sorted(Path(folder).glob("*.safetensors"))
    total = sum(path.stat().st_size for path in files)
    began = time.perf_counter()
    size = total if anew else _BUFFER_BYTES
    buffer = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    done = 0
    for path in files:
        with path.open("rb", buffering=0) as file:
            start = done if anew else 0
            while count := file.readinto(buffer[start : start + _BUFFER_BYTES]):  # type: ignore[attr-defined]
                done += count
                start = done if anew else 0
    return Start(time.perf_counter() - began, done, size)


def forget(folder: str) -> None:
    """Drop a checkpoint's files from the page cache."""
    for path in Path(folder).glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def start_transformers(folder: str, dtype: str) -> Start:
    """Load the whole model as transformers does."""
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401  (so that imports are not timed)

    before, began = _memory_bytes("VmRSS"), time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES.get(dtype, "auto"))
    held = 0
    for parameter in model.parameters():
        held += parameter.nbytes
        parameter.data.sum()  # reads weights into memory that were only mapped so far
    return Start(time.perf_counter() - began, held, _memory_bytes("VmHWM") - before)


def _memory_bytes(field: str, process: psutil.Process | None = None) -> int:
    """A field of a process's status (None: this one's): VmRSS is its memory now, VmHWM its peak so far."""
    number = "self" if process is None else process.pid
    lines = Path(f"/proc/{number}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", help="folder of a checkpoint to load instead of a random one")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--stored", choices=DTYPES, help="type of the random one's weights; default: --dtype")
    parser.add_argument("--hidden", type=int, default=2048, help=f"a multiple of {4 * HEAD_DIM}")
    parser.add_argument("--ffn", type=int, default=5632)
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--cold", action="store_true", help="drop the files from the page cache before each load"
    )
    parser.add_argument("--only", nargs="*", default=[""], help="only loads whose names begin so")
    parser.add_argument("--launch", action="store_true", help="also launch a server")
    args = parser.parse_args()
    if args.hidden % (4 * HEAD_DIM):
        parser.error(f"--hidden: {args.hidden} is not a multiple of {4 * HEAD_DIM}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.model_path or temporary
        if not args.model_path:
            sizes = {"hidden": args.hidden, "ffn": args.ffn, "layers": args.layers, "vocab": args.vocab}
            write_llama(Path(folder), **sizes, dtype=args.stored or args.dtype)
        print(f"{'':<23}{'seconds':>9}{'held MB':>9}{'peak MB':>9}{'peak / held':>13}")
        every: dict[str, Callable[[str, str], Start]] = {
            "engine, tp 1": partial(start_engine, degree=1),
            "engine, rank of tp 2": partial(start_engine, degree=2),
            "engine, stage of pp 2": partial(start_engine, degree=1, stages=2),
            "transformers": start_transformers,
        }
        loads = {name: load for name, load in every.items() if name.startswith(tuple(args.only))}
        readings = {
            "reading": partial(read_plainly, folder, anew=False),
            "reading to new memory": partial(read_plainly, folder, anew=True),
        }
        if args.launch:
            readings["launch to first token"] = partial(launch, folder, args.dtype)
        taken: dict[str, list[Start]] = {name: [] for name in (*loads, *readings)}
        for _ in range(args.repeats):
            for name, start in loads.items():
                if args.cold:
                    forget(folder)
                context = multiprocessing.get_context("spawn")
                with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
                    taken[name].append(pool.submit(start, folder, args.dtype).result())
            for name, read in readings.items():
                if args.cold:
                    forget(folder)
                taken[name].append(read())
        for name, starts in taken.items():
            seconds = statistics.median(one.seconds for one in starts)
            held, peak = starts[0].held_bytes / 1e6, max(one.peak_bytes for one in starts) / 1e6
            print(f"{name:<23}{seconds:>9.2f}{held:>9.0f}{peak:>9.0f}{peak / held:>13.2f}", flush=True)


if __name__ == "__main__":
    main()
