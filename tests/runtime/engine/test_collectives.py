"""What ranks exchange, in processes that join as workers do: through memory, or through sockets where one of
them can't open it."""

from __future__ import annotations

import multiprocessing
import shutil
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from runtime import native
from runtime.engine.rank import Rank
from runtime.engine.torch.collectives import Collectives, connect_store, open_store
from runtime.protocol.message import StageShape

if not native.serves(torch.float32, torch.device("cpu")):
    assert shutil.which("g++") is None, "installed without compiled kernels, which g++ can build"
    pytest.skip("neither compiled kernels nor a compiler", allow_module_level=True)

HOST, RANKS = "127.0.0.1", 2
STAGES = (StageShape(workers=("w/0", "w/1"), first_layer=0, end_layer=1),)


def refused(*_: object) -> native.Exchange:
    raise PermissionError("not this process")


def take_part(rank: int, port: int, refuses: bool) -> tuple[bool, list[list[float] | None]]:
    """Whether a rank shares memory, and what it finds."""
    if refuses:
        native.Exchange = refused
    collectives = Collectives(Rank.find(STAGES, f"w/{rank}"), torch.device("cpu"))
    collectives.join(HOST, connect_store(HOST, port, RANKS))
    found = list[list[float] | None]()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        own = torch.arange(6, dtype=dtype).view(2, 3) + 10 * rank
        gathered = collectives.gather_columns(own)
        found.append(None if gathered is None else gathered.flatten().tolist())
        found.append(collectives.broadcast(own + 1).flatten().tolist())
        found.append(collectives.all_reduce(own).flatten().tolist())
        strided = (torch.arange(6, dtype=dtype) + rank).view(2, 3).T
        found.append(collectives.all_reduce(strided).flatten().tolist())
    return collectives._exchange is not None, found


@pytest.mark.parametrize("refusing", [None, 0, 1])
def test_ranks_exchange_the_same_by_memory_and_by_sockets(refusing: int | None) -> None:
    """Float16 and what is not contiguous go through sockets in any case."""
    store = open_store(HOST, RANKS)
    with ProcessPoolExecutor(RANKS, multiprocessing.get_context("spawn")) as pool:
        runs = [pool.submit(take_part, rank, store.port, rank == refusing) for rank in range(RANKS)]
        (shares, first), (also_shares, second) = [run.result(timeout=100) for run in runs]
    assert shares == also_shares == (refusing is None)
    whole = [
        [0.0, 1.0, 2.0, 10.0, 11.0, 12.0, 3.0, 4.0, 5.0, 13.0, 14.0, 15.0],
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        [10.0, 12.0, 14.0, 16.0, 18.0, 20.0],
        [1.0, 7.0, 3.0, 9.0, 5.0, 11.0],
    ]
    assert first == 3 * whole
    assert second == 3 * [None, *whole[1:]]
