"""Worker processes of this machine: one per GPU, forked from a server that has loaded the engine."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import platform
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess

from cost_model.errors import InputError
from runtime.launcher.process import end_with_parent, show_as

STOP_GRACE_S = 3.0
KILL_EVERY_S = 0.1
WORKER_ENVIRONMENT = {
    # Threads spin while they wait for the next kernel of a step, and sleep until the next step.
    "GOMP_SPINCOUNT": "20000",
    # oneDNN keeps a prepared product for each number of rows, half a MB each, and rows come in any number.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
}

AVX2_ONLY = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
"""For torch (which our own kernels follow), for oneDNN, and for MKL."""


def limit_instructions(choice: str) -> None:
    """Limit the instructions (one of INSTRUCTIONS) of workers that start from now on, so that replicas on
    different processors round alike. "auto" leaves the environment as it is.

    Raises
    ------
    InputError : this processor does not have them
    """
    if choice == "avx2":
        if platform.machine() != "x86_64":
            remedy = "leave it out: processors that are not x86 round in their own way"
            raise InputError("--cpu-instructions", choice, f"this processor is {platform.machine()}", remedy)
        os.environ.update(AVX2_ONLY)


def preloaded(engine: str) -> list[str]:
    """Modules that the fork server imports once for all workers of an engine: named here, never imported."""
    return ["runtime.worker.process", f"runtime.engine.{engine}.engine"]


def _run_worker(worker: str, control: socket.socket) -> None:
    """Body of a worker process. It ignores a terminal's Ctrl-C, which reaches it too: its parent decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    show_as(worker)
    from runtime.worker.process import worker_main

    worker_main(control)


class WorkerProcesses:
    """Starts workers, each on a socket of its own, and ends them.

    A worker ends when its socket closes or the fork server ends, so none survives this process, however it
    dies.
    """

    def __init__(self) -> None:
        self._processes: dict[str, BaseProcess] = {}
        self._spawning: set[asyncio.Future[None]] = set()
        self._stopping = threading.Event()

    async def spawn(self, sockets: Mapping[str, socket.socket], engine: str) -> None:
        """Start workers, by name, on their ends of socket pairs, which are closed here. Goes on in the
        background if it is cancelled, until `stop`."""
        spawning = asyncio.ensure_future(asyncio.to_thread(self._spawn, sockets, engine))
        self._spawning.add(spawning)
        spawning.add_done_callback(self._spawning.discard)
        await asyncio.shield(spawning)

    def kill(self, workers: Sequence[str] | None = None) -> None:
        """Kill some workers, or all; stopped ones too."""
        for worker, process in list(self._processes.items()):
            if workers is None or worker in workers:
                process.kill()

    async def join(self, workers: Sequence[str] | None = None) -> None:
        """Wait a while for some workers to end, or all; those that did are forgotten."""
        await asyncio.to_thread(self._join, workers)

    async def stop(self) -> None:
        """Leave no process behind. Workers that were told to shut down have a while for it. May be called
        twice; nothing is started afterwards, and nobody waits for the fork server to load the engine."""
        self._stopping.set()
        while self._spawning:
            _kill_fork_server()
            await asyncio.wait(self._spawning, timeout=KILL_EVERY_S)
        await self.join()
        for process in self._processes.values():
            process.terminate()
        await self.join()
        self.kill()
        await self.join()
        self._processes.clear()
        await asyncio.to_thread(_stop_helpers)

    def _spawn(self, sockets: Mapping[str, socket.socket], engine: str) -> None:
        for name, value in WORKER_ENVIRONMENT.items():
            os.environ.setdefault(name, value)  # read when torch is loaded, which the fork server does
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(preloaded(engine))
        for worker, end in sockets.items():
            if self._stopping.is_set():
                return
            process = context.Process(
                target=_run_worker, args=(worker, end), name=f"worker {worker}", daemon=True
            )
            process.start()
            self._processes[worker] = process
            end.close()

    def _join(self, workers: Sequence[str] | None) -> None:
        deadline = time.monotonic() + STOP_GRACE_S
        for worker, process in list(self._processes.items()):
            if workers is not None and worker not in workers:
                continue
            process.join(max(deadline - time.monotonic(), 0))
            if process.exitcode is not None:
                del self._processes[worker]


def _kill_fork_server() -> None:
    """End the fork server, and its workers with it, whatever it does now; who waits for it goes on."""
    server = getattr(forkserver, "_forkserver", None)
    if pid := getattr(server, "_forkserver_pid", None):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _stop_helpers() -> None:
    """End the fork server and the resource tracker, which otherwise live as long as this process.

    The standard library has no public call for this; the private ones used here, which its own tests use too,
    were tried on Python 3.11.
    """
    for helper in (
        getattr(forkserver, "_forkserver", None),
        getattr(resource_tracker, "_resource_tracker", None),
    ):
        stop = getattr(helper, "_stop", None)
        if stop is not None:
            stop()
