"""Frames on a byte stream: 4 bytes of length (little-endian), then a body of so many bytes.

All that crosses a process travels in frames: between the front end and its workers (runtime/protocol), and
between the nodes of a network (runtime/p2p).
"""

from __future__ import annotations

HEAD_BYTES = 4
MAX_FRAME_BYTES = 64 * 1024 * 1024


class BadFrame(ConnectionError):
    """The peer broke the protocol; the stream is of no further use."""


def body_length(head: bytes | bytearray, limit_bytes: int = MAX_FRAME_BYTES) -> int:
    """The length of a frame's body, from the frame's first HEAD_BYTES.

    Raises
    ------
    BadFrame : the length exceeds the limit
    """
    length = int.from_bytes(head, "little")
    if length > limit_bytes:
        raise BadFrame(f"a frame of {length} bytes is over the limit of {limit_bytes}")
    return length
