"""KV cache from one worker's memory to another's, over a real stream, without an engine."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from runtime.engine.cache import CacheShape, CacheTable, SequenceCache
from runtime.engine.kv_receive import KvReceiver
from runtime.engine.kv_transfer import KvSender
from runtime.kv_layout import KvTransfer, Part
from runtime.messages import PROTOCOL_VERSION, Hello, KvLanded, KvSlice, Step
from runtime.transport import Connection, accept_hello, listen

SECRET, TOKENS, DIM = "secret", 11, 4
HELLO = Hello(protocol=PROTOCOL_VERSION, secret=SECRET, worker="p/0", purpose="kv")
WHOLE = Part(0, 3, 0, 4)
HALF = Part(1, 3, 2, 4)


@dataclass
class Decoder:
    """A receiver behind a listener."""

    part: Part
    dtype: torch.dtype = torch.float32
    events: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self.caches = CacheTable(CacheShape(self.part, DIM, self.dtype, torch.device("cpu")))
        self.receiver = KvReceiver(
            "d/0", self.caches, self.events.put, lambda *failure: self.events.put(failure)
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
            if accepted := accept_hello(stream, SECRET):
                threading.Thread(target=self.receiver.serve, args=(accepted[0], "p/0"), daemon=True).start()


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def decoder(request: pytest.FixtureRequest) -> Iterator[Decoder]:
    running = Decoder(HALF, request.param)
    yield running
    running.listener.close()


def filled(part: Part, dtype: torch.dtype, capacity: int = TOKENS) -> SequenceCache:
    cache = SequenceCache(CacheShape(part, DIM, dtype, torch.device("cpu")), capacity)
    for layer in range(part.first_layer, part.end_layer):
        cache.layer(layer).copy_(torch.randn(cache.layer(layer).shape))
    return cache


def sender(address: tuple[str, int]) -> tuple[KvSender, queue.SimpleQueue]:
    events: queue.SimpleQueue = queue.SimpleQueue()
    return KvSender(HELLO, {"d/0": address}, events.put, lambda *failure: events.put(failure)), events


def push(out: KvSender, name: str, cache: SequenceCache, parts: list[Part]) -> None:
    plan = tuple(KvTransfer("p/0", "d/0", part) for part in parts)
    layer_ready = out.begin(name, cache, TOKENS, plan)
    for layer in range(WHOLE.first_layer, WHOLE.end_layer):
        layer_ready(layer, None)


@pytest.mark.parametrize("source_capacity", [TOKENS, TOKENS + 5])
@pytest.mark.parametrize("parts", [[HALF], [Part(1, 3, 2, 3), Part(1, 2, 3, 4), Part(2, 3, 3, 4)]])
def test_a_part_lands_where_it_belongs(decoder: Decoder, source_capacity: int, parts: list[Part]) -> None:
    decoder.receiver.expect("r", TOKENS, TOKENS + 7)
    source = filled(WHOLE, decoder.dtype, source_capacity)
    out, events = sender(decoder.address)
    push(out, "r", source, parts)
    landed = decoder.events.get(timeout=10)
    assert isinstance(landed, KvLanded)
    assert landed.bytes_received == HALF.cells * 2 * TOKENS * DIM * decoder.dtype.itemsize
    assert events.get(timeout=10) == "r"
    for layer in (1, 2):
        there = decoder.caches["r"].heads(layer, 2, 4, TOKENS)
        assert torch.equal(there, source.heads(layer, 2, 4, TOKENS))


def test_what_nobody_expects_is_dropped_and_the_next_lands(decoder: Decoder) -> None:
    decoder.receiver.expect("gone", TOKENS, TOKENS)
    decoder.receiver.forget("gone")
    decoder.caches.drop("gone")
    decoder.receiver.expect("r", TOKENS, TOKENS)
    out, _ = sender(decoder.address)
    for name in ("gone", "never", "r"):
        push(out, name, filled(WHOLE, decoder.dtype), [HALF])
    landed = decoder.events.get(timeout=10)
    assert landed.request_id == "r"
    assert len(decoder.caches) == 1


def test_a_sender_with_nothing_to_send_is_done_at_once() -> None:
    out, events = sender(("127.0.0.1", 1))
    push(out, "r", filled(WHOLE, torch.float32), [])
    assert events.get(timeout=10) == "r"


def test_a_dead_destination_fails_each_request_once() -> None:
    closed = listen("127.0.0.1")
    address = closed.getsockname()
    closed.close()
    out, events = sender(address)
    for name in ("a", "b"):
        push(out, name, filled(WHOLE, torch.float32), [HALF])
        assert events.get(timeout=10)[0] == name
        assert events.get(timeout=10) == name
    assert events.empty()


def header(name: str = "r", part: Part = HALF, tokens: int = TOKENS, extra_bytes: int = 0) -> KvSlice:
    return KvSlice(
        request_id=name,
        first_layer=part.first_layer,
        end_layer=part.end_layer,
        first_head=part.first_head,
        end_head=part.end_head,
        tokens=tokens,
        payload_bytes=part.cells * 2 * tokens * DIM * 4 + extra_bytes,
    )


@pytest.mark.parametrize(
    "bad",
    [
        header(extra_bytes=4),
        header(extra_bytes=1 << 60),
        header(tokens=TOKENS + 1),
        header(part=Part(0, 3, 2, 4)),
        header(part=Part(1, 3, 2, 5)),
        header(part=Part(2, 2, 2, 4)),
        header(part=Part(3, 1, 2, 4)),
    ],
)
def test_a_slice_that_does_not_fit_its_room_fails_that_request(bad: KvSlice) -> None:
    ours, theirs = socket.socketpair()
    decoder = Decoder(HALF)
    decoder.receiver.expect("r", TOKENS, TOKENS)
    decoder.receiver.expect("other", TOKENS, TOKENS)
    Connection(ours).send(bad)
    decoder.receiver.serve(Connection(theirs), "p/0")
    failure = decoder.events.get(timeout=10)
    assert failure[0] == "r"
    assert decoder.events.empty()
    out, _ = sender(decoder.address)
    push(out, "other", filled(WHOLE, torch.float32), [HALF])
    assert decoder.events.get(timeout=10).request_id == "other"
    decoder.listener.close()
    ours.close()


def test_a_slice_that_comes_twice_or_is_cut_short_fails_that_request() -> None:
    decoder = Decoder(HALF)
    first = header(part=Part(1, 2, 2, 3))
    whole = bytes(first.payload_bytes)
    for name, second in (("twice", whole), ("short", whole[:-1])):
        ours, theirs = socket.socketpair()
        decoder.receiver.expect("r", TOKENS, TOKENS)
        sending = Connection(ours)
        sending.send_with_payload(first, [memoryview(whole)])
        again = first if name == "twice" else header(part=Part(2, 3, 2, 3))
        sending.send_with_payload(again, [memoryview(second)])
        sending.close()
        decoder.receiver.serve(Connection(theirs), "p/0")
        assert decoder.events.get(timeout=10)[0] == "r"
    decoder.listener.close()


def test_only_slices_belong_on_a_kv_connection() -> None:
    ours, theirs = socket.socketpair()
    decoder = Decoder(HALF)
    Connection(ours).send(Step(step=0, phase="decode", sequences=()))
    decoder.receiver.serve(Connection(theirs), "p/0")
    assert ours.recv(1) == b""
    decoder.listener.close()
    ours.close()
