"""A link: the two-way stream of messages between the front end and one worker."""

from __future__ import annotations

import asyncio
import socket

import msgspec

from cost_model.errors import HexGen2Error
from runtime.messages import MAX_FRAME_BYTES, Message, decode, encode


class Link:
    """Messages over a byte stream, framed as runtime.messages says."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

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
            size = int.from_bytes(await self._reader.readexactly(4), "little")
            if size > MAX_FRAME_BYTES:
                raise HexGen2Error(f"a worker sent a frame of {size} bytes, more than {MAX_FRAME_BYTES}")
            return decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        except msgspec.MsgspecError as error:
            raise HexGen2Error(f"a worker sent an unreadable message ({error})") from error

    def close(self) -> None:
        """Close both directions; what was sent before is still delivered."""
        self._writer.close()
