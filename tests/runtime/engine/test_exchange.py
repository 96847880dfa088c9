"""Sums over ranks through shared memory, with ranks in threads and in processes."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import TypeVar

import pytest
import torch

from runtime import native

if not native.serves(torch.float32, torch.device("cpu")):
    assert shutil.which("g++") is None, "installed without compiled kernels, which g++ can build"
    pytest.skip("neither compiled kernels nor a compiler", allow_module_level=True)

PIECE = 128 * 1024
Found = TypeVar("Found")


def on_ranks(ranks: int, run: Callable[[native.Exchange, int], Found]) -> list[Found]:
    """What run(exchange, rank) returns on each of so many ranks, in threads."""
    descriptor, handle = native.memory_for(ranks)
    exchanges = [native.Exchange(handle, rank, ranks, 60) for rank in range(ranks)]
    os.close(descriptor)
    with ThreadPoolExecutor(ranks) as threads:
        found = list(threads.map(run, exchanges, range(ranks)))
    for exchange in exchanges:
        exchange.close()
    return found


@pytest.mark.parametrize("seed", range(6))
def test_all_ranks_get_the_same_sums_and_the_first_all_columns(seed: int) -> None:
    """Sums and gathers of any size by turns, while ranks are late by turns."""
    rng = random.Random(seed)
    ranks = rng.choice((2, 3, 4))
    sizes = (1, 7, 500, PIECE // 4, PIECE // 4 + 1, 3 * PIECE // 4 + 11)
    made = torch.Generator().manual_seed(seed)
    calls = [(rng.random() < 0.7, rng.choice((torch.float32, torch.bfloat16))) for _ in range(40)]
    values = [
        torch.randn(ranks, 2 if sums else rng.choice((1, 3)), rng.choice(sizes), generator=made).to(dtype)
        for sums, dtype in calls
    ]

    def run(exchange: native.Exchange, rank: int) -> list[torch.Tensor | None]:
        late, found = random.Random(rank), list[torch.Tensor | None]()
        for (sums, _), each in zip(calls, values, strict=True):
            if late.random() < 0.1:
                time.sleep(late.random() * 4e-3)
            own = each[rank].clone()
            found.append(exchange.sum(own) if sums else exchange.gather(own))
        return found

    for rank, found in enumerate(on_ranks(ranks, run)):
        for (sums, dtype), each, got in zip(calls, values, found, strict=True):
            if sums:
                total = each[0].float()
                for part in each[1:]:
                    total = total + part.float()
                assert torch.equal(got, total.to(dtype))
            else:
                assert got is None if rank else torch.equal(got, torch.cat(list(each), dim=1))


def test_recorded_exchanges_are_repeated() -> None:
    parts = torch.rand(2, 3, 64)

    def run(exchange: native.Exchange, rank: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, weight = parts[rank].clone(), torch.ones(64)
        with native.Recording(native.Arena()) as recording:
            added = exchange.sum(native.rms_norm(x, weight, 0.0))
            columns = exchange.gather(added)
        replay = recording.replay()
        x.copy_(parts[1 - rank])
        replay()
        exchange.check()
        return added, columns

    (first, columns), (second, nothing) = on_ranks(2, run)
    expected = sum(native.rms_norm(part, torch.ones(64), 0.0) for part in parts)
    assert torch.equal(first, expected) and torch.equal(second, expected)
    assert columns is not None and nothing is None
    assert torch.equal(columns, torch.cat([expected, expected], dim=1))


def take_part(handle: str, connection: Connection) -> None:
    """A rank of another process, which exchanges once and then waits to be told to go on."""
    exchange = native.Exchange(handle, 1, 2, 60)
    connection.send(True)
    exchange.sum(torch.ones(5))
    connection.recv()


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_a_lost_rank_is_noticed(ending: int) -> None:
    """Not by a limit of time: that is a minute."""
    descriptor, handle = native.memory_for(2)
    exchange = native.Exchange(handle, 0, 2, 60)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    other = context.Process(target=take_part, args=(handle, theirs))
    other.start()
    assert ours.recv()
    assert exchange.sum(torch.ones(5)).tolist() == [2.0] * 5
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(exchange.sum, torch.ones(5))
        time.sleep(0.1)
        assert not waits.done()
        assert other.pid is not None
        os.kill(other.pid, ending)
        with pytest.raises(RuntimeError, match="rank 1 is lost"):
            waits.result(timeout=30)
    with pytest.raises(RuntimeError, match="rank 1 is lost"):
        exchange.gather(torch.ones(1, 5))
    other.join()
    exchange.close()
    os.close(descriptor)


def test_a_rank_that_does_not_go_on_is_not_waited_for_longer_than_the_limit() -> None:
    descriptor, handle = native.memory_for(2)
    exchange, idle = native.Exchange(handle, 0, 2, 1), native.Exchange(handle, 1, 2, 1)
    with pytest.raises(RuntimeError, match="does not go on"):
        exchange.sum(torch.ones(5))
    exchange.close()
    idle.close()
    os.close(descriptor)


def test_memory_of_another_size_or_rank_is_refused() -> None:
    descriptor, handle = native.memory_for(2)
    with pytest.raises(OSError, match="bytes"):
        native.Exchange(handle, 0, 3, 1)
    exchange = native.Exchange(handle, 1, 2, 1)
    with pytest.raises(OSError, match="already"):
        native.Exchange(handle, 1, 2, 1)
    exchange.close()
    native.Exchange(handle, 1, 2, 1).close()
    os.close(descriptor)
    with pytest.raises(OSError):
        native.Exchange(handle, 0, 2, 1)
