"""KV caches between paged pools: every cell where it belongs and none elsewhere, whatever happens."""

from __future__ import annotations

import importlib.util
import itertools
import os
import queue
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_pairs import (
    DIM,
    SECRET,
    TIMEOUT_S,
    Pool,
    Receiving,
    Sending,
    ask,
    fill,
    holds,
    introduction,
    landed,
    next_event,
    receive_process,
    scattered,
    send_process,
    start,
    usage,
)

from cost_model.errors import InputError
from runtime.engine.cache import CacheShape
from runtime.engine.kv.host import host_identity
from runtime.engine.kv.pool import shared_cache
from runtime.introduction import accept, connect
from runtime.kv_layout import KvTransfer, Part, held, outgoing
from runtime.messages import KvLanded, KvLink, KvOffer, KvOpen, KvOpened, KvSlice, KvTaken, StageShape, Step
from runtime.transport import Connection, listen

HAS_NIXL = importlib.util.find_spec("nixl") is not None
NO_NIXL = "the package nixl is missing"
WITH_NIXL = pytest.param("nixl", marks=pytest.mark.skipif(not HAS_NIXL, reason=NO_NIXL))
RUNNABLE = ["shm", "tcp", "gloo", WITH_NIXL]
WHOLE, HALF = Part(0, 3, 0, 4), Part(1, 3, 2, 4)
TO_D0 = (KvTransfer("p/0", "d/0", HALF),)


def stages(name: str, shape: list[tuple[int, int, int]]) -> tuple[StageShape, ...]:
    """Stages of (tensor-parallel degree, first layer, end layer)."""
    return tuple(
        StageShape(
            workers=tuple(f"{name}/{number}.{rank}" for rank in range(degree)),
            first_layer=first,
            end_layer=end,
        )
        for number, (degree, first, end) in enumerate(shape)
    )


def whole_replicas_agree(
    source: list[tuple[int, int, int]],
    destination: list[tuple[int, int, int]],
    kv_heads: int,
    first_token: int,
    chunks: list[int],
    transport: str,
    block_tokens: tuple[int, int] = (4, 4),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Move two requests at once between replicas of any shape; all blocks end as they should."""
    froms, tos, end = stages("p", source), stages("d", destination), chunks[-1]
    names = [worker for stage in tos for worker in stage.workers]
    pools = [Pool(held(tos, name, kv_heads), block_tokens[1], 80, dtype) for name in names]
    receivings = {name: Receiving(name, pool) for name, pool in zip(names, pools, strict=True)}
    peers = {name: receiving.address for name, receiving in receivings.items()}
    sendings = []
    to_first = scattered(seed + 3, pools[0], end)
    to_second = scattered(seed + 4, pools[0], end, to_first)
    from_pool = Pool(WHOLE, block_tokens[0], 80, dtype)
    from_first = scattered(seed + 1, from_pool, end)
    from_second = scattered(seed + 2, from_pool, end, from_first)
    try:
        for receiving in receivings.values():
            receiving.receiver.expect("first", to_first, first_token, end)
            receiving.receiver.expect("second", to_second, first_token, end)
        for worker in (worker for stage in froms for worker in stage.workers):
            pool = Pool(held(froms, worker, kv_heads), block_tokens[0], 80, dtype)
            sending = Sending(worker, pool, peers, transport=transport)
            sendings.append(sending)
            fill(sending.cache, pool, 1, from_first, end)
            fill(sending.cache, pool, 2, from_second, end)
            plan = outgoing(froms, worker, tos, kv_heads)
            sending.push("first", plan, from_first, chunks, first_token)
            sending.push("second", plan, from_second, chunks, first_token)
        for receiving in receivings.values():
            assert {landed(receiving).request_id, landed(receiving).request_id} == {"first", "second"}
            for request, table in ((1, to_first), (2, to_second)):
                assert holds(receiving.cache, receiving.pool, request, table, first_token, end)
            written = torch.zeros(receiving.cache.pool.shape[2], dtype=torch.bool)
            for table in (to_first, to_second):
                written[torch.from_numpy(receiving.cache.slots(table, first_token, end))] = True
            assert not receiving.cache.pool[:, :, ~written].any()
        for sending in sendings:
            assert {next_event(sending.events), next_event(sending.events)} == {"first", "second"}
            assert sending.events.empty()
    finally:
        for sending in sendings:
            sending.sender.close()
        for receiving in receivings.values():
            receiving.close()


SHAPES = {
    "equal": ([(1, 0, 3)], [(1, 0, 3)], 4),
    "tp1 to tp2": ([(1, 0, 3)], [(2, 0, 3)], 4),
    "tp2 to tp1": ([(2, 0, 3)], [(1, 0, 3)], 4),
    "tp2 to tp4, heads held twice": ([(2, 0, 3)], [(4, 0, 3)], 2),
    "tp4 to tp1, heads held twice": ([(4, 0, 3)], [(1, 0, 3)], 2),
    "pp2 to tp2": ([(1, 0, 2), (1, 2, 3)], [(2, 0, 3)], 4),
    "uneven": ([(2, 0, 1), (1, 1, 3)], [(1, 0, 2), (4, 2, 3)], 4),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("block_tokens", [(4, 4), (1, 16), (16, 3)])
def test_any_shape_to_any_shape(shape: str, transport: str, block_tokens: tuple[int, int]) -> None:
    source, destination, kv_heads = SHAPES[shape]
    whole_replicas_agree(source, destination, kv_heads, 5, [6, 17, 31], transport, block_tokens)


@pytest.mark.skipif(not HAS_NIXL, reason=NO_NIXL)
@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape_to_any_shape_by_nixl(shape: str) -> None:
    source, destination, kv_heads = SHAPES[shape]
    whole_replicas_agree(source, destination, kv_heads, 5, [6, 17, 31], "nixl", (16, 3))


@st.composite
def replicas(draw: st.DrawFn, kv_heads: int) -> list[tuple[int, int, int]]:
    degrees = [degree for degree in (1, 2, 4) if kv_heads % degree == 0 or degree % kv_heads == 0]
    bounds = [0, *sorted(draw(st.sets(st.integers(1, 2), max_size=2))), 3]
    return [(draw(st.sampled_from(degrees)), first, end) for first, end in itertools.pairwise(bounds)]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_plan_and_any_token_ranges(data: st.DataObject) -> None:
    kv_heads = data.draw(st.sampled_from([1, 2, 4]))
    first = data.draw(st.integers(0, 20))
    chunks = sorted(data.draw(st.sets(st.integers(first + 1, 36), min_size=1, max_size=4)))
    whole_replicas_agree(
        data.draw(replicas(kv_heads)),
        data.draw(replicas(kv_heads)),
        kv_heads,
        first,
        chunks,
        data.draw(st.sampled_from(["shm", "tcp"])),
        (data.draw(st.sampled_from([1, 3, 8])), data.draw(st.sampled_from([1, 3, 8]))),
        data.draw(st.integers(0, 99)),
        data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
    )


@pytest.mark.parametrize("transport", RUNNABLE)
@pytest.mark.parametrize("part", [WHOLE, HALF])
@pytest.mark.parametrize("head_dim", [DIM, 2048])
def test_between_two_processes(transport: str, part: Part, head_dim: int) -> None:
    """Heads of 2048 values make slices of many pieces, in large stretches."""
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


@pytest.fixture
def receiving() -> Iterator[Receiving]:
    there = Receiving("d/0", Pool(HALF))
    yield there
    there.close()


def sending_to(receiving: Receiving, **options: object) -> Sending:
    sending = Sending("p/0", Pool(WHOLE), {receiving.worker: receiving.address}, **options)
    fill(sending.cache, sending.pool, 1, list(range(8)), 32)
    return sending


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


def test_an_unknown_transport_is_answered_with_those_that_exist(receiving: Receiving) -> None:
    with pytest.raises(InputError, match=r"auto, cuda_ipc, gloo, nccl.*shm, tcp"):
        sending_to(receiving, transport="pigeon")


def test_what_can_not_be_shared_goes_by_tcp(receiving: Receiving) -> None:
    sending = sending_to(receiving)
    sending.shared.close()
    receiving.receiver.expect("r", [0, 1, 2], 0, 11)
    sending.push("r", TO_D0, list(range(8)), [11])
    assert landed(receiving).request_id == "r"
    assert holds(receiving.cache, receiving.pool, 1, [0, 1, 2], 0, 11)


@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl", *(() if HAS_NIXL else ("nixl",))])
def test_a_transport_that_this_pair_lacks_fails_the_request(receiving: Receiving, transport: str) -> None:
    sending = sending_to(receiving, transport=transport)
    sending.push("r", TO_D0, list(range(8)), [11])
    name, text = next_event(sending.events)
    assert name == "r" and "no transport in common" in text
    assert next_event(sending.events) == "r"


# -- cancelled on the way


@pytest.mark.parametrize("transport", RUNNABLE)
def test_blocks_of_a_cancelled_request_are_another_s_at_once(transport: str) -> None:
    """Forget and give up at any moment of a transfer of many pieces; then the blocks are written by their new
    owners on both sides, while what was under way ends. Nothing of the old request may come after that."""
    pool = Pool(Part(0, 2, 0, 4), 4, 60, head_dim=2048)
    receiving = Receiving("d/0", pool)
    sending = Sending("p/0", pool, {"d/0": receiving.address}, transport=transport)
    table, tokens = scattered(1, pool, 200), 200
    plan = (KvTransfer("p/0", "d/0", pool.part),)
    for attempt in range(12):
        name = f"r{attempt}"
        receiving.receiver.expect(name, table, 0, tokens)
        sending.push(name, plan, table, [100, tokens])
        time.sleep(0.001 * attempt)
        receiving.receiver.forget(name)
        receiving.cache.pool.fill_(attempt + 1)
        sending.sender.give_up(name)
        assert next_event(sending.events) == name
        sending.cache.pool.fill_(-1)
        time.sleep(0.01)
        assert (receiving.cache.pool == attempt + 1).all()
    fill(sending.cache, pool, 5, table, tokens)
    events = list[object]()
    while not receiving.events.empty():
        events.append(receiving.events.get())
    assert all(isinstance(event, KvLanded) for event in events)
    receiving.receiver.expect("last", table, 0, tokens)
    sending.push("last", plan, table, [tokens])
    assert landed(receiving).request_id == "last"
    assert holds(receiving.cache, pool, 5, table, 0, tokens)
    sending.sender.close()
    receiving.close()


def test_a_request_given_up_before_it_is_computed_is_done_at_once(receiving: Receiving) -> None:
    sending = sending_to(receiving)
    sending.sender.begin("r", TO_D0, 0, 11)
    sending.sender.give_up("r")
    sending.sender.give_up("r")
    assert sending.events.get_nowait() == "r"
    sending.sender.layer_ready("r", 1, [0, 1, 2], 11)
    assert sending.events.empty()


# -- partners that are lost


def test_a_dead_destination_fails_each_request_once() -> None:
    closed = listen("127.0.0.1")
    address = closed.getsockname()
    closed.close()
    sending = Sending("p/0", Pool(WHOLE), {"d/0": address})
    for name in ("a", "b"):
        sending.push(name, TO_D0, list(range(8)), [5, 11])
        assert next_event(sending.events)[0] == name
        assert next_event(sending.events) == name
    assert sending.events.empty()


@pytest.mark.parametrize("transport", RUNNABLE)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_receiver_fails_its_requests_within_the_deadline(
    transport: str, how: signal.Signals, receiving: Receiving
) -> None:
    process, pipe = start(receive_process, "d/9", Pool(HALF))
    deadline_s = 5.0 if transport == "nixl" else 1.0  # to load it takes a second
    sending = sending_to(receiving, transport=transport, deadline_s=deadline_s)
    sending.sender.reconnect({"d/0": receiving.address, "d/9": pipe.recv()})
    table = list(range(8))
    ask(pipe, "expect", "before", [0, 1, 2, 3], 0, 11)
    lost = (KvTransfer("p/0", "d/9", HALF),)
    sending.push("before", lost, table, [11])
    assert next_event(sending.events) == "before"
    assert process.pid is not None
    if how == signal.SIGSTOP:
        freeze(process.pid)
    else:
        os.kill(process.pid, how)
    sending.push("lost", lost, table, [5, 11])
    receiving.receiver.expect("well", [0, 1, 2], 0, 11)
    sending.push("well", TO_D0, table, [11])
    assert landed(receiving).request_id == "well"
    assert holds(receiving.cache, receiving.pool, 1, [0, 1, 2], 0, 11)
    events = [next_event(sending.events) for _ in range(3)]
    events.remove("well")
    assert events[0][0] == "lost" and events[1] == "lost"
    if how == signal.SIGSTOP:
        os.kill(process.pid, signal.SIGCONT)
        ask(pipe, "expect", "after", [5, 6, 7], 0, 11)
        sending.push("after", lost, table, [11])
        assert next_event(sending.events) == "after"
        assert ask(pipe, "holds", 1, [5, 6, 7], 0, 11)
    process.kill()
    sending.sender.close()


def freeze(process_id: int | None) -> None:
    """Stop all threads of a process: the signal alone does so in a while, on a busy machine."""
    process = psutil.Process(process_id)
    process.suspend()
    while any(
        "State:\tT" not in Path(f"/proc/{process.pid}/task/{thread.id}/status").read_text()
        for thread in process.threads()
    ):
        time.sleep(0.001)


@pytest.mark.parametrize("transport", ["shm", WITH_NIXL])
def test_a_pull_that_comes_too_late_is_not_taken_for_good(transport: str) -> None:
    """A receiver that slept through the deadline pulls from blocks that are another's by then."""
    pool = Pool(WHOLE)
    process, pipe = start(receive_process, "d/0", pool)
    deadline_s = 5.0 if transport == "nixl" else 0.5
    sending = Sending("p/0", pool, {"d/0": pipe.recv()}, transport=transport, deadline_s=deadline_s)
    table = list(range(8))
    fill(sending.cache, pool, 1, table, 32)
    plan = (KvTransfer("p/0", "d/0", WHOLE),)
    for name in ("first", "late"):
        ask(pipe, "expect", name, table, 0, 32)
        if name == "late":
            freeze(process.pid)
        sending.push(name, plan, table, [32])
        assert name in next_event(sending.events)
    assert next_event(sending.events) == "late"
    sending.cache.pool.fill_(-1)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGCONT)
    assert isinstance(ask(pipe, "event", TIMEOUT_S), KvLanded)
    late = ask(pipe, "event", TIMEOUT_S)
    assert not isinstance(late, KvLanded) and late[0] == "late"
    process.kill()


@pytest.mark.parametrize("transport", RUNNABLE)
def test_a_killed_sender_fails_what_it_had_begun_and_nothing_else(
    transport: str, receiving: Receiving
) -> None:
    options = {"transport": transport}
    process, pipe = start(send_process, "p/9", Pool(WHOLE), {"d/0": receiving.address}, options)
    ask(pipe, "fill", 1, list(range(8)), 32)
    receiving.receiver.expect("begun", [0, 1, 2], 0, 12)
    receiving.receiver.expect("other", [3, 4, 5], 0, 12)
    half = (KvTransfer("p/9", "d/0", Part(1, 2, 2, 4)),)
    ask(pipe, "push", "begun", half, list(range(8)), [12])
    assert ask(pipe, "event", TIMEOUT_S) == "begun"
    process.kill()
    name, text = next_event(receiving.events)
    assert name == "begun" and "p/9" in text
    sending = sending_to(receiving)
    sending.push("other", TO_D0, list(range(8)), [12])
    assert landed(receiving).request_id == "other"


# -- what does not belong


def opened(receiving: Receiving, transport: str = "tcp") -> Connection:
    """A connection by hand."""
    connection = connect(receiving.address, introduction("x/0"), TIMEOUT_S)
    connection.send(opening(KvOffer(transport=transport, handle="")))
    answer = connection.receive()
    assert isinstance(answer, KvOpened) and answer.transport == transport, answer
    return connection


def met(listener: socket.socket) -> Connection:
    """A sender's connection, accepted by hand; what it offers is read."""
    accepted = accept(listener.accept()[0], SECRET)
    assert accepted is not None and isinstance(accepted[0].receive(), KvOpen)
    return accepted[0]


def opening(*offers: KvOffer, head_dim: int = DIM, dtype: str = "torch.float32") -> KvOpen:
    return KvOpen(
        host="elsewhere",
        first_layer=0,
        end_layer=3,
        first_head=0,
        end_head=4,
        slots=96,
        head_dim=head_dim,
        dtype=dtype,
        offers=offers,
    )


def header(
    name: str = "r", part: Part = HALF, tokens: tuple[int, int] = (0, 11), extra_bytes: int = 0
) -> KvSlice:
    return KvSlice(
        request_id=name,
        first_layer=part.first_layer,
        end_layer=part.end_layer,
        first_head=part.first_head,
        end_head=part.end_head,
        first_token=tokens[0],
        end_token=tokens[1],
        payload_bytes=part.cells * 2 * (tokens[1] - tokens[0]) * DIM * 4 + extra_bytes,
    )


@pytest.mark.parametrize("name", ["r", "never"])
@pytest.mark.parametrize(
    "bad",
    [
        {"extra_bytes": 4},
        {"extra_bytes": 1 << 60},
        {"extra_bytes": -(1 << 40)},
        {"tokens": (0, 12)},
        {"tokens": (1, 11)},
        {"tokens": (-1, 11)},
        {"tokens": (7, 7)},
        {"tokens": (7, 3)},
        {"part": Part(0, 3, 2, 4)},
        {"part": Part(1, 3, 2, 5)},
        {"part": Part(2, 2, 2, 4)},
        {"part": Part(3, 1, 2, 4)},
        {"part": Part(1, 3, -2, 4)},
        {"part": Part(1, 1 << 20, 2, 1 << 20)},
    ],
    ids=str,
)
def test_a_lying_header_harms_its_connection_only(name: str, bad: dict, receiving: Receiving) -> None:
    receiving.receiver.expect("r", [0, 1, 2], 0, 11)
    liar = opened(receiving)
    liar.send(header(name, **bad))
    honest = (
        name == "never" and not ({"extra_bytes"} & set(bad)) and 0 < header(**bad).payload_bytes < 1 << 30
    )
    if not honest:  # else it is a slice of a request that was cancelled, as far as anybody can tell
        assert liar.receive() is None
    sending = sending_to(receiving)
    sending.push("r", TO_D0, list(range(8)), [11])
    assert landed(receiving).request_id == "r"
    assert holds(receiving.cache, receiving.pool, 1, [0, 1, 2], 0, 11)


def test_cells_that_come_twice_or_are_cut_short_fail_their_request(receiving: Receiving) -> None:
    first = header(part=Part(1, 2, 2, 3))
    payload = bytes(first.payload_bytes)
    for again, sent in ((first, payload), (header(part=Part(2, 3, 2, 3)), payload[:-1])):
        receiving.receiver.expect("r", [0, 1, 2], 0, 11)
        connection = opened(receiving)
        for each, data in ((first, payload), (again, sent)):
            connection.send(each)
            connection.stream.sendall(data)
        connection.close()
        assert next_event(receiving.events)[0] == "r"


def test_a_sender_that_falls_silent_in_a_slice_fails_its_request() -> None:
    receiving = Receiving("d/0", Pool(HALF), deadline_s=0.3)
    receiving.receiver.expect("r", [0, 1, 2], 0, 11)
    connection = opened(receiving)
    connection.send(header())
    connection.stream.sendall(bytes(100))
    name, text = next_event(receiving.events)
    assert name == "r" and "x/0" in text
    receiving.close()


@pytest.mark.parametrize(
    "first",
    [
        Step(step=0, starts=(), sequences=()),
        header(),
        opening(),
        opening(KvOffer(transport="pigeon", handle="")),
        opening(KvOffer(transport="shm", handle="1:1:x")),
        opening(KvOffer(transport="tcp", handle=""), head_dim=DIM + 1),
        opening(KvOffer(transport="tcp", handle=""), dtype="torch.int8"),
    ],
    ids=str,
)
def test_a_stranger_is_turned_away(first: object, receiving: Receiving) -> None:
    connection = connect(receiving.address, introduction("x/0"), TIMEOUT_S)
    connection.send(first)  # type: ignore[arg-type]
    answer = connection.receive()
    if answer is not None:
        assert isinstance(answer, KvOpened) and not answer.transport and answer.problem
        assert connection.receive() is None


@pytest.mark.parametrize("handle", ["", "x", "1:2", "-1:0:x", "1:2:3:4", f"{os.getpid()}:0:hexgen2-kv-0"])
def test_memory_that_is_no_pool_is_not_mapped(handle: str, receiving: Receiving) -> None:
    offer = opening(KvOffer(transport="shm", handle=handle))
    connection = connect(receiving.address, introduction("x/0"), TIMEOUT_S)
    connection.send(msgspec.structs.replace(offer, host=host_identity()))
    answer = connection.receive()
    assert isinstance(answer, KvOpened) and not answer.transport and "opened" in answer.problem


def test_a_receiver_that_takes_more_than_was_sent_is_not_believed() -> None:
    listener = listen("127.0.0.1")
    sending = Sending("p/0", Pool(WHOLE), {"d/0": listener.getsockname()}, transport="tcp")
    sending.push("r", TO_D0, list(range(8)), [11])
    there = met(listener)
    there.send(KvOpened(transport="tcp"))
    there.send(KvTaken(slices=1000))
    assert next_event(sending.events)[0] == "r"
    assert next_event(sending.events) == "r"
    listener.close()


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
    """A receiver by hand that reads nothing until all is queued: few slices, each layer once."""
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
    for number in range(60 if transport in ("gloo", "nixl") else 200):  # these take 0.15 s for each
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
    """The least that is seen in a moment: threads that are told to end take one."""
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
    assert grown == 0 or 15 * 2**20 < grown < 24 * 2**20  # 0: a kernel that does not know how
