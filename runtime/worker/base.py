"""What the process of every worker does: open sockets, read them in threads, and end with a reason."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NoReturn, TypeVar

from cost_model.errors import InputError
from runtime.protocol.between_workers import Hello
from runtime.protocol.framing import Connection, listen
from runtime.protocol.from_workers import Failed, Listening, Pong
from runtime.protocol.handshake import PendingHandshakes
from runtime.protocol.message import PROTOCOL_VERSION, Message
from runtime.protocol.to_workers import Configure, Connect, Ping, Shutdown

log = logging.getLogger(__name__)

_MessageType = TypeVar("_MessageType", bound=Message)
_GRACE_S = 0.5  # lets the parent's Shutdown arrive before a fault is reported that is only a peer's exit


class WorkerProcess(ABC):
    """The base of workers; their main thread is in `run`."""

    def __init__(self, config: Configure, control: Connection) -> None:
        self.config, self.control = config, control
        self._dying = threading.Lock()
        self._pending = PendingHandshakes()

    @abstractmethod
    def run(self) -> NoReturn:
        """Serve until the process ends."""

    def check(self) -> None:
        """Check that the configuration is for this version and keeps strangers out; take its cores."""
        config = self.config
        if config.protocol != PROTOCOL_VERSION:
            raise RuntimeError(f"the supervisor speaks protocol {config.protocol}, not {PROTOCOL_VERSION}")
        if not config.secret:
            raise RuntimeError("the supervisor gave no secret, so anybody could connect")
        if config.cores:
            os.sched_setaffinity(0, config.cores)

    def open(self, store_port: int = 0) -> Connect:
        """Listen for other workers, and wait for their addresses."""
        listener = listen(self.config.host)
        port = listener.getsockname()[1]
        self.control.send(Listening(worker=self.config.worker, port=port, store_port=store_port))
        addresses = awaited(self.control, Connect)
        self._start("control", self._read_control)
        self._start("accept", self._accept, listener)
        return addresses

    def take(self, message: Message) -> None:
        """Take a message of the supervisor or the front end, in their reader thread."""
        log.warning("worker %s: unexpected %s", self.config.worker, type(message).__name__)

    def serves(self, connection: Connection, introduced: Hello) -> bool:
        """Serve a connection of another worker until it ends; False if it is not for this one."""
        return False

    def die(self, error: Exception) -> NoReturn:
        """Tell the supervisor what went wrong and end the process."""
        self._dying.acquire()
        kind = "input" if isinstance(error, InputError) else "fault"
        if kind == "fault":
            time.sleep(_GRACE_S)
            log.error("worker %s fails", self.config.worker, exc_info=error)
        text = str(error) if kind == "input" else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            self.control.send(Failed(worker=self.config.worker, kind=kind, text=" ".join(text.split())[:500]))
        os._exit(1)

    def _start(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        """Run a reader thread; an exception in it ends the worker."""

        def guarded() -> None:
            try:
                target(*arguments)
            except Exception as error:
                self.die(error)

        threading.Thread(target=guarded, name=name, daemon=True).start()

    def _read_control(self) -> None:
        while True:
            try:
                message = self.control.receive()
            except OSError:
                os._exit(1)
            if message is None:
                os._exit(1)
            if isinstance(message, Shutdown):
                os._exit(0)
            if isinstance(message, Ping):
                self.control.send(Pong(worker=self.config.worker))
            else:
                self.take(message)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            stream, _ = listener.accept()
            self._start("peer", self._welcome, stream)

    def _welcome(self, stream: socket.socket) -> None:
        """Serve a connection of this launch; a stranger's costs one thread and is closed."""
        accepted = self._pending.accept(stream, self.config.secret)
        if accepted is None:
            log.warning("worker %s: closed a connection that did not prove the secret", self.config.worker)
            return
        connection, introduced = accepted
        if not self.serves(connection, introduced):
            log.warning(
                "worker %s: refused a %s connection of %s",
                *(self.config.worker, introduced.purpose, introduced.worker),
            )
            connection.close()


def awaited(control: Connection, expected: type[_MessageType]) -> _MessageType:
    """The supervisor's next message, which must have this type; ends the process on Shutdown."""
    message = control.receive()
    if isinstance(message, Shutdown):
        os._exit(0)
    if not isinstance(message, expected):
        raise ConnectionError(f"expected {expected.__name__}, got {type(message).__name__}")
    return message
