"""Time sums over tensor-parallel ranks of one host: through shared memory and through sockets (gloo).

    python -m benchmarks.engine.exchange_speed [--ranks 2] [--sizes 8,64,512,4096] [--rounds 20]

Each rank is a process with one thread, and multiplies matrices for about a millisecond before each sum, as in
a step, so that ranks come at different times. The two ways take turns. Sizes are in kilobytes of float32.
Prints the median time of a sum on the first rank, waiting included, and the fastest tenth, in microseconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch

from benchmarks.engine.ranks import compared, joined, on_ranks

WIDTH, AT_A_TIME = 2048, 20


def time_sums(
    rank: int, ranks: int, ports: Sequence[int], sizes: Sequence[int], rounds: int
) -> list[list[list[float]]]:
    """Seconds of sums by size, of both ways."""
    torch.set_num_threads(1)
    first = joined(rank, ranks, ports[0], layers=1)
    torch.distributed.destroy_process_group()  # a process is in one at most; this rank needs none any more
    ways = first, joined(rank, ranks, ports[1], layers=1, shares_memory=False)
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
    sizes = [int(size) for size in options.sizes.split(",")]
    found = on_ranks(options.ranks, time_sums, sizes, options.rounds, meetings=2)
    print(f"{'kB':>6}{'memory, us':>16}{'sockets, us':>16}{'ratio':>7}")
    for size, ways in zip(sizes, found, strict=True):
        print(f"{size:>6}{compared(ways, 1e6, 16, 0)}", flush=True)


if __name__ == "__main__":
    main()
