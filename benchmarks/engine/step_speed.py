"""Time decode steps of a worker or of tensor-parallel ranks, replayed and run kernel by kernel, by turns.

    python -m benchmarks.engine.step_speed [--formats float32 int4 ...] [--layers 4] [--batches 1,8,32]
    python -m benchmarks.engine.step_speed --tp 2 --threads 1
    python -m benchmarks.engine.step_speed --model-path FOLDER [--dtype bfloat16]

A random Llama of 0.2 billion parameters (hidden 2048, --layers layers) in several formats, or a checkpoint. A
step is all that the engine does for it, from the driver's message to the tokens, without the messages. Each
request begins with 128 tokens of context. Prints the median of all steps, and the fastest tenth, which other
programs disturb least, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.engine.quantised_speed import NAMES, dtype_of, make_models
from benchmarks.engine.ranks import compared, joined, on_ranks
from runtime import native
from runtime.engine.torch.models import load_stage
from runtime.engine.torch.models.base import DecoderStage
from runtime.engine.torch.runner import StageRunner
from runtime.kv_cache.pool import PagedCache
from runtime.protocol.between_workers import SequenceStart, SequenceStep, Step
from runtime.protocol.message import Sampling

BLOCK, CONTEXT, AT_A_TIME = 16, 128, 20


def run_rank(
    rank: int,
    ranks: int,
    ports: Sequence[int],
    folder: Path,
    dtype: str,
    batches: Sequence[int],
    rounds: int,
    threads: int,
) -> list[list[list[float]]]:
    """What `compare` finds for each batch, on a rank."""
    torch.set_num_threads(threads)
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    stage = load_stage(str(folder), dtype, torch.device("cpu"), joined(rank, ranks, ports[0], layers))
    native.use_large_pages()
    return [compare(stage, batch, rounds) for batch in batches]


def compare(stage: DecoderStage, batch: int, rounds: int) -> list[list[float]]:
    """Seconds of steps of so many requests: replayed, and kernel by kernel."""
    blocks = -(-(CONTEXT + rounds * AT_A_TIME + 1) // BLOCK)
    cache, names = PagedCache(stage.cache_shape, blocks * batch, BLOCK), [str(n) for n in range(batch)]
    runners = [StageRunner(stage, cache, replays=replays) for replays in (True, False)]
    tables = {name: list(range(n * blocks, (n + 1) * blocks)) for n, name in enumerate(names)}
    starts = tuple(SequenceStart(request_id=name, sampling=Sampling(ignore_eos=True)) for name in names)
    for runner in runners:
        runner.begin(Step(step=0, starts=starts, sequences=()))
    found: list[list[float]] = [[], []]
    for number in range(rounds):
        for side in (0, 1) if number % 2 else (1, 0):
            for position in range(CONTEXT + number * AT_A_TIME, CONTEXT + (number + 1) * AT_A_TIME):
                sequences = tuple(
                    SequenceStep(
                        request_id=name, tokens=(position,), position=position, index=0, samples=True
                    )
                    for name in names
                )
                began = time.perf_counter()
                runners[side].run(Step(step=1, starts=(), sequences=sequences), tables, {}, None)
                if number:  # the first ones record, and meet cold caches
                    found[side].append(time.perf_counter() - began)
    return found


def main() -> None:
    """Print a line for each format and batch."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--formats", nargs="*", choices=NAMES, default=["float32", "bfloat16", "W8A8", "int4"]
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--model-path", type=Path, help="a checkpoint instead of the random ones")
    parser.add_argument("--dtype", default="bfloat16", help="what all but float32 compute in")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument(
        "--rounds", type=int, default=10, help=f"of {AT_A_TIME} steps of each kind, and one before"
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each rank")
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batches.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        if options.model_path:
            folders = {options.model_path.name: options.model_path}
        else:
            folders = make_models(Path(temporary), options.layers, options.formats)
        print(f"{'':<20}{'batch':>6}{'replayed, ms':>18}{'by kernels, ms':>18}{'ratio':>7}")
        for name, folder in folders.items():
            dtype = options.dtype if options.model_path else dtype_of(name, options)
            asked = folder, dtype, batches, options.rounds + 1, options.threads
            found = on_ranks(options.tp, run_rank, *asked)
            for batch, sides in zip(batches, found, strict=True):
                print(f"{name:<20}{batch:>6}{compared(sides, 1e3, 18, 2)}", flush=True)


if __name__ == "__main__":
    main()
