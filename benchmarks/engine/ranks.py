"""Tensor-parallel ranks on this machine, each in a process of its own, for the benchmarks of the engine."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from runtime.engine.rank import Rank
from runtime.engine.torch.collectives import Collectives, connect_store, open_store
from runtime.protocol.message import StageShape

_HOST = "127.0.0.1"


def joined(rank: int, ranks: int, port: int, layers: int, shares_memory: bool = True) -> Collectives:
    """The collectives of a rank of one stage of so many layers, which meets the others at this port."""
    workers, cpu = tuple(map(str, range(ranks))), torch.device("cpu")
    stages = (StageShape(workers=workers, first_layer=0, end_layer=layers),)
    collectives = Collectives(Rank.find(stages, workers[rank]), cpu, shares_memory)
    if ranks > 1:
        collectives.join(_HOST, connect_store(_HOST, port, ranks))
    return collectives


def on_ranks(ranks: int, run: Callable[..., Any], *arguments: Any, meetings: int = 1) -> Any:
    """What run(rank, ranks, ports, *arguments) returns on the first of so many ranks, which run at the same
    time. There is a port for each time that they meet."""
    stores = [open_store(_HOST, ranks) for _ in range(meetings)]
    ports = [store.port for store in stores]
    with ProcessPoolExecutor(ranks, multiprocessing.get_context("spawn")) as pool:
        every = [pool.submit(run, rank, ranks, ports, *arguments) for rank in range(ranks)]
        first, *_ = [each.result() for each in every]
    return first


def compared(sides: Sequence[Sequence[float]], per_second: float, width: int, digits: int) -> str:
    """Cells with the median and the fastest tenth of each side's seconds, and how much longer the second
    takes."""
    found = [
        (per_second * statistics.median(each), per_second * sorted(each)[len(each) // 10]) for each in sides
    ]
    cells = "".join(f"{f'{middle:.{digits}f}, {fast:.{digits}f}':>{width}}" for middle, fast in found)
    return f"{cells}{found[1][0] / found[0][0]:>7.{2 if digits else 1}f}"
