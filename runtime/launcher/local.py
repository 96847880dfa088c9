"""All workers on this machine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence

from cost_model.errors import HexGen2Error, InputError
from hexgen2.placement import Placement
from runtime.launcher.base import Launcher
from runtime.launcher.configure import device_of
from runtime.launcher.handshake import connect_message, handshake
from runtime.launcher.link import Link, StreamLink
from runtime.launcher.processes import WorkerProcesses
from runtime.messages import Configure, Listening, Shutdown

START_TIMEOUT_S = 600.0


class LocalLauncher(Launcher):
    """Workers that are processes of this machine, each on a socket pair of its own."""

    can_change = True

    def __init__(self, start_timeout_s: float = START_TIMEOUT_S) -> None:
        self._start_timeout_s = start_timeout_s
        self._processes = WorkerProcesses()
        self._links: dict[str, Link] = {}
        self._configurations: dict[str, Configure] = {}
        self._listening: dict[str, Listening] = {}
        self._ready: set[str] = set()

    def check(self, placement: Placement, source: str, emulated: bool = False) -> None:
        for node in placement.cluster.nodes:
            if node.address is not None and not _is_this_machine(node.address):
                raise InputError(
                    source,
                    f"cluster.nodes.{node.name}.address",
                    f"{node.address} is another machine, and the local launcher starts workers here only",
                    "remove the addresses to serve on this machine",
                )
        if not emulated:
            _check_cuda(placement, source)

    async def start(
        self, configurations: Mapping[str, Configure], report: Callable[[str], None]
    ) -> dict[str, Link]:
        self._configurations = dict(configurations)
        return await self._start(list(configurations), report)

    async def restart(self, workers: Sequence[str], report: Callable[[str], None]) -> dict[str, Link]:
        return await self.change(workers, {each: self._configurations[each] for each in workers}, report)

    async def change(
        self, ended: Sequence[str], started: Mapping[str, Configure], report: Callable[[str], None]
    ) -> dict[str, Link]:
        self._end(ended)
        await self._processes.join(ended)
        for worker in ended:
            self._configurations.pop(worker, None)
            self._listening.pop(worker, None)
        self._configurations |= started
        links: dict[str, Link] = {}
        try:
            if started:
                links = await self._start(list(started), report)
        except BaseException:
            self._end(list(started))
            raise
        # Not to those that start just now: they would take it for their first, with addresses of before.
        for worker in self._ready:
            self._links[worker].send(connect_message(self._configurations, self._listening, worker))
        return links

    async def _start(self, workers: Sequence[str], report: Callable[[str], None]) -> dict[str, Link]:
        ends = {worker: socket.socketpair() for worker in workers}
        links: dict[str, Link] = {worker: await StreamLink.over(ours) for worker, (ours, _) in ends.items()}
        self._links |= links
        report(f"starting {len(workers)} workers")
        try:
            async with asyncio.timeout(self._start_timeout_s):
                engine = self._configurations[workers[0]].engine
                await self._processes.spawn({worker: end for worker, (_, end) in ends.items()}, engine)
                await handshake(links, self._configurations, self._listening, report)
        except TimeoutError:
            raise HexGen2Error(f"the workers were not ready after {self._start_timeout_s:.0f} s") from None
        self._ready.update(workers)
        return links

    def _end(self, workers: Sequence[str]) -> None:
        """Kill some workers, stopped ones too, and close what leads to them."""
        self._ready.difference_update(workers)
        self._processes.kill(workers)
        for worker in workers:
            if link := self._links.pop(worker, None):
                link.close()

    async def stop(self) -> None:
        for link in self._links.values():
            link.send(Shutdown())
        await self._processes.stop()
        for link in self._links.values():
            link.close()
        self._links.clear()

    def kill(self) -> None:
        self._processes.kill()


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
