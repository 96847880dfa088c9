"""Frames over stream sockets: the one way that messages travel between processes."""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
from collections.abc import Sequence

from runtime.messages import (
    HEAD_BYTES,
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Hello,
    Message,
    body_length,
    decode,
    encode,
)

HELLO_LIMIT_BYTES = 4096
HELLO_TIMEOUT_S = 5.0
_MAX_BUFFERS = 512


class Connection:
    """A stream of frames. Sends from several threads don't mix; one thread receives.

    Every failure is an OSError: of the stream itself, or a ConnectionError where the peer breaks
    the protocol (a frame too long, or not a message).
    """

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self._lock = threading.Lock()
        if stream.family in (socket.AF_INET, socket.AF_INET6):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Message) -> None:
        """Send one frame."""
        frame = encode(message)
        if len(frame) > MAX_FRAME_BYTES:
            raise ConnectionError(f"a {type(message).__name__} frame of {len(frame)} bytes is too long")
        with self._lock:
            self.stream.sendall(frame)

    def send_with_payload(self, message: Message, payload: Sequence[memoryview]) -> None:
        """Send one frame and the raw bytes that follow it, straight from their buffers."""
        with self._lock:
            _send_buffers(self.stream, [memoryview(encode(message)), *payload])

    def receive(self, limit_bytes: int = MAX_FRAME_BYTES) -> Message | None:
        """The next message; None when the peer has closed the stream between two frames."""
        head = bytearray(HEAD_BYTES)
        first = self.stream.recv_into(head)
        if first == 0:
            return None
        self.receive_into(memoryview(head)[first:])
        body = bytearray(body_length(head, limit_bytes))
        self.receive_into(memoryview(body))
        return decode(body)

    def receive_into(self, buffer: memoryview) -> None:
        """Fill a buffer with the stream's next bytes."""
        while buffer:
            count = self.stream.recv_into(buffer)
            if count == 0:
                raise ConnectionError("the peer closed the stream inside a frame")
            buffer = buffer[count:]

    def close(self) -> None:
        """Close at once; a thread that waits in receive wakes up."""
        with contextlib.suppress(OSError):
            self.stream.shutdown(socket.SHUT_RDWR)
        self.stream.close()


def listen(host: str) -> socket.socket:
    """A listener on a free port of that address only."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=128)


def connect(address: tuple[str, int], hello: Hello, timeout_s: float) -> Connection:
    """Connect to a worker and introduce this one; the stream keeps `timeout_s` as its timeout."""
    connection = Connection(socket.create_connection(address, timeout=timeout_s))
    try:
        connection.send(hello)
    except OSError:
        connection.close()
        raise
    return connection


def accept_hello(stream: socket.socket, secret: str) -> tuple[Connection, Hello] | None:
    """The introduced connection; None, and the stream closed, unless the first frame is a Hello of
    this protocol version with the right secret, within a few seconds."""
    stream.settimeout(HELLO_TIMEOUT_S)
    connection = Connection(stream)
    with contextlib.suppress(OSError):
        hello = connection.receive(HELLO_LIMIT_BYTES)
        if isinstance(hello, Hello) and _is_ours(hello, secret):
            stream.settimeout(None)
            return connection, hello
    connection.close()
    return None


def _is_ours(hello: Hello, secret: str) -> bool:
    same_secret = hmac.compare_digest(hello.secret.encode(), secret.encode())
    return same_secret and hello.protocol == PROTOCOL_VERSION


def _send_buffers(stream: socket.socket, buffers: list[memoryview]) -> None:
    position = 0
    while position < len(buffers):
        sent = stream.sendmsg(buffers[position : position + _MAX_BUFFERS])
        while position < len(buffers) and sent >= len(buffers[position]):
            sent -= len(buffers[position])
            position += 1
        if sent:
            buffers[position] = buffers[position][sent:]
