"""Accepts connections of workers that another system starts: each connects to the head, with a handshake."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

from runtime.protocol.framing import listen
from runtime.protocol.handshake import accept


class WorkerListener:
    """Listens at the head and hands out connections by worker; strangers are turned away.

    Parameters
    ----------
    host : address of this machine, as the workers reach it
    secret : what a worker must prove that it knows
    purpose : what a worker must say that it connects for (see Hello)
    """

    def __init__(self, host: str, secret: str, purpose: str) -> None:
        self._listener = listen(host)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._secret, self._purpose = secret, purpose
        self._loop = asyncio.get_running_loop()
        self._expected: dict[str, asyncio.Future[socket.socket]] = {}
        threading.Thread(target=self._accept, name="worker listener", daemon=True).start()

    def expect(self, worker: str) -> asyncio.Future[socket.socket]:
        """The next connection of that worker."""
        self._expected[worker] = future = self._loop.create_future()
        return future

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._shake_hands, args=(stream,), daemon=True).start()

    def _shake_hands(self, stream: socket.socket) -> None:
        accepted = accept(stream, self._secret)
        if accepted is None:
            return
        connection, hello = accepted
        if hello.purpose != self._purpose:
            connection.close()
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._hand_over, hello.worker, connection.stream)

    def _hand_over(self, worker: str, stream: socket.socket) -> None:
        future = self._expected.pop(worker, None)
        if future is None or future.done():
            stream.close()
        else:
            future.set_result(stream)
