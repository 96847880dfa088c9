"""Messages as frames: the msgpack of a tagged struct behind its length (see runtime/frames.py)."""

from __future__ import annotations

import msgspec

from runtime.frames import HEAD_BYTES, BadFrame
from runtime.protocol.between_workers import BetweenWorkers
from runtime.protocol.from_workers import FromWorker
from runtime.protocol.message import Message
from runtime.protocol.to_attention_workers import ToAttentionWorker
from runtime.protocol.to_workers import ToWorker

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ToWorker | FromWorker | BetweenWorkers | ToAttentionWorker)


def encode(message: Message) -> bytes:
    """The frame of a message, length included."""
    body = _encoder.encode(message)
    return len(body).to_bytes(HEAD_BYTES, "little") + body


def decode(body: bytes | bytearray | memoryview) -> Message:
    """The message in a frame's body.

    Raises
    ------
    BadFrame : the body is not a message of this protocol
    """
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"not a message: {error}") from error
