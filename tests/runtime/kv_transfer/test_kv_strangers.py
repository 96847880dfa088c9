"""Invalid data on a connection for KV caches harms at most its own request."""

from __future__ import annotations

import os

import msgspec
import pytest
from kv_pairs import (
    DIM,
    HALF,
    TIMEOUT_S,
    TO_D0,
    WHOLE,
    Pool,
    Receiving,
    Sending,
    credentials,
    holds,
    landed,
    met,
    next_event,
    sending_to,
)

from runtime.kv_cache.layout import Part
from runtime.kv_transfer.transports.base import host_identity
from runtime.protocol.between_workers import KvOffer, KvOpen, KvOpened, KvSlice, KvTaken, Step
from runtime.protocol.framing import Connection, listen
from runtime.protocol.handshake import connect


def opened(receiving: Receiving, transport: str = "tcp") -> Connection:
    """A connection made by hand."""
    connection = connect(receiving.address, credentials("x/0"), TIMEOUT_S)
    connection.send(opening(KvOffer(transport=transport, handle="")))
    answer = connection.receive()
    assert isinstance(answer, KvOpened) and answer.transport == transport, answer
    return connection


def opening(*offers: KvOffer, head_dim: int = DIM, dtype: str = "torch.float32") -> KvOpen:
    return KvOpen(
        host="elsewhere",
        first_layer=0,
        end_layer=3,
        first_head=0,
        end_head=4,
        slots=96,
        sides=2,
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
    if not honest:  # an honest one looks like a slice of a cancelled request
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
        opening(KvOffer(transport="tcp", handle=""), dtype="int8"),
    ],
    ids=str,
)
def test_a_stranger_is_turned_away(first: object, receiving: Receiving) -> None:
    connection = connect(receiving.address, credentials("x/0"), TIMEOUT_S)
    connection.send(first)  # type: ignore[arg-type]
    answer = connection.receive()
    if answer is not None:
        assert isinstance(answer, KvOpened) and not answer.transport and answer.problem
        assert connection.receive() is None


@pytest.mark.parametrize("handle", ["", "x", "1:2", "-1:0:x", "1:2:3:4", f"{os.getpid()}:0:hexgen2-kv-0"])
def test_memory_that_is_no_pool_is_not_mapped(handle: str, receiving: Receiving) -> None:
    offer = opening(KvOffer(transport="shm", handle=handle))
    connection = connect(receiving.address, credentials("x/0"), TIMEOUT_S)
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
