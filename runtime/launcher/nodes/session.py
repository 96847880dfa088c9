"""The workers of one replica on this node, which live as long as the channel to their head."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

from runtime.frames import HEAD_BYTES, MAX_FRAME_BYTES, BadFrame, body_length
from runtime.launcher.nodes.agent_messages import (
    StartFailed,
    StartWorkers,
    StopWorkers,
    WorkerEnded,
    WorkerFrame,
    WorkersEnded,
    decode,
    encode,
)
from runtime.launcher.processes import WorkerProcesses
from runtime.p2p.transport.channel import Channel

log = logging.getLogger(__name__)


class WorkerSession:
    """Carries frames between a head's channel and the workers' sockets.

    A session ends when the head asks for it, when its channel ends, or by `end`; its workers end with it. A
    head cannot resume a broken channel: frames may have been lost, and a replica that missed one is useless.

    Attributes
    ----------
    head : id of the peer that the workers serve
    workers : their names
    ended : set once all workers of the session have ended
    """

    def __init__(self, channel: Channel, request: StartWorkers, processes: WorkerProcesses) -> None:
        self.head, self.workers = channel.peer_id, frozenset(request.workers)
        self.ended = asyncio.Event()
        self._channel, self._request, self._processes = channel, request, processes
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Start the workers and carry their frames until the session ends."""
        spawning: asyncio.Task[None] | None = None
        gracefully = False
        try:
            theirs = {worker: await self._pair(worker) for worker in self._request.workers}
            spawning = asyncio.create_task(self._spawn(theirs))
            gracefully = await self._carry()
        except BadFrame as error:
            log.warning("head %s broke the protocol: %s", self.head, error)
        finally:
            await asyncio.shield(asyncio.ensure_future(self._close(spawning, gracefully)))

    def end(self) -> None:
        """End the session soon, even if workers are still running."""
        self._channel.close()

    async def _pair(self, worker: str) -> socket.socket:
        """Open a socket pair, begin to read our end, and return the worker's end."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        reader, self._writers[worker] = await asyncio.open_connection(sock=ours)
        self._tasks.append(asyncio.create_task(self._read_worker(worker, reader)))
        return theirs

    async def _spawn(self, sockets: dict[str, socket.socket]) -> None:
        try:
            await self._processes.spawn(sockets, self._request.engine)
        except Exception as error:
            log.exception("cannot start the workers of replica %s", self._request.replica)
            self._channel.send(encode(StartFailed(kind="fault", text=f"cannot start workers: {error}")))
            self._channel.close()

    async def _carry(self) -> bool:
        """Pass frames to the workers; True when the head asks to stop, False when the channel ends."""
        while (frame := await self._channel.receive()) is not None:
            match decode(frame):
                case WorkerFrame(worker=worker, body=body) if worker in self._writers:
                    self._write(worker, body)
                case StopWorkers():
                    return True
                case other:
                    raise BadFrame(f"unexpected message {type(other).__name__}")
        return False

    def _write(self, worker: str, body: bytes) -> None:
        """Send a frame to a worker; kill it if it has stopped reading, before its frames fill the memory."""
        writer = self._writers[worker]
        if writer.transport.get_write_buffer_size() > MAX_FRAME_BYTES:
            log.error("killed worker %s: it does not read its messages", worker)
            self._processes.kill([worker])
        elif not writer.is_closing():
            writer.write(len(body).to_bytes(HEAD_BYTES, "little") + body)

    async def _read_worker(self, worker: str, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                body = await reader.readexactly(body_length(await reader.readexactly(HEAD_BYTES)))
                self._channel.send(encode(WorkerFrame(worker=worker, body=body)))
        self._channel.send(encode(WorkerEnded(worker=worker)))

    async def _close(self, spawning: asyncio.Task[None] | None, gracefully: bool) -> None:
        if spawning is not None:
            await asyncio.wait([spawning])
        workers = list(self.workers)
        if gracefully:
            await self._processes.join(workers)
        self._processes.kill(workers)
        await self._processes.join(workers)
        for task in self._tasks:
            task.cancel()
        for writer in self._writers.values():
            writer.close()
        self._channel.send(encode(WorkersEnded()))
        self._channel.close()
        self.ended.set()
