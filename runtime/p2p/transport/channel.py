"""The interface of channels: two-way streams of frames between this node and one peer."""

from __future__ import annotations

from abc import ABC, abstractmethod

from runtime.frames import MAX_FRAME_BYTES

MAX_UNSENT_BYTES = 2 * MAX_FRAME_BYTES  # if the peer has not taken more than this, the channel breaks
MAX_UNREAD_BYTES = 8 * 1024 * 1024  # received but not yet read; beyond this the peer must wait


class Channel(ABC):
    """Carries frames of at most MAX_FRAME_BYTES to and from one peer, in order and each exactly once."""

    peer_id: str

    @abstractmethod
    def send(self, frame: bytes) -> None:
        """Queue a frame, without waiting; ignored once the channel is closed.

        The channel closes if a frame exceeds MAX_FRAME_BYTES or the peer leaves MAX_UNSENT_BYTES untaken.
        """

    @abstractmethod
    async def receive(self) -> bytes | None:
        """The next frame; None once the peer is gone or either end has closed the channel."""

    @abstractmethod
    def close(self) -> None:
        """Close both directions; frames sent before are still delivered."""
