"""All workers on this machine: one process per GPU, forked from one process that has torch loaded."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess

from cost_model.errors import HexGen2Error, InputError
from hexgen2.placement import Placement
from runtime.launcher.base import Launcher
from runtime.launcher.configure import device_of
from runtime.launcher.handshake import handshake
from runtime.launcher.link import Link
from runtime.messages import Configure, Shutdown

START_TIMEOUT_S = 600.0
STOP_GRACE_S = 3.0
PRELOAD = ["torch", "runtime.worker"]
WORKER_ENVIRONMENT = {
    # Threads wait awake for the next kernel of a step, and asleep for the next step.
    "GOMP_SPINCOUNT": "20000",
    # A product is prepared, and kept, for each number of rows: half a MB each, and rows come in any number.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
}


def _run_worker(control: socket.socket) -> None:
    """Body of a worker process. A terminal's Ctrl-C reaches it too; the front end decides instead."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from runtime.worker import worker_main

    worker_main(control)


class LocalLauncher(Launcher):
    """Workers on this machine, each on a socket pair of its own.

    A worker ends when its socket closes, so that none survives the front end, however that dies.
    """

    def __init__(self, start_timeout_s: float = START_TIMEOUT_S) -> None:
        self._start_timeout_s = start_timeout_s
        self._processes: dict[str, BaseProcess] = {}
        self._links: dict[str, Link] = {}
        self._spawning: asyncio.Future[None] | None = None
        self._stopping = threading.Event()

    def check(self, placement: Placement, source: str) -> None:
        for node in placement.cluster.nodes:
            if node.address is not None and not _is_this_machine(node.address):
                raise InputError(
                    source,
                    f"cluster.nodes.{node.name}.address",
                    f"{node.address} is another machine, and the local launcher starts workers here only",
                    "remove the addresses to serve on this machine",
                )
        _check_cuda(placement, source)

    async def start(
        self, configurations: Mapping[str, Configure], report: Callable[[str], None]
    ) -> dict[str, Link]:
        ours: dict[str, socket.socket] = {}
        theirs: dict[str, socket.socket] = {}
        for worker in configurations:
            ours[worker], theirs[worker] = socket.socketpair()
        for worker, end in ours.items():
            self._links[worker] = await Link.over(end)
        report(f"starting {len(configurations)} workers")
        try:
            async with asyncio.timeout(self._start_timeout_s):
                self._spawning = asyncio.ensure_future(asyncio.to_thread(self._spawn, theirs))
                await asyncio.shield(self._spawning)
                await handshake(self._links, configurations, report)
        except TimeoutError:
            raise HexGen2Error(f"the workers were not ready after {self._start_timeout_s:.0f} s") from None
        return dict(self._links)

    async def stop(self) -> None:
        self._stopping.set()
        if self._spawning is not None:
            await asyncio.wait([self._spawning])
        for link in self._links.values():
            link.send(Shutdown())
        await asyncio.to_thread(self._join, STOP_GRACE_S)
        for process in self._processes.values():
            process.terminate()
        await asyncio.to_thread(self._join, STOP_GRACE_S)
        self.kill()
        await asyncio.to_thread(self._join, STOP_GRACE_S)
        for link in self._links.values():
            link.close()
        self._processes.clear()
        self._links.clear()
        await asyncio.to_thread(_stop_helpers)

    def kill(self) -> None:
        for process in self._processes.values():
            process.kill()

    def _spawn(self, sockets: Mapping[str, socket.socket]) -> None:
        for name, value in WORKER_ENVIRONMENT.items():
            os.environ.setdefault(name, value)  # read when torch is loaded, which the fork server does
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        for worker, end in sockets.items():
            if self._stopping.is_set():
                return
            process = context.Process(target=_run_worker, args=(end,), name=f"worker {worker}", daemon=True)
            process.start()
            self._processes[worker] = process
            end.close()

    def _join(self, grace_s: float) -> None:
        """Wait for all processes together; those that ended are forgotten."""
        deadline = time.monotonic() + grace_s
        for worker, process in list(self._processes.items()):
            process.join(max(deadline - time.monotonic(), 0))
            if process.exitcode is not None:
                del self._processes[worker]


def _is_this_machine(address: str) -> bool:
    return address in ("localhost", "::1", socket.gethostname()) or address.startswith("127.")


def _check_cuda(placement: Placement, source: str) -> None:
    """Every GPU that the placement uses must be here; asks torch only if it uses one."""
    gpus = [gpu for replica in placement.replicas for gpu in replica.gpus]
    needed = {gpu: device for gpu in gpus if (device := device_of(placement, gpu)) != "cpu"}
    if not needed:
        return
    import torch

    present = torch.cuda.device_count()
    for gpu, device in needed.items():
        if int(device.partition(":")[2]) >= present:
            raise InputError(
                source,
                gpu,
                f"needs {device}, and torch sees {present} CUDA devices here",
                "launch on a machine with these GPUs, or search a placement for the devices at hand",
            )


def _stop_helpers() -> None:
    """End the fork server and the resource tracker, which otherwise live as long as this process.

    The standard library has no public call for it; its own tests use these.
    """
    for helper in (
        getattr(forkserver, "_forkserver", None),
        getattr(resource_tracker, "_resource_tracker", None),
    ):
        stop = getattr(helper, "_stop", None)
        if stop is not None:
            stop()
