"""A channel: the two-way stream of frames between this node and one peer, whatever carries it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from runtime.frames import MAX_FRAME_BYTES

MAX_UNSENT_BYTES = 2 * MAX_FRAME_BYTES  # more than this not taken by the peer: the channel is broken
MAX_UNREAD_BYTES = 8 * 1024 * 1024  # received and not yet asked for; the peer waits while there is more


class Channel(ABC):
    """Frames of at most MAX_FRAME_BYTES to and from one peer, in order, each delivered once."""

    peer_id: str

    @abstractmethod
    def send(self, frame: bytes) -> None:
        """Queue a frame; never waits, and is ignored once the channel is closed.

        A frame over MAX_FRAME_BYTES, or MAX_UNSENT_BYTES of frames that the peer does not take, close it.
        """

    @abstractmethod
    async def receive(self) -> bytes | None:
        """The next frame, or None once the peer is gone or either end has closed the channel."""

    @abstractmethod
    def close(self) -> None:
        """Close both directions; what was sent before is still delivered."""
