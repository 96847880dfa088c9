"""Links between the front end and its workers: one two-way stream of messages for each worker."""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod

from cost_model.errors import HexGen2Error
from runtime.frames import HEAD_BYTES, BadFrame, body_length
from runtime.protocol.codec import decode, encode
from runtime.protocol.message import Message


class WorkerLink(ABC):
    """Messages to and from one worker, wherever it runs; `heard` counts those received."""

    heard: int = 0

    @abstractmethod
    def send(self, message: Message) -> None:
        """Queue a message. Never fails: that a worker is gone shows in `receive`."""

    @abstractmethod
    async def receive(self) -> Message | None:
        """The next message, or None once the worker is gone. A call that is cancelled loses no message.

        Raises
        ------
        HexGen2Error : the worker sent something that is no message
        """

    @abstractmethod
    def close(self) -> None:
        """Close both directions; what was sent before is still delivered."""


class StreamLink(WorkerLink):
    """Messages over a byte stream, in frames (see runtime/frames.py).

    Everything sent in one turn of the event loop leaves in one write, since each write wakes the worker up.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._unsent: list[bytes] = []
        self._body_bytes: int | None = None  # of the message whose head has been read

    @classmethod
    async def over(cls, connected: socket.socket) -> StreamLink:
        """A link over a connected socket, which the link owns from now on."""
        connected.setblocking(False)
        return cls(*await asyncio.open_connection(sock=connected))

    def send(self, message: Message) -> None:
        if self._writer.is_closing():
            return
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(encode(message))

    async def receive(self) -> Message | None:
        try:
            if self._body_bytes is None:
                self._body_bytes = body_length(await self._reader.readexactly(HEAD_BYTES))
            body = await self._reader.readexactly(self._body_bytes)
            self._body_bytes = None
            message = decode(body)
            self.heard += 1
            return message
        except BadFrame as error:
            raise HexGen2Error(f"a worker broke the protocol: {error}") from error
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._unsent and not self._writer.is_closing():
            self._writer.write(b"".join(self._unsent))
        self._unsent.clear()
