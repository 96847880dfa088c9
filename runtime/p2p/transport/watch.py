"""Pings that detect frozen peers: their sockets stay open, and libp2p itself needs 10 s to notice."""

from __future__ import annotations

import struct
from collections.abc import Callable

import trio
from libp2p.network.stream.net_stream import NetStream

from runtime.liveness import LOOKS_A_PERIOD, PING_EVERY_S, SilenceTimer
from runtime.p2p.transport.network import ContainedYamux

STAMP = struct.Struct("<d")


async def silence(muxer: ContainedYamux, every_s: float = PING_EVERY_S) -> None:
    """Return once the peer has been silent for too long.

    Any received data counts as a sign of life; `ping` makes the peer answer something.
    """
    timer = SilenceTimer()
    while not timer.has_expired(muxer.heard):
        await trio.sleep(every_s / LOOKS_A_PERIOD)


async def ping(stream: NetStream, answered: Callable[[float], None], every_s: float = PING_EVERY_S) -> None:
    """Send timestamps until cancelled; calls `answered` with the milliseconds until each echo."""

    async def send() -> None:
        while True:
            await stream.write(STAMP.pack(trio.current_time()))
            await trio.sleep(every_s)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        while True:
            (sent_at,) = STAMP.unpack(await read_exactly(stream, STAMP.size))
            answered(1000 * (trio.current_time() - sent_at))


async def echo(stream: NetStream) -> None:
    """Answer a peer's pings until it closes."""
    while True:
        await stream.write(await read_exactly(stream, STAMP.size))


async def cancel_at(event: trio.Event, scope: trio.CancelScope) -> None:
    """Cancel the scope once the event is set."""
    await event.wait()
    scope.cancel()


async def read_exactly(stream: NetStream, size_bytes: int) -> bytes:
    """Read exactly this many bytes.

    Raises
    ------
    EOFError : the stream ended first
    """
    data = b""
    while len(data) < size_bytes:
        more = await stream.read(size_bytes - len(data))
        if not more:
            raise EOFError
        data += more
    return data
