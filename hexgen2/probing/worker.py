"""The process of one device in a probe: measures the device, then links and all-reduces with the others."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from hexgen2.probing.figures import AllReduceFigures, DeviceFigures, LinkFigures

SMALL_BYTES = 4096
SWEEP_BYTES = (SMALL_BYTES, 65536, 1 << 20, 16 << 20)
_TIMEOUT = timedelta(seconds=60)
_PRODUCT = {"cpu": 1024, "cuda": 8192}
_READ_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
_REPEATS = 5
_SMALL_REPEATS = 20


def probe_device(
    rank: int, world: int, kind: str, memory_bytes: float, meeting: str, out: Connection
) -> None:
    """Body of the process: sends the figures of its device, of the links and of the all-reduces to `out`."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        backend = "nccl" if kind == "cuda" else "gloo"
        where = Path(meeting).as_uri()
        dist.init_process_group(backend, init_method=where, rank=rank, world_size=world, timeout=_TIMEOUT)
        dist.barrier()
    figures = _device(device, kind, memory_bytes)
    links: list[LinkFigures] = []
    reduces: list[AllReduceFigures] = []
    if world > 1:
        dist.barrier()
        links = [_link(a, b, rank, device) for a in range(world) for b in range(a + 1, world)]
        for size in sorted({2, min(4, world), world}):
            group = dist.new_group(list(range(size)))
            if rank < size:
                reduces += [_all_reduce(size, count, device, group) for count in SWEEP_BYTES]
            dist.barrier()
        dist.destroy_process_group()
    out.send((figures, links, reduces))
    out.close()


def median_s(run: Callable[[], object], device: torch.device, repeats: int = _REPEATS) -> float:
    """Median seconds of a call, after one warm-up call."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def _device(device: torch.device, kind: str, memory_bytes: float) -> DeviceFigures:
    """Peak rates of a matrix product (2 n^3 operations) and of a sum, which is limited by memory reads."""
    n, dtype = _PRODUCT[kind], torch.bfloat16 if kind == "cuda" else torch.float32
    if kind == "cuda" and torch.cuda.get_device_capability(device)[0] < 8:
        dtype = torch.float16
    a, b = torch.rand(n, n, device=device).to(dtype), torch.rand(n, n, device=device).to(dtype)
    product_s = median_s(lambda: a @ b, device)
    array = torch.ones(_READ_BYTES[kind] // 4, device=device)
    read_s = median_s(lambda: array.sum(), device)
    name = torch.cuda.get_device_name(device) if kind == "cuda" else "CPU"
    return DeviceFigures(
        name=name,
        memory_bytes=torch.cuda.mem_get_info(device)[1] if kind == "cuda" else memory_bytes,
        flops_s=2 * n**3 / product_s,
        read_bytes_s=_READ_BYTES[kind] / read_s,
        dtype=str(dtype).removeprefix("torch."),
    )


def _link(first: int, second: int, rank: int, device: torch.device) -> LinkFigures:
    """Half the round-trip times of a small and a large message; the result is broadcast to every rank."""
    seconds = torch.zeros(2, device=device)
    if rank in (first, second):
        other = second if rank == first else first
        for k, count in enumerate((SMALL_BYTES, SWEEP_BYTES[-1])):
            message = torch.ones(count // 4, device=device)

            def there_and_back(message: torch.Tensor = message) -> None:
                for sends in (rank == first, rank == second):
                    if sends:
                        dist.send(message, other)
                    else:
                        dist.recv(message, other)

            repeats = _SMALL_REPEATS if count == SMALL_BYTES else _REPEATS
            seconds[k] = median_s(there_and_back, device, repeats) / 2
    dist.broadcast(seconds, first)
    latency_s, large_s = seconds.tolist()
    bandwidth = SWEEP_BYTES[-1] / max(large_s - latency_s, large_s / 10)
    return LinkFigures(first, second, bandwidth, latency_s)


def _all_reduce(
    size: int, count: int, device: torch.device, group: dist.ProcessGroup | None
) -> AllReduceFigures:
    message = torch.ones(count // 4, device=device)

    def reduce() -> None:
        dist.all_reduce(message, group=group)
        message.fill_(1.0)

    return AllReduceFigures(size, count, median_s(reduce, device))
