"""Time sums over tensor-parallel ranks of one host: through shared memory and through sockets (gloo).

    python -m benchmarks.engine.exchange_speed [--ranks 2] [--sizes 8,64,512,4096] [--rounds 20]

Each rank is a process with one thread, and multiplies matrices for about a millisecond before each sum, as in
a step, so that ranks come at different times. The two ways take turns. Sizes are in kilobytes of float32.
Prints the median time of a sum on the first rank, waiting included, and the fastest tenth, in microseconds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import torch

from runtime.engine.rank import Rank
from runtime.engine.torch.collectives import Collectives, connect_store, open_store
from runtime.protocol.message import StageShape

HOST, WIDTH, AT_A_TIME = "127.0.0.1", 2048, 20


def joined(rank: int, ranks: int, port: int, shares_memory: bool) -> Collectives:
    """The collectives of a rank, which meets the others at this port."""
    workers, cpu = tuple(map(str, range(ranks))), torch.device("cpu")
    stages = (StageShape(workers=workers, first_layer=0, end_layer=1),)
    collectives = Collectives(Rank.find(stages, workers[rank]), cpu, shares_memory)
    collectives.join(HOST, connect_store(HOST, port, ranks))
    return collectives


def time_sums(
    rank: int, ranks: int, ports: Sequence[int], sizes: Sequence[int], rounds: int
) -> list[list[list[float]]]:
    """Seconds of sums by size, of both ways."""
    torch.set_num_threads(1)
    first = joined(rank, ranks, ports[0], True)
    torch.distributed.destroy_process_group()  # a process is in one at most; this rank needs none any more
    ways = first, joined(rank, ranks, ports[1], False)
    weight, row = torch.randn(WIDTH, WIDTH), torch.randn(1, WIDTH)
    found: list[list[list[float]]] = []
    for size in sizes:
        values = torch.ones(size * 256)
        seconds: list[list[float]] = [[], []]
        for number in range(rounds + 1):
            for way in (0, 1) if number % 2 else (1, 0):
                for _ in range(AT_A_TIME):
                    row @ weight
                    began = time.perf_counter()
                    ways[way].all_reduce(values.fill_(1.0))
                    if number:
                        seconds[way].append(time.perf_counter() - began)
        found.append(seconds)
    return found


def main() -> None:
    """Print a line for each size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default="8,64,512,4096")
    parser.add_argument("--rounds", type=int, default=20, help=f"of {AT_A_TIME} sums of each kind")
    options = parser.parse_args()
    sizes, stores = (
        [int(size) for size in options.sizes.split(",")],
        [open_store(HOST, options.ranks) for _ in "ab"],
    )
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(options.ranks, multiprocessing.get_context("spawn")) as pool:
        asked = options.ranks, [store.port for store in stores], sizes, options.rounds
        ranks = [pool.submit(time_sums, rank, *asked) for rank in range(options.ranks)]
        found, *_ = [rank.result() for rank in ranks]
    print(f"{'kB':>6}{'memory, us':>16}{'sockets, us':>16}{'ratio':>7}")
    for size, ways in zip(sizes, found, strict=True):
        us = [(1e6 * statistics.median(each), 1e6 * sorted(each)[len(each) // 10]) for each in ways]
        cells = "".join(f"{f'{middle:.0f}, {fast:.0f}':>16}" for middle, fast in us)
        print(f"{size:>6}{cells}{us[1][0] / us[0][0]:>7.1f}", flush=True)


if __name__ == "__main__":
    main()
