"""KV caches that do not arrive: requests are cancelled during the transfer, or partners killed or stopped."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from kv_pairs import (
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
    next_event,
    receive_process,
    scattered,
    send_process,
    sending_to,
    start,
)
from kv_transports import RUNNABLE, WITH_NIXL

from runtime.kv_cache.layout import KvTransfer, Part
from runtime.protocol.between_workers import KvLanded
from runtime.protocol.framing import listen

# -- cancelled during the transfer


@pytest.mark.parametrize("transport", RUNNABLE)
def test_blocks_of_a_cancelled_request_are_another_s_at_once(transport: str) -> None:
    """Forget or give up at any moment of a transfer with many pieces. Then new owners write the blocks on
    both sides while the rest of the transfer ends; nothing of the old request may arrive after that."""
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
    deadline_s = 5.0 if transport == "nixl" else 1.0  # nixl takes a second to load
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
    """Stop all threads of a process, and wait until they have stopped: on a busy machine the signal takes a
    while."""
    process = psutil.Process(process_id)
    process.suspend()
    while any(
        "State:\tT" not in Path(f"/proc/{process.pid}/task/{thread.id}/status").read_text()
        for thread in process.threads()
    ):
        time.sleep(0.001)


@pytest.mark.parametrize("transport", ["shm", WITH_NIXL])
def test_a_pull_that_comes_too_late_is_not_taken_for_good(transport: str) -> None:
    """A receiver that slept through the deadline pulls from blocks that have a new owner by then."""
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
