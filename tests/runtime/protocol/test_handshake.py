"""Connections between workers: each side proves that it knows the secret, and recorded traffic is useless to
others."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from runtime.frames import HEAD_BYTES
from runtime.protocol.between_workers import NONCE_BYTES, Challenge, Hello, KvTaken, Proof
from runtime.protocol.codec import decode
from runtime.protocol.framing import Connection, listen
from runtime.protocol.handshake import MOST_PENDING, Credentials, PendingHandshakes, accept, connect
from runtime.protocol.message import PROTOCOL_VERSION, Message

SECRET = "5a" * 32
TIMEOUT_S = 20.0
WORKER = Credentials("p/0", "kv", SECRET)


class Door:
    """A listener that admits callers who know the secret, and keeps the outcome of each connection in
    order."""

    def __init__(self, secret: str = SECRET) -> None:
        self.listener = listen("127.0.0.1")
        self.address = self.listener.getsockname()[:2]
        self.accepted: list[tuple[Connection, Hello] | None] = []
        self._secret, self._changed = secret, threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                stream, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(stream,), daemon=True).start()

    def _greet(self, stream: socket.socket) -> None:
        found = accept(stream, self._secret)
        with self._changed:
            self.accepted.append(found)
            self._changed.notify_all()

    def outcome(self, number: int) -> tuple[Connection, Hello] | None:
        """The outcome of the connection with this number."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.accepted) > number, TIMEOUT_S)
            return self.accepted[number]

    def caller(self) -> Connection:
        """A connection that has not said anything yet."""
        return Connection(socket.create_connection(self.address, TIMEOUT_S))

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for each in self.accepted:
            if each is not None:
                each[0].close()


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door()
    yield made
    made.close()


@contextmanager
def listener_that(serves: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """The address of a listener that handles its only connection as the test wants."""
    listener = listen("127.0.0.1")
    thread = threading.Thread(target=lambda: serves(listener.accept()[0]), daemon=True)
    thread.start()
    yield listener.getsockname()[:2]
    thread.join(TIMEOUT_S)
    listener.close()
    assert not thread.is_alive()


@contextmanager
def wire_tap(address: tuple[str, int]) -> Iterator[tuple[tuple[str, int], bytearray, bytearray]]:
    """The address of a proxy to a listener, and the bytes that cross it in each direction."""
    there, back = bytearray(), bytearray()

    def carry(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
        while data := source.recv(65536):
            kept.extend(data)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    def serve(near: socket.socket) -> None:
        far = socket.create_connection(address)
        answers = threading.Thread(target=carry, args=(far, near, back), daemon=True)
        answers.start()
        carry(near, far, there)
        answers.join()
        near.close()
        far.close()

    with listener_that(serve) as tapped:
        yield tapped, there, back


def frames(data: bytearray) -> list[bytes]:
    """The frames in a stream, with their lengths."""
    found, rest = [], bytes(data)
    while rest:
        end = HEAD_BYTES + int.from_bytes(rest[:HEAD_BYTES], "little")
        found.append(rest[:end])
        rest = rest[end:]
    return found


def message(frame: bytes) -> Message:
    return decode(frame[HEAD_BYTES:])


def overheard(door: Door) -> tuple[list[bytes], list[bytes]]:
    """The frames of a good handshake in both directions, and of one message after it."""
    with wire_tap(door.address) as (address, there, back):
        connection = connect(address, WORKER, TIMEOUT_S)
        connection.send(KvTaken(slices=7))
        accepted = door.outcome(0)
        assert accepted is not None and accepted[0].receive() == KvTaken(slices=7)
        connection.close()
        accepted[0].close()
    return frames(there), frames(back)


def test_both_sides_that_know_the_secret_meet(door: Door) -> None:
    connection = connect(door.address, WORKER, TIMEOUT_S)
    accepted = door.outcome(0)
    assert accepted is not None
    assert (accepted[1].worker, accepted[1].purpose) == ("p/0", "kv")
    connection.send(KvTaken(slices=1))
    assert accepted[0].receive() == KvTaken(slices=1)
    accepted[0].send(KvTaken(slices=2))
    assert connection.receive() == KvTaken(slices=2)
    connection.close()


def test_the_secret_never_crosses_the_wire(door: Door) -> None:
    there, back = overheard(door)
    assert [type(message(frame)) for frame in there] == [Hello, Proof, KvTaken]
    assert [type(message(frame)) for frame in back] == [Challenge]
    for data in (b"".join(there), b"".join(back)):
        assert SECRET.encode() not in data and bytes.fromhex(SECRET) not in data
    assert SECRET not in repr(WORKER)


def test_what_a_worker_was_heard_to_say_opens_nothing(door: Door) -> None:
    """All of it is replayed, but the listener now has another nonce."""
    there, _ = overheard(door)
    again = door.caller()
    again.stream.sendall(b"".join(there))
    assert door.outcome(1) is None
    assert isinstance(again.receive(), Challenge)
    with pytest.raises(OSError):
        if again.receive() is None:
            raise ConnectionError("closed")


def test_what_a_listener_was_heard_to_say_deceives_nobody(door: Door) -> None:
    """A stranger in its place replays its answers, but the worker now has another nonce."""
    _, back = overheard(door)
    told: list[bytes] = []

    def answer(stream: socket.socket) -> None:
        stream.sendall(b"".join(back))
        told.append(bytes(stream.recv(65536)))
        told.append(bytes(stream.recv(65536)))
        stream.close()

    with listener_that(answer) as stranger, pytest.raises(ConnectionError, match="does not know the secret"):
        connect(stranger, WORKER, TIMEOUT_S)
    assert isinstance(message(told[0]), Hello) and told[1] == b""


def test_a_listeners_own_proof_is_not_taken_back(door: Door) -> None:
    """Reflection: the listener makes a proof for every Hello, but it does not prove who connects."""
    caller = door.caller()
    caller.send(Hello(protocol=PROTOCOL_VERSION, worker="p/0", purpose="kv", nonce=bytes(NONCE_BYTES)))
    challenge = caller.receive()
    assert isinstance(challenge, Challenge)
    caller.send(Proof(proof=challenge.proof))
    assert door.outcome(0) is None


def test_a_proof_is_for_what_was_said_alone(door: Door) -> None:
    """A man in the middle cannot turn a KV connection into a control connection."""

    def change(stream: socket.socket) -> None:
        worker, caller = Connection(stream), door.caller()
        hello = worker.receive()
        assert isinstance(hello, Hello)
        caller.send(Hello(protocol=hello.protocol, worker=hello.worker, purpose="control", nonce=hello.nonce))
        answer = caller.receive()
        assert answer is not None
        worker.send(answer)
        worker.close()

    with listener_that(change) as address, pytest.raises(ConnectionError, match="does not know the secret"):
        connect(address, WORKER, TIMEOUT_S)


@pytest.mark.parametrize("theirs", ["", "other", SECRET[:-1], SECRET + "0"])
def test_another_secret_is_refused_on_either_side(theirs: str) -> None:
    door = Door(theirs)
    with pytest.raises(ConnectionError, match="does not know the secret"):
        connect(door.address, WORKER, TIMEOUT_S)
    assert door.outcome(0) is None
    door.close()


def test_a_caller_that_guesses_is_refused(door: Door) -> None:
    for number, proof in enumerate((bytes(32), b"\xff" * 32)):
        caller = door.caller()
        nonce = bytes([number]) * NONCE_BYTES
        caller.send(Hello(protocol=PROTOCOL_VERSION, worker="p/0", purpose="kv", nonce=nonce))
        assert isinstance(caller.receive(), Challenge)
        caller.send(Proof(proof=proof))
        assert door.outcome(number) is None
        caller.close()


@pytest.mark.parametrize("first", [KvTaken(slices=1), Proof(proof=bytes(32))], ids=str)
def test_what_is_no_hello_is_refused(door: Door, first: Message) -> None:
    caller = door.caller()
    caller.send(first)
    assert door.outcome(0) is None
    assert caller.receive() is None


def test_a_listener_that_says_something_else_is_left() -> None:
    def answer(stream: socket.socket) -> None:
        connection = Connection(stream)
        connection.receive()
        connection.send(KvTaken(slices=1))
        connection.receive()
        connection.close()

    with listener_that(answer) as address, pytest.raises(ConnectionError, match="not let this worker in"):
        connect(address, WORKER, TIMEOUT_S)


def test_silent_strangers_make_room_for_one_another_and_keep_no_worker_out() -> None:
    pending = PendingHandshakes()
    outcomes: list[tuple[Connection, Hello] | None] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()

        def take(stream: socket.socket) -> None:
            outcomes.append(pending.accept(stream, SECRET))

        def welcome() -> None:
            while True:
                try:
                    stream, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=take, args=(stream,)).start()

        threading.Thread(target=welcome, daemon=True).start()
        silent = [socket.create_connection(address) for _ in range(3 * MOST_PENDING)]
        connect(address, WORKER, TIMEOUT_S).close()
        assert all(stream.recv(1) == b"" for stream in silent[:MOST_PENDING])
        for stream in silent:
            stream.close()
        server.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + TIMEOUT_S
        while len(outcomes) <= len(silent) and time.monotonic() < deadline:
            time.sleep(0.01)  # Threads of connections that have ended may not have been scheduled yet.
    assert [each[1].worker for each in outcomes if each] == ["p/0"]
