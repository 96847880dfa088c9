"""A channel over one libp2p stream: the asyncio side queues and awaits frames, the trio side moves the bytes.

Each counter is written by only one thread, so no lock is needed. All waiting frames go into one write,
because a libp2p write costs some hundred microseconds, whatever its size.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import cast

import trio
from libp2p.network.stream.net_stream import NetStream
from libp2p.stream_muxer.yamux.yamux import DEFAULT_WINDOW_SIZE, YamuxStream

from runtime.frames import HEAD_BYTES, MAX_FRAME_BYTES, BadFrame, body_length
from runtime.p2p.transport.bridge import Bridge
from runtime.p2p.transport.channel import MAX_UNREAD_BYTES, MAX_UNSENT_BYTES, Channel
from runtime.p2p.transport.gate import error_line, first_of
from runtime.p2p.transport.network import ContainedYamux

log = logging.getLogger(__name__)

WRITE_BYTES = 32 * 1024  # libp2p fails a read of more than 100 pieces; safe with packets down to 328 bytes
READ_BYTES = 256 * 1024
WINDOW_BYTES = 1024 * 1024  # how much the peer may send ahead
GRANT_BYTES = WINDOW_BYTES // 4  # the window is extended in steps of this size
STALL_S = 30.0  # if the peer takes nothing for this long, the channel breaks
CREDIT_EVERY_S = 0.005
CLOSE_S = 2.0  # how long a close waits for frames that were sent before it


class StreamChannel(Channel):
    """A channel over a stream: created and `run` by the trio thread, otherwise called by asyncio."""

    def __init__(self, stream: NetStream, peer_id: str, service: str, bridge: Bridge) -> None:
        self.peer_id, self.service = peer_id, service
        self._stream, self._muxed, self._bridge = stream, cast(YamuxStream, stream.muxed_stream), bridge
        self._muxer = cast(ContainedYamux, self._muxed.conn)
        # used by the asyncio thread only
        self._inbox: deque[bytes] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._queued_bytes = self._taken_bytes = 0
        self._ended = False
        self.on_end: Callable[[StreamChannel], None] | None = None
        # used by the trio thread only
        self._written_bytes = self._delivered_bytes = 0
        self._scope = trio.CancelScope()
        self._has_work, self._has_room = trio.Event(), trio.Event()
        self._paused = self._closing = False
        # filled by asyncio, emptied by trio
        self._outbox: deque[bytes] = deque()
        self._wake_asked = False

    # the asyncio side

    def send(self, frame: bytes) -> None:
        if self._ended:
            return
        if len(frame) > MAX_FRAME_BYTES:
            self._break(f"a frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}")
            return
        self._queued_bytes += HEAD_BYTES + len(frame)
        if self._queued_bytes - self._written_bytes > MAX_UNSENT_BYTES:
            self._break(f"the peer has not taken {MAX_UNSENT_BYTES} bytes")
            return
        self._outbox.append(frame)
        if not self._wake_asked:
            self._wake_asked = True
            self._bridge.to_trio(self._wake)

    async def receive(self) -> bytes | None:
        while not self._inbox:
            if self._ended:
                return None
            self._reader = self._bridge.loop.create_future()
            await self._reader
        frame = self._inbox.popleft()
        self._taken_bytes += len(frame)
        if self._paused and self._delivered_bytes - self._taken_bytes <= MAX_UNREAD_BYTES // 2:
            self._bridge.to_trio(self._resume)
        return frame

    def close(self) -> None:
        if not self._ended:
            self._inbox.clear()
            self.end()
            self._bridge.to_trio(self._finish)

    def end(self) -> None:
        """End the channel; frames that have arrived can still be received."""
        self._ended = True
        if self.on_end is not None:
            self.on_end(self)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _deliver(self, frames: list[bytes]) -> None:
        if self._ended:
            return
        self._inbox.extend(frames)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _break(self, reason: str) -> None:
        log.warning("channel %s of peer %s broke: %s", self.service, self.peer_id, reason)
        self.end()
        self._bridge.to_trio(self._scope.cancel)

    # the trio side

    async def run(self) -> None:
        """Move frames in both directions until either end closes, the peer is gone, or the channel breaks."""
        clean = False
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write_until_closed)
                    await self._read_until_closed()
                    nursery.cancel_scope.cancel()
            clean = self._closing or not self._scope.cancelled_caught
        except* BadFrame as errors:
            reason = first_of(errors)
            log.warning("channel %s of peer %s broke: %s", self.service, self.peer_id, reason)
        except* Exception as errors:  # libp2p raises many kinds when a stream is gone
            log.debug("channel %s of peer %s: %s", self.service, self.peer_id, error_line(errors))
        finally:
            self._bridge.to_asyncio(self.end)
            with trio.move_on_after(CLOSE_S) as scope:
                scope.shield = True
                try:
                    await (self._stream.close() if clean else self._stream.reset())
                except Exception as error:
                    log.debug("closing channel %s of peer %s: %s", self.service, self.peer_id, error)

    def _wake(self) -> None:
        self._has_work.set()

    def _finish(self) -> None:
        """Write the queued frames, within CLOSE_S, then end the channel."""
        self._closing = True
        self._scope.deadline = trio.current_time() + CLOSE_S
        self._has_work.set()

    def _resume(self) -> None:
        self._has_room.set()

    async def _write_until_closed(self) -> None:
        while True:
            await self._has_work.wait()
            self._has_work = trio.Event()
            self._wake_asked = False  # before the queue is emptied, so that later frames wake this again
            while self._outbox:
                batch = self._next_batch()
                for start in range(0, len(batch), WRITE_BYTES):
                    piece = batch[start : start + WRITE_BYTES]
                    await self._credit(len(piece))
                    await self._muxer.send_data(self._muxed, piece)
                self._written_bytes += len(batch)
            if self._closing:
                self._scope.cancel()
                return

    def _next_batch(self) -> bytes:
        """Queued frames with their lengths: as many as fit into one write, but at least one."""
        parts: list[bytes] = []
        size = 0
        while self._outbox and size < WRITE_BYTES:
            frame = self._outbox.popleft()
            parts += (len(frame).to_bytes(HEAD_BYTES, "little"), frame)
            size += HEAD_BYTES + len(frame)
        return b"".join(parts)

    async def _credit(self, size_bytes: int) -> None:
        """Wait until the peer's window has room for these bytes.

        Raises
        ------
        BadFrame : the peer grants no room for STALL_S
        """
        until = trio.current_time() + STALL_S
        while self._muxed.send_window < size_bytes and not self._muxed.closed:
            if trio.current_time() > until:
                raise BadFrame(f"the peer has taken nothing for {STALL_S:g} s")
            await trio.sleep(CREDIT_EVERY_S)

    async def _read_until_closed(self) -> None:
        buffer, needed = bytearray(), HEAD_BYTES
        owed = WINDOW_BYTES - DEFAULT_WINDOW_SIZE
        while True:
            if owed >= GRANT_BYTES:
                await self._muxer.grant(self._muxed, owed)
                owed = 0
            data = await self._muxer.read_stream(self._muxed.stream_id, READ_BYTES)
            if not data:
                return
            owed += len(data)
            buffer += data
            if len(buffer) < needed:
                continue
            frames, start = [], 0
            while True:
                needed = HEAD_BYTES
                if len(buffer) - start >= HEAD_BYTES:
                    needed += body_length(buffer[start : start + HEAD_BYTES])
                if len(buffer) - start < needed:
                    break
                frames.append(bytes(buffer[start + HEAD_BYTES : start + needed]))
                start += needed
            del buffer[:start]
            if frames:
                self._delivered_bytes += sum(map(len, frames))
                self._bridge.to_asyncio(self._deliver, frames)
                await self._wait_for_room()

    async def _wait_for_room(self) -> None:
        while self._delivered_bytes - self._taken_bytes > MAX_UNREAD_BYTES:
            self._has_room = trio.Event()
            self._paused = True  # before the check, so that a reader that empties the inbox meanwhile sees it
            if self._delivered_bytes - self._taken_bytes > MAX_UNREAD_BYTES // 2:
                await self._has_room.wait()
            self._paused = False
