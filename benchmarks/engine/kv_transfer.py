"""Time how fast KV caches move between two processes of this machine, and what changing their layout costs.

    python -m benchmarks.engine.kv_transfer [rates] [shapes] [overlap] [gpu] [--rounds N]

`rates` compares each transport with moving the same bytes without a KV cache: a socket's sendall and
recv_into, or a copy between two shared mappings. `shapes` compares replicas of different shapes with replicas
of the same shape, moving the same total bytes. `overlap` measures how much of a transfer a prefill hides by
sending one layer after another; its layers are matrix products on the same cores. Everything uses bfloat16, 8
heads of 128, and blocks of 16 tokens. The sides of a comparison take turns, after one unmeasured turn each;
figures are medians. `gpu` has both pools on one GPU, and compares with a copy from one tensor to another
there; it runs only if asked for.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import multiprocessing
import os
import queue
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any

import numpy as np
import torch

from runtime.kv_cache.layout import KvTransfer, held, outgoing
from runtime.kv_cache.pool import CacheShape
from runtime.kv_transfer import KvReceiver, KvSender
from runtime.kv_transfer.memory import shared_cache
from runtime.protocol import handshake
from runtime.protocol.framing import listen
from runtime.protocol.message import StageShape
from runtime.protocol.to_workers import KvLink

HOST, BLOCK_TOKENS, HEADS, HEAD_DIM, LAYERS = "127.0.0.1", 16, 8, 128, 8
DTYPE = torch.bfloat16
KB, MB = 1024, 1024 * 1024
Stages = tuple[StageShape, ...]


def main() -> None:
    """Run the parts that the command line asks for."""
    parts: dict[str, Callable[[int], None]] = {"rates": rates, "shapes": shapes, "overlap": overlap}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join([*parts, "gpu"]))
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = arguments.parts or list(parts)
    for name in chosen:
        (parts | {"gpu": gpu})[name](arguments.rounds)


def stages(name: str, shape: Sequence[tuple[int, int, int]]) -> Stages:
    """Stages of (tensor-parallel degree, first layer, end layer)."""
    return tuple(
        StageShape(
            workers=tuple(f"{name}/{number}.{rank}" for rank in range(degree)),
            first_layer=first,
            end_layer=end,
        )
        for number, (degree, first, end) in enumerate(shape)
    )


def workers(replica: Stages) -> list[str]:
    """All workers of the stages."""
    return [worker for stage in replica for worker in stage.workers]


@dataclass(frozen=True)
class Setting:
    """Two replicas, with one process each for all of their workers, and a request."""

    source: Stages
    destination: Stages
    kv_heads: int
    tokens: int
    scattered: bool = True
    device: str = "cpu"

    def cache(self, replica: Stages, worker: str) -> Any:
        """A worker's pool, four times the size of the request, with all of its pages touched."""
        part = held(replica, worker, self.kv_heads)
        shape = CacheShape(part, HEAD_DIM, DTYPE, torch.device(self.device))
        cache, shared = shared_cache(shape, 4 * self.blocks, BLOCK_TOKENS)
        cache.pool.fill_(1)
        return cache, shared

    @property
    def blocks(self) -> int:
        """How many blocks the request needs."""
        return -(-self.tokens // BLOCK_TOKENS)

    def table(self, seed: int) -> list[int]:
        """The blocks of the request: scattered, or contiguous."""
        if not self.scattered:
            return list(range(seed, seed + self.blocks))
        order = np.random.default_rng(seed).permutation(4 * self.blocks)
        return [int(block) for block in order[: self.blocks]]

    @property
    def total_bytes(self) -> int:
        """The bytes that all workers of the destination receive."""
        cells = sum(
            held(self.destination, worker, self.kv_heads).cells for worker in workers(self.destination)
        )
        return cells * self.tokens * 2 * HEAD_DIM * DTYPE.itemsize


def serve(pipe: Pipe, setting: Setting) -> None:
    """The receiving process: KV receivers and the bare transports."""
    torch.set_num_threads(1)
    landed: queue.SimpleQueue[float] = queue.SimpleQueue()
    receivers, addresses = [], {}
    for worker in workers(setting.destination):
        cache, _ = setting.cache(setting.destination, worker)
        receiver = KvReceiver(worker, cache, lambda _: landed.put(time.perf_counter()), print)
        receivers.append(receiver)
        addresses[worker] = _accept_all(receiver)
    bare = listen(HOST)
    pipe.send((addresses, bare.getsockname()[1]))
    stream, _ = bare.accept()
    table = setting.table(1)
    flat = memoryview(bytearray(setting.total_bytes))
    into = np.frombuffer(mmap.mmap(-1, setting.total_bytes), np.uint8)
    into[:] = 0
    while True:
        match pipe.recv():
            case "expect":
                for receiver in receivers:
                    receiver.expect("r", table, 0, setting.tokens)
                pipe.send(None)
            case "landed":
                pipe.send(max(landed.get() for _ in receivers))
            case "tcp":
                left = flat
                while left:
                    left = left[stream.recv_into(left) :]
                stream.sendall(b"x")
            case ("shm", path):
                descriptor = os.open(path, os.O_RDONLY)
                source = np.frombuffer(
                    mmap.mmap(descriptor, setting.total_bytes, prot=mmap.PROT_READ), np.uint8
                )
                os.close(descriptor)
                int(source[:: mmap.PAGESIZE].sum())
                pipe.send(None)
                while stream.recv(1) == b"c":
                    np.copyto(into, source)
                    stream.sendall(b"x")


def _accept_all(receiver: KvReceiver) -> tuple[str, int]:
    listener = listen(HOST)

    def accept() -> None:
        while True:
            accepted = handshake.accept(listener.accept()[0], "")
            assert accepted is not None
            threading.Thread(
                target=receiver.serve, args=(accepted[0], accepted[1].worker), daemon=True
            ).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener.getsockname()


class Sides:
    """The two sides as the sending process sees them."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=serve, args=(theirs, setting), daemon=True)
        self.process.start()
        self.addresses, port = self.pipe.recv()
        self.stream = socket.create_connection((HOST, port))
        self.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.caches = {worker: setting.cache(setting.source, worker) for worker in workers(setting.source)}
        self.table = setting.table(0)
        self.data = torch.ones(setting.total_bytes, dtype=torch.uint8)
        self._open: list[KvSender] = []

    def __enter__(self) -> Sides:
        return self

    def __exit__(self, *exception: object) -> None:
        for sender in self._open:
            sender.close()
        self.process.kill()
        self.process.join()

    def move(self, transport: str, links: Sequence[KvLink] = ()) -> Callable[[], float]:
        """A function that moves the request once and returns the seconds."""
        layer_by_layer = self.layers(transport, links)
        return lambda: layer_by_layer(lambda layer: None)[1]

    def layers(
        self, transport: str, links: Sequence[KvLink] = ()
    ) -> Callable[[Callable[[int], None]], tuple[float, float]]:
        """A function that computes layers and sends each one; it returns the seconds until all are computed,
        and until all have arrived."""
        setting, sent = self.setting, queue.SimpleQueue[str]()
        senders, plans = dict[str, KvSender](), dict[str, tuple[KvTransfer, ...]]()
        for worker, (cache, shared) in self.caches.items():
            own = handshake.Credentials(worker, "kv", secret="")
            senders[worker] = KvSender(
                own,
                cache,
                self.addresses,
                sent.put,
                print,
                shared=shared,
                transport=transport,
                links=links,
            )
            plans[worker] = outgoing(setting.source, worker, setting.destination, setting.kv_heads)
        self._open += senders.values()

        def run(compute: Callable[[int], None]) -> tuple[float, float]:
            self.pipe.send("expect")
            self.pipe.recv()
            began = time.perf_counter()
            for worker, sender in senders.items():
                sender.begin("r", plans[worker], 0, setting.tokens)
            for layer in range(LAYERS):
                compute(layer)
                for sender in senders.values():
                    sender.layer_ready("r", layer, self.table, setting.tokens)
            computed = time.perf_counter()
            for _ in senders:
                sent.get()
            self.pipe.send("landed")
            return computed - began, self.pipe.recv() - began

        return run

    def bare(self, transport: str) -> Callable[[], float]:
        """Move the same bytes without a KV cache."""
        if transport == "shm":
            descriptor = os.memfd_create("source")
            os.ftruncate(descriptor, len(self.data))
            np.frombuffer(mmap.mmap(descriptor, len(self.data)), np.uint8)[:] = 1

        def tcp() -> None:
            self.pipe.send("tcp")
            self.stream.sendall(self.data.numpy().data)

        def shm() -> None:
            self.stream.sendall(b"c")

        def run() -> float:
            if transport == "shm":
                self.pipe.send(("shm", f"/proc/{os.getpid()}/fd/{descriptor}"))
                self.pipe.recv()
            began = time.perf_counter()
            {"tcp": tcp, "shm": shm}[transport]()
            self.stream.recv(1)
            seconds = time.perf_counter() - began
            if transport == "shm":
                self.stream.sendall(b"e")
            return seconds

        return run


def in_turns(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side in each round, after one unmeasured round."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, run in sides.items():
            seconds[name].append(run())
    return {name: each[1:] for name, each in seconds.items()}


def rates(rounds: int) -> None:
    """Each transport beside a bare transfer of the same kind."""
    print(f"{'transport':12}{'blocks':>10}{'bytes':>10}{'GB/s':>8}{'bare':>8}{'share':>8}")
    one = stages("p", [(1, 0, LAYERS)]), stages("d", [(1, 0, LAYERS)])
    for size, scattered in itertools.product((64 * KB, 512 * KB, 4 * MB, 8 * MB, 64 * MB), (True, False)):
        tokens = size // (LAYERS * HEADS * HEAD_DIM * 2 * DTYPE.itemsize)
        blocks = "anywhere" if scattered else "in a row"
        with Sides(Setting(*one, HEADS, tokens, scattered)) as both:
            for transport in ("shm", "tcp"):
                taken = in_turns({"kv": both.move(transport), "bare": both.bare(transport)}, rounds)
                kv_s, bare_s = (statistics.median(taken[name]) for name in ("kv", "bare"))
                share = statistics.median(b / k for k, b in zip(taken["kv"], taken["bare"], strict=True))
                speeds = f"{size / kv_s / 1e9:>8.2f}{size / bare_s / 1e9:>8.2f}"
                print(f"{transport:12}{blocks:>10}{size:>10}{speeds}{share:>8.2f}")


def gpu(rounds: int) -> None:
    """Transports between two processes of one GPU beside a copy on it."""
    print(f"{'transport':12}{'bytes':>12}{'ms':>9}{'GB/s':>8}{'copy':>8}")
    one = stages("p", [(1, 0, LAYERS)]), stages("d", [(1, 0, LAYERS)])
    for size in (512 * KB, 8 * MB, 64 * MB, 512 * MB):
        tokens = size // (LAYERS * HEADS * HEAD_DIM * 2 * DTYPE.itemsize)
        with Sides(Setting(*one, HEADS, tokens, device="cuda:0")) as both:
            here = torch.empty(size, dtype=torch.uint8, device="cuda:0")
            there = torch.empty_like(here)

            def copy() -> float:
                torch.cuda.synchronize()
                began = time.perf_counter()
                there.copy_(here)  # noqa: B023
                torch.cuda.synchronize()
                return time.perf_counter() - began

            for transport in ("cuda_ipc", "tcp"):
                taken = in_turns({"kv": both.move(transport), "copy": copy}, rounds)
                kv_s, copy_s = (statistics.median(taken[name]) for name in ("kv", "copy"))
                speeds = f"{size / kv_s / 1e9:>8.2f}{size / copy_s / 1e9:>8.1f}"
                print(f"{transport:12}{size:>12}{1e3 * kv_s:>9.2f}{speeds}", flush=True)


_ONE, _TWO, _FOUR = [(1, 0, LAYERS)], [(2, 0, LAYERS)], [(4, 0, LAYERS)]
_PIPELINE = [(1, 0, LAYERS // 2), (1, LAYERS // 2, LAYERS)]


def shapes(rounds: int) -> None:
    """Different shapes beside equal ones."""
    cases = [
        ("tp1 -> tp2", (_ONE, _TWO, HEADS), (_ONE, _ONE, HEADS)),
        ("tp2 -> tp1", (_TWO, _ONE, HEADS), (_TWO, _TWO, HEADS)),
        ("tp2 -> tp4, 2 KV heads", (_TWO, _FOUR, 2), (_TWO, _TWO, HEADS)),
        ("pp2 -> tp2", (_PIPELINE, _TWO, HEADS), (_TWO, _TWO, HEADS)),
    ]
    size = 32 * MB
    print(f"\n{'shapes, 32 MB':26}{'transport':>10}{'ms':>8}{'like':>8}{'ratio':>8}")
    for name, unlike, like in cases:
        with _sides(unlike, size) as first, _sides(like, size) as second:
            for transport in ("shm", "tcp"):
                taken = in_turns({"unlike": first.move(transport), "like": second.move(transport)}, rounds)
                ratio = statistics.median(u / e for u, e in zip(taken["unlike"], taken["like"], strict=True))
                unlike_ms, like_ms = (1e3 * statistics.median(taken[side]) for side in ("unlike", "like"))
                print(f"{name:26}{transport:>10}{unlike_ms:>8.2f}{like_ms:>8.2f}{ratio:>8.2f}")


def _sides(case: tuple[list, list, int], size: int) -> Sides:
    source, destination, kv_heads = case
    probe = Setting(stages("p", source), stages("d", destination), kv_heads, 1)
    return Sides(Setting(probe.source, probe.destination, kv_heads, size // probe.total_bytes))


def overlap(rounds: int) -> None:
    """The share of a transfer that has finished when the prefill ends, not counting the last layer."""
    print(f"\n{'overlap':26}{'bytes':>10}{'alone ms':>10}{'prefill':>9}{'beyond':>9}{'hidden':>8}")
    for tokens in (256, 1024):
        _overlap(tokens, rounds)


def _overlap(tokens: int, rounds: int) -> None:
    work, weights = torch.ones(tokens, 1024), torch.ones(1024, 1024) / 1024

    def compute(layer: int) -> None:
        for _ in range(12):  # 12 hidden^2 weights a layer, of a model of 1024
            torch.mm(work, weights)

    compute(0)
    began = time.perf_counter()
    compute(0)
    layer_s = time.perf_counter() - began
    one = stages("p", _ONE), stages("d", _ONE)
    size = tokens * LAYERS * HEADS * HEAD_DIM * 2 * DTYPE.itemsize
    links = [KvLink(source="p/0.0", destination="d/0.0", bandwidth_bytes_s=size / LAYERS / (0.7 * layer_s))]
    with Sides(Setting(*one, HEADS, tokens)) as both:
        ways: tuple[tuple[str, str, Sequence[KvLink]], ...] = (
            ("shm", "shm", ()),
            ("tcp", "tcp", ()),
            ("link, 0.7 of a layer", "auto", links),
        )
        for name, transport, shaped in ways:
            run = both.layers(transport, shaped)
            alone, prefill, beyond = [], [], []
            for _ in range(rounds + 1):
                alone.append(run(lambda layer: None)[1])
                computed_s, all_s = run(compute)
                prefill.append(computed_s)
                beyond.append(all_s - computed_s)
            alone_s, prefill_s, beyond_s = (statistics.median(each[1:]) for each in (alone, prefill, beyond))
            last_s = alone_s / LAYERS
            hidden = 1 - max(0.0, beyond_s - last_s) / (alone_s - last_s)
            times = f"{1e3 * alone_s:>10.2f}{1e3 * prefill_s:>9.1f}{1e3 * beyond_s:>9.2f}"
            print(f"{name:26}{size:>10}{times}{hidden:>8.2f}")


if __name__ == "__main__":
    main()
