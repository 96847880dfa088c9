"""Workers that only move KV caches, for tests: a sender and receivers, in one process or several."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runtime.kv_cache.formats import kv_format
from runtime.kv_cache.layout import KvTransfer, Part
from runtime.kv_cache.pool import CacheShape
from runtime.kv_transfer import KvReceiver, KvSender
from runtime.kv_transfer.memory import shared_cache
from runtime.protocol.between_workers import KvLanded, KvOpen
from runtime.protocol.framing import Connection, listen
from runtime.protocol.handshake import Credentials, accept

SECRET, DIM = "secret", 4
TIMEOUT_S = 20.0
WHOLE, HALF = Part(0, 3, 0, 4), Part(1, 3, 2, 4)
TO_D0 = (KvTransfer("p/0", "d/0", HALF),)


@dataclass(frozen=True)
class Pool:
    """The shape of a worker's pool."""

    part: Part
    block_tokens: int = 4
    blocks: int = 24
    dtype: torch.dtype = torch.float32
    head_dim: int = DIM
    sides: int = 2
    kv: str = "plain"

    @property
    def shape(self) -> CacheShape:
        form = kv_format(self.kv)
        return CacheShape(
            self.part, self.head_dim, self.dtype, torch.device("cpu"), sides=self.sides, format=form
        )

    def allocate(self) -> Any:
        return shared_cache(self.shape, self.blocks, self.block_tokens)


def credentials(worker: str) -> Credentials:
    return Credentials(worker, "kv", SECRET)


def cell_value(request: int, layer: int, side: int, token: int, head: int) -> int:
    """A value that distinguishes every cell of every request, in 15 bits (the seed of a row)."""
    return (request * 7919 + layer * 613 + side * 331 + token * 17 + head * 101) % 32749


def rows(request: int, layers: range, tokens: range, heads: range, pool: Pool) -> torch.Tensor:
    """The contents of a request's cells, which any worker can compute: [layers, sides, tokens, heads,
    width]."""
    numbers = [
        [[[cell_value(request, la, side, t, h) for h in heads] for t in tokens] for side in range(pool.sides)]
        for la in layers
    ]
    base = torch.tensor(numbers, dtype=torch.int32)[..., None]
    words = base * 31 + torch.arange(pool.shape.width, dtype=torch.int32)
    return (words % 251 + 1).to(pool.shape.stored_dtype)


def fill(cache: Any, pool: Pool, request: int, table: list[int], tokens: int) -> None:
    part = pool.part
    block = rows(
        request,
        range(part.first_layer, part.end_layer),
        range(tokens),
        range(part.first_head, part.end_head),
        pool,
    )
    cache.pool[:, :, torch.from_numpy(cache.slots(table, 0, tokens))] = block


def holds(cache: Any, pool: Pool, request: int, table: list[int], first: int, end: int) -> bool:
    """Whether the tokens [first, end) of a table hold a request's values."""
    part = pool.part
    expected = rows(
        request,
        range(part.first_layer, part.end_layer),
        range(first, end),
        range(part.first_head, part.end_head),
        pool,
    )
    return torch.equal(cache.pool[:, :, torch.from_numpy(cache.slots(table, first, end))], expected)


class Receiving:
    """A receiver behind a listener."""

    def __init__(self, worker: str, pool: Pool, deadline_s: float = TIMEOUT_S) -> None:
        self.worker, self.pool = worker, pool
        self.cache, self.shared = pool.allocate()
        self.cache.pool.zero_()
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self.receiver = KvReceiver(
            worker,
            self.cache,
            self.events.put,
            lambda *failure: self.events.put(failure),
            deadline_s=deadline_s,
        )
        self.listener = listen("127.0.0.1")
        self.address = self.listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream: socket.socket) -> None:
        if accepted := accept(stream, SECRET):
            self.receiver.serve(accepted[0], accepted[1].worker)

    def close(self) -> None:
        self.listener.close()


class Sending:
    """A sender with a pool of its own."""

    def __init__(self, worker: str, pool: Pool, peers: dict[str, tuple[str, int]], **options: Any) -> None:
        self.worker, self.pool = worker, pool
        self.cache, self.shared = pool.allocate()
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self.sender = KvSender(
            credentials(worker),
            self.cache,
            peers,
            self.events.put,
            lambda *failure: self.events.put(failure),
            shared=self.shared,
            **options,
        )

    def push(
        self,
        request_id: str,
        plan: Iterable[KvTransfer],
        table: list[int],
        chunks: list[int],
        first_token: int = 0,
    ) -> None:
        """Send all layers of each chunk, as a prefill makes them; chunks are the ends of token ranges."""
        self.sender.begin(request_id, tuple(plan), first_token, chunks[-1])
        for upto in chunks:
            for layer in range(self.pool.part.first_layer, self.pool.part.end_layer):
                self.sender.layer_ready(request_id, layer, table, upto)


def sending_to(receiving: Receiving, **options: Any) -> Sending:
    """A sender whose request 1 has 32 tokens in the first 8 blocks."""
    sending = Sending("p/0", Pool(WHOLE), {receiving.worker: receiving.address}, **options)
    fill(sending.cache, sending.pool, 1, list(range(8)), 32)
    return sending


def met(listener: socket.socket) -> Connection:
    """A sender's connection, accepted by hand, after its offer has been read."""
    accepted = accept(listener.accept()[0], SECRET)
    assert accepted is not None and isinstance(accepted[0].receive(), KvOpen)
    return accepted[0]


def scattered(seed: int, pool: Pool, tokens: int, taken: Iterable[int] = ()) -> list[int]:
    """A table with blocks for this many tokens, free ones in any order."""
    free = [block for block in range(pool.blocks) if block not in set(taken)]
    count = -(-tokens // pool.block_tokens)
    return [int(block) for block in np.random.default_rng(seed).permutation(free)[:count]]


def next_event(events: queue.SimpleQueue, timeout_s: float = TIMEOUT_S) -> Any:
    return events.get(timeout=timeout_s)


def landed(receiving: Receiving) -> KvLanded:
    event = next_event(receiving.events)
    assert isinstance(event, KvLanded), event
    return event


# -- in separate processes


def start(target: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Pipe]:
    """Start a process that runs `target(pipe, *arguments)`. It is killed at the end, even if a failed test
    left it stopped."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["runtime.kv_transfer", "runtime.kv_transfer.memory"])
    process = context.Process(target=_child, args=(target, theirs, *arguments), daemon=True)
    process.start()
    atexit.register(process.kill)
    theirs.close()
    return process, ours


def _child(target: Callable[..., None], pipe: Pipe, *arguments: Any) -> None:
    torch.set_num_threads(1)
    target(pipe, *arguments)


def receive_process(pipe: Pipe, worker: str, pool: Pool, deadline_s: float = TIMEOUT_S) -> None:
    """A receiver that reports its address and obeys commands."""
    receiving = Receiving(worker, pool, deadline_s)
    pipe.send(receiving.address)
    _obey(
        pipe,
        expect=receiving.receiver.expect,
        event=partial(_event, receiving.events),
        holds=partial(holds, receiving.cache, pool),
        usage=usage,
    )


def send_process(pipe: Pipe, worker: str, pool: Pool, peers: dict[str, Any], options: dict[str, Any]) -> None:
    """A sender that obeys commands."""
    sending = Sending(worker, pool, peers, **options)
    _obey(
        pipe,
        fill=partial(fill, sending.cache, pool),
        push=sending.push,
        event=partial(_event, sending.events),
    )


def _obey(pipe: Pipe, **verbs: Callable[..., Any]) -> None:
    """Read (verb, arguments) and write answers until the other end closes."""
    while True:
        try:
            verb, *arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(verbs[verb](*arguments))


def _event(events: queue.SimpleQueue, timeout_s: float) -> Any:
    """The next event, or None if it takes too long."""
    try:
        return next_event(events, timeout_s)
    except queue.Empty:
        return None


def usage() -> tuple[int, int, int]:
    """Open descriptors, threads and mapped pools of this process."""
    maps = Path("/proc/self/maps").read_text().count("memfd:hexgen2-kv-")
    return len(os.listdir("/proc/self/fd")), threading.active_count(), maps


def ask(pipe: Pipe, *request: Any) -> Any:
    pipe.send(request)
    assert pipe.poll(TIMEOUT_S + 10), f"no answer to {request}"
    return pipe.recv()
