"""The actor that holds a worker's place in a Ray cluster, and the process that it starts there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

from runtime.protocol.handshake import Credentials, connect

CONNECT_TIMEOUT_S = 30.0
PURPOSE = "worker"


class WorkerActor:
    """Runs in an actor of Ray, which gives it its GPU; the worker is a process of its own, so that it may end
    as workers do. It ends with the actor, too: its stdin closes."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def start(self, worker: str, head: tuple[str, int], secret: str) -> str:
        """Start the worker, which connects to the head; the address of this machine."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "runtime.launcher.ray_actor", worker, head[0], str(head[1])],
            stdin=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(secret + "\n")
        self._process.stdin.flush()
        import ray

        return ray.util.get_node_ip_address()

    def end(self) -> None:
        """Kill the worker, and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _end_with_the_actor() -> None:
    while sys.stdin.read(1):
        pass
    os._exit(1)


def main(worker: str, host: str, port: str) -> None:
    """Body of the worker's process."""
    from runtime.worker.process import worker_main

    secret = sys.stdin.readline().strip()
    threading.Thread(target=_end_with_the_actor, daemon=True).start()
    connection = connect((host, int(port)), Credentials(worker, PURPOSE, secret), CONNECT_TIMEOUT_S)
    control: socket.socket = connection.stream
    control.settimeout(None)
    worker_main(control, secret)


if __name__ == "__main__":
    main(*sys.argv[1:])
