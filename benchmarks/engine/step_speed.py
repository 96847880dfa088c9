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
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from benchmarks.engine.quantised_speed import NAMES, dtype_of, make_models
from runtime import native
from runtime.engine.rank import Rank
from runtime.engine.torch.collectives import Collectives, connect_store, open_store
from runtime.engine.torch.models import load_stage
from runtime.engine.torch.models.base import DecoderStage
from runtime.engine.torch.runner import StageRunner
from runtime.kv_cache.pool import PagedCache
from runtime.protocol.between_workers import SequenceStart, SequenceStep, Step
from runtime.protocol.message import Sampling, StageShape

BLOCK, CONTEXT, AT_A_TIME = 16, 128, 20
HOST = "127.0.0.1"


def loaded(folder: Path, dtype: str, tp: int, rank: int, port: int) -> DecoderStage:
    """A rank's part of all layers of a checkpoint; it meets the others at this port."""
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    workers, cpu = tuple(f"rank-{number}" for number in range(tp)), torch.device("cpu")
    stages = (StageShape(workers=workers, first_layer=0, end_layer=layers),)
    collectives = Collectives(Rank.find(stages, workers[rank]), cpu)
    if tp > 1:
        collectives.join(HOST, connect_store(HOST, port, tp))
    return load_stage(str(folder), dtype, cpu, collectives)


def run_rank(
    folder: Path, dtype: str, batches: Sequence[int], rounds: int, threads: int, *place: int
) -> list[list[list[float]]]:
    """What `compare` finds for each batch, on a rank; for its place, see `loaded`."""
    torch.set_num_threads(threads)
    stage = loaded(folder, dtype, *place)
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
            asked = folder, dtype, batches, options.rounds + 1, options.threads, options.tp
            store = open_store(HOST, options.tp)
            with ProcessPoolExecutor(options.tp, multiprocessing.get_context("spawn")) as pool:
                ranks = [pool.submit(run_rank, *asked, rank, store.port) for rank in range(options.tp)]
                found, *_ = [rank.result() for rank in ranks]
            for batch, sides in zip(batches, found, strict=True):
                ms = [(1e3 * statistics.median(s), 1e3 * sorted(s)[len(s) // 10]) for s in sides]
                cells = "".join(f"{f'{middle:.2f}, {fast:.2f}':>18}" for middle, fast in ms)
                print(f"{name:<20}{batch:>6}{cells}{ms[1][0] / ms[0][0]:>7.2f}", flush=True)


if __name__ == "__main__":
    main()
