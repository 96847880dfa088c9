"""A link: the two-way stream of messages between the front end and one worker."""

from __future__ import annotations

import asyncio
import socket

from cost_model.errors import HexGen2Error
from runtime.messages import HEAD_BYTES, BadFrame, Message, body_length, decode, encode


class Link:
    """Messages over a byte stream, framed as runtime.messages says; heard counts those received."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.heard = 0

    @classmethod
    async def over(cls, connected: socket.socket) -> Link:
        """A link over a connected socket, which it owns from now on."""
        connected.setblocking(False)
        return cls(*await asyncio.open_connection(sock=connected))

    def send(self, message: Message) -> None:
        """Queue a message; a peer that is gone shows in `receive`, never here."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def receive(self) -> Message | None:
        """The next message, or None once the peer is gone.

        Raises
        ------
        HexGen2Error : the peer sent something that is not one of our messages
        """
        try:
            body = await self._reader.readexactly(body_length(await self._reader.readexactly(HEAD_BYTES)))
            message = decode(body)
            self.heard += 1
            return message
        except BadFrame as error:
            raise HexGen2Error(f"a worker broke the protocol: {error}") from error
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        """Close both directions; what was sent before is still delivered."""
        self._writer.close()
