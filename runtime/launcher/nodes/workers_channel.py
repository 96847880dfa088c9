"""The head's end of a channel to a node's agent, shared by the links to the workers there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from cost_model.errors import HexGen2Error, InputError
from runtime.frames import HEAD_BYTES, BadFrame
from runtime.launcher.nodes.agent_messages import (
    AgentMessage,
    StartFailed,
    StopWorkers,
    WorkerEnded,
    WorkerFrame,
    WorkersEnded,
    decode,
    encode,
)
from runtime.launcher.worker_link import WorkerLink
from runtime.p2p.transport.channel import Channel
from runtime.protocol.codec import decode as decode_message
from runtime.protocol.codec import encode as encode_message
from runtime.protocol.message import Message

log = logging.getLogger(__name__)


class ChannelLink(WorkerLink):
    """The link to one worker over a channel that several workers share."""

    def __init__(self, worker: str, shared: WorkersChannel) -> None:
        self._worker, self._shared = worker, shared
        self._arrived: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self._closed = False

    def send(self, message: Message) -> None:
        if not self._closed:
            body = encode_message(message)[HEAD_BYTES:]
            self._shared.send(WorkerFrame(worker=self._worker, body=body))

    async def receive(self) -> Message | None:
        if self._closed:
            return None
        body = await self._arrived.get()
        if isinstance(body, bytes):
            try:
                return decode_message(body)
            except BadFrame as error:
                raise HexGen2Error(f"a worker broke the protocol: {error}") from error
        self._arrived.put_nowait(body)  # later calls see the end too
        if body is not None:
            raise body
        return None

    def close(self) -> None:
        self._closed = True

    def put(self, body: bytes | Exception | None) -> None:
        """Queue a message from this worker, None if it has ended, or the error that ended it."""
        if isinstance(body, bytes):
            self.heard += 1
        self._arrived.put_nowait(body)


class WorkersChannel:
    """Carries messages to and from a replica's workers on one node.

    Attributes
    ----------
    links : the link to each worker; all end with the channel
    """

    def __init__(self, channel: Channel, node: str, workers: Sequence[str]) -> None:
        self.links = {worker: ChannelLink(worker, self) for worker in workers}
        self._channel, self._node = channel, node
        self._ended = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    def send(self, message: AgentMessage) -> None:
        """Queue a message to the agent; ignored once the channel is closed."""
        self._channel.send(encode(message))

    async def stop(self, grace_s: float) -> None:
        """Ask the agent to end the workers, wait for that, and close the channel."""
        self.send(StopWorkers())
        try:
            async with asyncio.timeout(grace_s):
                await self._ended.wait()
        except TimeoutError:
            log.warning("node %s did not confirm within %g s that its workers ended", self._node, grace_s)
        self.close()

    def close(self) -> None:
        """Close the channel; the agent then kills workers that still run."""
        self._channel.close()
        self._reading.cancel()
        self._end(None)

    async def _read(self) -> None:
        reason: Exception | None = None
        try:
            while (frame := await self._channel.receive()) is not None:
                match decode(frame):
                    case WorkerFrame(worker=worker, body=body) if worker in self.links:
                        self.links[worker].put(body)
                    case WorkerEnded(worker=worker) if worker in self.links:
                        self.links[worker].put(None)
                    case StartFailed() as problem:
                        reason = self._error(problem)
                        break
                    case WorkersEnded():
                        break
                    case other:
                        raise BadFrame(f"unexpected message {type(other).__name__}")
        except BadFrame as error:
            reason = HexGen2Error(f"node {self._node} broke the protocol: {error}")
        self._channel.close()
        self._end(reason)

    def _end(self, reason: Exception | None) -> None:
        if not self._ended.is_set():
            self._ended.set()
            for link in self.links.values():
                link.put(reason)

    def _error(self, problem: StartFailed) -> HexGen2Error:
        if problem.kind == "input":
            text, _, remedy = problem.text.rpartition("; ")
            return InputError(f"node {self._node}", "", text or remedy, remedy if text else "see its log")
        return HexGen2Error(f"node {self._node}: {problem.text}")
