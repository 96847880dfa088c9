"""Frames over stream sockets: the one way that messages travel between processes."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Sequence

from runtime.frames import HEAD_BYTES, MAX_FRAME_BYTES, body_length
from runtime.protocol.codec import decode, encode
from runtime.protocol.message import Message

_MAX_BUFFERS = 512
_SCRATCH_BYTES = 256 * 1024


class Connection:
    """A stream of frames. Sends from several threads don't mix; one thread receives.

    Every failure is an OSError: of the stream itself, or a ConnectionError where the peer breaks
    the protocol (a frame too long, or not a message).
    """

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self.deadline_s: float | None = None
        self._lock = threading.Lock()
        if stream.family in (socket.AF_INET, socket.AF_INET6):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def set_deadline(self, deadline_s: float) -> None:
        """Let no call wait longer for the peer to take or give a byte. It is the kernel that waits: one call
        takes a whole buffer."""
        self.deadline_s = deadline_s
        self.stream.settimeout(None)
        limit = struct.pack("@ll", int(deadline_s), int(deadline_s % 1 * 1e6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self.stream.setsockopt(socket.SOL_SOCKET, option, limit)

    def send(self, message: Message) -> None:
        """Send one frame."""
        frame = encode(message)
        if len(frame) > MAX_FRAME_BYTES:
            raise ConnectionError(f"a {type(message).__name__} frame of {len(frame)} bytes is too long")
        with self._lock:
            self.stream.sendall(frame)

    def send_buffers(self, buffers: Sequence[memoryview]) -> None:
        """Send raw bytes, straight from where they are: a frame, say, and what follows it."""
        with self._lock:
            _send_buffers(self.stream, list(buffers))

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

    def wait_readable(self) -> None:
        """Wait for bytes or the end of the stream, as long as the deadline.

        Raises
        ------
        TimeoutError : nothing came
        """
        poll = select.poll()
        poll.register(self.stream, select.POLLIN)
        if not poll.poll(None if self.deadline_s is None else self.deadline_s * 1000):
            raise TimeoutError("nothing came in time")

    def drain(self, count: int) -> None:
        """Read bytes that nobody wants."""
        scratch = memoryview(bytearray(min(count, _SCRATCH_BYTES)))
        while count > 0:
            size = min(count, len(scratch))
            self.receive_into(scratch[:size])
            count -= size

    def receive_some(self, buffers: list[memoryview]) -> int:
        """Fill buffers with what is here, at least a byte; full ones leave the list."""
        count = self.stream.recvmsg_into(buffers[:_MAX_BUFFERS])[0]
        if count == 0:
            raise ConnectionError("the peer closed the stream inside a frame")
        _skip(buffers, count)
        return count

    def close(self) -> None:
        """Close at once; a thread that waits in receive wakes up."""
        with contextlib.suppress(OSError):
            self.stream.shutdown(socket.SHUT_RDWR)
        self.stream.close()


def listen(host: str) -> socket.socket:
    """A listener on a free port of that address only."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=128)


def _send_buffers(stream: socket.socket, buffers: list[memoryview]) -> None:
    while buffers:
        _skip(buffers, stream.sendmsg(buffers[:_MAX_BUFFERS]))


def _skip(buffers: list[memoryview], count: int) -> None:
    """Take the first bytes off a list of buffers."""
    full = 0
    while full < len(buffers) and count >= len(buffers[full]):
        count -= len(buffers[full])
        full += 1
    del buffers[:full]
    if count:
        buffers[0] = buffers[0][count:]
