"""The HTTP server: binds its address, and runs uvicorn from start to end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from cost_model.errors import InputError
from runtime.api.connection import limited_by
from runtime.frontend.coordinator import Coordinator
from runtime.operator import report
from runtime.options import FrontOptions

DRAIN_S = 5
"""How long open connections may take to finish once the server stops."""


@contextlib.contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket bound to the server's address; raises InputError if that is impossible."""
    where = f"{host}:{port}"
    if not 0 <= port <= 65535:
        raise InputError(
            "--port", str(port), "is not a port", "give a number from 1 to 65535, or 0 for a free one"
        )
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise InputError(
            "--host", host, f"is not an address ({error})", "give 127.0.0.1 or your own"
        ) from error
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                problem, remedy = (
                    "is in use by another program",
                    "stop that program, or choose another --port",
                )
            else:
                problem = f"cannot be bound ({error.strerror})"
                remedy = "choose an address of this machine with --host, and a free --port from 1024"
            raise InputError("--port", where, problem, remedy) from error
        yield listener


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handlers; `serve_http` decides when it stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_http(
    app: Any,
    front: FrontOptions,
    listener: socket.socket,
    coordinator: Coordinator,
    stopping: asyncio.Event,
    banner: str,
) -> None:
    """Serve until `stopping` is set, then end all requests and connections."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        http=limited_by(front),
        timeout_graceful_shutdown=DRAIN_S,
    )
    server = HttpServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stop = asyncio.create_task(stopping.wait())
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    report(banner)
    await asyncio.wait({serving, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    server.should_exit = True
    await coordinator.stop()
    await serving
