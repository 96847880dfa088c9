"""Activations between workers: they arrive whole and in order, or their requests are reported as lost."""

from __future__ import annotations

import queue
import socket
import threading

import pytest

from runtime.protocol.between_workers import ActivationPart, Activations, ActivationsTaken
from runtime.protocol.codec import encode
from runtime.protocol.framing import Connection
from runtime.protocol.handshake import Credentials, accept
from runtime.worker.ranges.activations import PURPOSE, ActivationSender, arriving

SECRET, ROW, LIMIT_S = "secret", 8, 30.0


def part(name, count, number=0):
    tokens = tuple(range(count))
    return ActivationPart(request_id=name, number=number, tokens=tokens, position=0, index=0, samples=True)


class NextHop:
    """A worker that accepts connections; the test says what it does with them."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()

    def accept(self):
        stream, _ = self.listener.accept()
        connection, hello = accept(stream, SECRET)
        assert hello.purpose == PURPOSE and hello.worker == "a/0"
        return connection


@pytest.fixture
def there():
    hop = NextHop()
    yield hop
    hop.listener.close()


@pytest.fixture
def sender(there):
    lost = queue.SimpleQueue()
    made = ActivationSender(
        Credentials("a/0", PURPOSE, SECRET),
        {"b/0": there.address},
        lambda name, why: lost.put((name, why)),
        deadline_s=1.0,
    )
    made.lost = lost
    return made


def send(sender, name, count, fill, worker="b/0"):
    sender.send(worker, [part(name, count)], [memoryview(bytes([fill]) * count * ROW)])


def test_they_arrive_in_order_with_their_rows(there, sender):
    for number in range(20):
        send(sender, f"r{number}", 1 + number % 3, number)
    sender.send("b/0", [part("x", 2), part("y", 1)], [memoryview(b"x" * 2 * ROW), memoryview(b"y" * ROW)])
    connection, found = there.accept(), []
    for pieces in arriving(connection, ROW):
        found += [(piece.part.request_id, bytes(piece.rows)) for piece in pieces]
        if len(found) == 22:
            break
    expected = [(f"r{n}", bytes([n]) * (1 + n % 3) * ROW) for n in range(20)]
    assert found == [*expected, ("x", b"x" * 2 * ROW), ("y", b"y" * ROW)]
    connection.close()


def test_what_was_not_confirmed_is_lost_when_the_connection_breaks_and_the_rest_goes_on(there, sender):
    send(sender, "first", 1, 1)
    connection = there.accept()
    stream = arriving(connection, ROW)
    assert next(stream)[0].part.request_id == "first"
    send(sender, "second", 1, 2)
    assert next(stream)[0].part.request_id == "second"  # which confirms the first, and not the second
    connection.close()
    assert sender.lost.get(timeout=LIMIT_S)[0] == "second"
    send(sender, "third", 1, 3)
    again = there.accept()
    assert next(arriving(again, ROW))[0].part.request_id == "third"
    assert sender.lost.empty()
    again.close()


def test_a_worker_that_takes_nothing_has_lost_what_was_sent(there, sender):
    send(sender, "r", 1, 1)
    silent = there.accept()
    name, why = sender.lost.get(timeout=LIMIT_S)
    assert name == "r" and "took nothing" in why
    silent.close()


def test_a_worker_that_does_not_listen_or_is_unknown_gets_nothing(there, sender):
    there.listener.close()
    send(sender, "r", 1, 1)
    assert sender.lost.get(timeout=LIMIT_S)[0] == "r"
    send(sender, "s", 1, 1, worker="nobody/0")
    name, why = sender.lost.get(timeout=LIMIT_S)
    assert name == "s" and "address is unknown" in why


def test_a_worker_that_has_moved_is_found_at_its_new_address(there, sender):
    send(sender, "r", 1, 1)
    connection = there.accept()
    stream = arriving(connection, ROW)
    next(stream)
    confirmed = threading.Thread(target=lambda: next(stream, None))
    confirmed.start()
    elsewhere = NextHop()
    sender.reconnect({"b/0": elsewhere.address})
    send(sender, "s", 1, 1)
    moved = elsewhere.accept()
    assert next(arriving(moved, ROW))[0].part.request_id == "s"
    confirmed.join(LIMIT_S)
    moved.close()
    elsewhere.listener.close()


@pytest.mark.parametrize(
    "message",
    [
        ActivationsTaken(count=1),
        Activations(parts=(part("r", 2),), payload_bytes=ROW),
        Activations(parts=(), payload_bytes=ROW),
    ],
)
def test_what_is_no_activations_breaks_the_connection(message):
    ours, theirs = socket.socketpair()
    ours.sendall(encode(message))
    with pytest.raises(ConnectionError):
        next(arriving(Connection(theirs), ROW))
    ours.close()
