"""KV caches between two workers, over every transport: agreement, flow, and what remains afterwards."""

from __future__ import annotations

import queue
import time

import psutil
import pytest
import torch
from kv_pairs import (
    DIM,
    HALF,
    TIMEOUT_S,
    TO_D0,
    WHOLE,
    Pool,
    Receiving,
    Sending,
    ask,
    fill,
    holds,
    landed,
    met,
    next_event,
    receive_process,
    scattered,
    sending_to,
    start,
    usage,
)
from kv_transports import HAS_NIXL, RUNNABLE

from cost_model.errors import InputError
from runtime.kv_cache.layout import KvTransfer, Part
from runtime.kv_cache.pool import CacheShape
from runtime.kv_transfer.memory import shared_cache
from runtime.kv_transfer.stream import Shapers
from runtime.protocol.between_workers import KvLanded, KvOpened, KvSlice, KvTaken
from runtime.protocol.framing import listen
from runtime.protocol.to_workers import KvLink


@pytest.mark.parametrize("transport", RUNNABLE)
@pytest.mark.parametrize("part", [WHOLE, HALF])
@pytest.mark.parametrize("head_dim", [DIM, 2048])
def test_between_two_processes(transport: str, part: Part, head_dim: int) -> None:
    """Heads of 2048 values give slices of many pieces, in long contiguous runs."""
    source = Pool(WHOLE, 4, 60, head_dim=head_dim)
    destination = Pool(part, 8, 60, head_dim=head_dim)
    process, pipe = start(receive_process, "d/0", destination)
    address = pipe.recv()
    sending = Sending("p/0", source, {"d/0": address}, transport=transport)
    tables = scattered(1, source, 90), scattered(2, destination, 90)
    fill(sending.cache, source, 7, tables[0], 90)
    ask(pipe, "expect", "r", tables[1], 2, 90)
    sending.push("r", [KvTransfer("p/0", "d/0", part)], tables[0], [40, 90], 2)
    arrived = ask(pipe, "event", TIMEOUT_S)
    assert isinstance(arrived, KvLanded)
    assert arrived.bytes_received == part.cells * 2 * 88 * head_dim * 4
    assert ask(pipe, "holds", 7, tables[1], 2, 90)
    assert next_event(sending.events) == "r"
    sending.sender.close()
    process.kill()


# -- nothing to do


def test_with_nothing_to_send_both_sides_are_done_at_once(receiving: Receiving) -> None:
    sending = sending_to(receiving)
    for plan, first in (((), 0), (TO_D0, 9)):
        sending.sender.begin("r", plan, first, 9)
        assert sending.events.get_nowait() == "r"
    receiving.receiver.expect("r", [0, 1, 2], 9, 9)
    assert receiving.events.get_nowait().bytes_received == 0


def test_what_nobody_expects_is_dropped_and_the_next_lands(receiving: Receiving) -> None:
    for transport in ("shm", "tcp"):
        receiving.receiver.expect("gone", [3, 4, 5], 0, 11)
        receiving.receiver.forget("gone")
        receiving.receiver.expect("r", [0, 1, 2], 0, 11)
        sending = sending_to(receiving, transport=transport)
        for name in ("gone", "never", "r"):
            sending.push(name, TO_D0, list(range(8)), [11])
            assert next_event(sending.events) == name
        assert landed(receiving).request_id == "r"
        assert holds(receiving.cache, receiving.pool, 1, [0, 1, 2], 0, 11)
        assert not receiving.cache.pool[:, :, 12:].any()
        sending.sender.close()


# -- agreement


@pytest.mark.parametrize("name", ["pigeon", "gloo", "nccl"])
def test_an_unknown_transport_is_refused_with_the_known_ones(receiving: Receiving, name: str) -> None:
    with pytest.raises(InputError, match=f"{name} is unknown.*auto, cuda_ipc, nixl, shm, tcp"):
        sending_to(receiving, transport=name)


def test_what_can_not_be_shared_goes_by_tcp(receiving: Receiving) -> None:
    sending = sending_to(receiving)
    sending.shared.close()
    receiving.receiver.expect("r", [0, 1, 2], 0, 11)
    sending.push("r", TO_D0, list(range(8)), [11])
    assert landed(receiving).request_id == "r"
    assert holds(receiving.cache, receiving.pool, 1, [0, 1, 2], 0, 11)


@pytest.mark.parametrize("transport", ["cuda_ipc", *(() if HAS_NIXL else ("nixl",))])
def test_a_transport_that_this_pair_lacks_fails_the_request(receiving: Receiving, transport: str) -> None:
    sending = sending_to(receiving, transport=transport)
    sending.push("r", TO_D0, list(range(8)), [11])
    name, text = next_event(sending.events)
    assert name == "r" and "no transport in common" in text
    assert next_event(sending.events) == "r"


# -- flow


def test_an_emulated_link_is_no_faster_than_it_says(receiving: Receiving) -> None:
    links = [KvLink(source="p/0", destination="d/0", bandwidth_bytes_s=20_000.0, latency_s=0.05)]
    sending = sending_to(receiving, links=links)
    receiving.receiver.expect("r", [0, 1, 2], 0, 11)
    started = time.monotonic()
    sending.push("r", TO_D0, list(range(8)), [5, 11])
    size = landed(receiving).bytes_received
    assert time.monotonic() - started >= size / 20_000.0 + 0.05
    other = KvLink(source="p/1", destination="d/0", bandwidth_bytes_s=1.0)
    sending.sender.reconnect({"d/0": receiving.address}, [other])
    receiving.receiver.expect("r", [0, 1, 2], 0, 11)
    sending.push("r", TO_D0, list(range(8)), [11])
    assert landed(receiving).request_id == "r"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_layers_that_wait_together_go_together(receiving: Receiving, transport: str) -> None:
    """A scripted receiver reads nothing until everything is queued: then there are few slices, and each layer
    comes once."""
    pool = Pool(Part(0, 80, 0, 1), blocks=2)
    listener = listen("127.0.0.1")
    sending = Sending("p/0", pool, {"d/0": listener.getsockname()}, transport=transport)
    sending.push("r", [KvTransfer("p/0", "d/0", pool.part)], [1], [4])
    there = met(listener)
    there.send(KvOpened(transport=transport))
    layers, slices = list[int](), 0
    while len(layers) < 80:
        message = there.receive()
        assert isinstance(message, KvSlice)
        if transport == "tcp":
            there.receive_into(memoryview(bytearray(message.payload_bytes)))
        layers += range(message.first_layer, message.end_layer)
        slices += 1
        there.send(KvTaken(slices=1))
    assert layers == list(range(80)) and slices <= 3
    assert next_event(sending.events) == "r"
    listener.close()


@pytest.mark.parametrize("transport", RUNNABLE)
def test_many_connections_leave_nothing_behind(transport: str) -> None:
    process, pipe = start(receive_process, "d/0", Pool(HALF))
    address = pipe.recv()
    sending = Sending("p/0", Pool(WHOLE), {"d/0": address}, transport=transport)
    fill(sending.cache, sending.pool, 1, list(range(8)), 32)
    settled = None
    for number in range(60 if transport == "nixl" else 200):  # nixl takes 0.15 s per request
        sending.sender.reconnect({"d/0": address})
        ask(pipe, "expect", "r", [0, 1, 2], 0, 11)
        sending.push("r", TO_D0, list(range(8)), [11])
        assert isinstance(ask(pipe, "event", TIMEOUT_S), KvLanded)
        assert next_event(sending.events) == "r"
        sending.sender.reconnect({})
        if number == 20:
            settled = (settle(usage), settle(lambda: ask(pipe, "usage")))
    assert settled is not None
    here, there = settle(usage), settle(lambda: ask(pipe, "usage"))
    assert all(now <= before for now, before in zip(here + there, settled[0] + settled[1], strict=True))
    process.kill()


def settle(measure: object) -> tuple[int, int, int]:
    """The minimum over a moment, because threads that are told to end need one."""
    seen = []
    for _ in range(10):
        seen.append(measure())  # type: ignore[operator]
        time.sleep(0.05)
    return tuple(min(each) for each in zip(*seen, strict=True))  # type: ignore[return-value]


def test_the_queue_of_events_is_empty_when_nothing_happens(receiving: Receiving) -> None:
    sending = sending_to(receiving)
    sending.sender.layer_ready("nobody", 1, [0], 4)
    with pytest.raises(queue.Empty):
        sending.events.get(timeout=0.05)


def test_a_pool_gets_its_pages_and_keeps_what_it_holds():
    shape = CacheShape(Part(0, 2, 0, 2), 8, torch.float32, torch.device("cpu"))
    cache, shared = shared_cache(shape, 8192, 16)
    assert shared is not None and cache.pool.nbytes == 32 * 2**20
    cache.pool[1, 1, 7] = 3.0
    before = psutil.Process().memory_info().rss
    shared.populate(16 * 2**20).join(20)
    assert cache.pool[1, 1, 7].sum() == 3.0 * 2 * 8
    grown = psutil.Process().memory_info().rss - before
    assert grown == 0 or 15 * 2**20 < grown < 24 * 2**20  # 0: the kernel does not support it


def test_senders_of_a_worker_share_its_emulated_links():
    shapers = Shapers()
    link = shapers.of("d/0", 1e6, 0.001)
    assert shapers.of("d/0", 1e6, 0.001) is link
    assert shapers.of("d/1", 1e6, 0.001) is not link
    assert shapers.of("d/0", 2e6, 0.001) is not link
