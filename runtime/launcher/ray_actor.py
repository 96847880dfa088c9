"""The Ray actor that reserves a worker's GPU, and the worker process that it starts."""

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
    """A Ray actor with one GPU that starts a worker in a process of its own.

    The worker may therefore exit without taking the actor with it. When the actor ends, the worker's stdin
    closes, and the worker exits.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def start(self, worker: str, head: tuple[str, int], secret: str) -> str:
        """Start the worker, which connects to the head; returns the address of this machine."""
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
        """Kill the worker and wait until it has exited."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _end_with_the_actor() -> None:
    while sys.stdin.read(1):
        pass
    os._exit(1)


def main(worker: str, host: str, port: str) -> None:
    """Run the worker process: connect to the head and serve it."""
    from runtime.worker.process import worker_main

    secret = sys.stdin.readline().strip()
    threading.Thread(target=_end_with_the_actor, daemon=True).start()
    connection = connect((host, int(port)), Credentials(worker, PURPOSE, secret), CONNECT_TIMEOUT_S)
    control: socket.socket = connection.stream
    control.settimeout(None)
    worker_main(control, secret)


if __name__ == "__main__":
    main(*sys.argv[1:])
