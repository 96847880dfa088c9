"""The local launcher: starts every worker on this machine."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence

from cost_model.errors import InputError
from hexgen2.placement import Placement
from runtime.launcher.configure import device_of, workers_of
from runtime.launcher.processes import WorkerProcesses
from runtime.launcher.worker_link import StreamLink, WorkerLink
from runtime.launcher.workers import START_TIMEOUT_S, WorkersLauncher
from runtime.protocol.to_workers import Configure, Shutdown


class LocalLauncher(WorkersLauncher):
    """Starts workers as processes of this machine, each connected by a socket pair.

    Parameters
    ----------
    cuda_devices : see EngineOptions
    """

    def __init__(self, start_timeout_s: float = START_TIMEOUT_S, cuda_devices: int | None = None) -> None:
        super().__init__(start_timeout_s)
        self._cuda_devices = cuda_devices
        self._processes = WorkerProcesses()

    def check(self, placement: Placement, source: str, emulated: bool = False) -> None:
        for node in placement.cluster.nodes:
            if node.address is not None and not _is_this_machine(node.address):
                raise InputError(
                    source,
                    f"cluster.nodes.{node.name}.address",
                    f"{node.address} is another machine; the local launcher starts workers only on this one",
                    "remove the addresses to serve on this machine",
                )
        if not emulated:
            _check_cuda(placement, source, self._cuda_devices)

    async def start(
        self, configurations: Mapping[str, Configure], report: Callable[[str], None]
    ) -> dict[str, WorkerLink]:
        self._configurations = dict(configurations)
        return await self._start(list(configurations), report)

    async def _connect(self, workers: Sequence[str]) -> None:
        ends = {worker: socket.socketpair() for worker in workers}
        self._links |= {worker: await StreamLink.over(ours) for worker, (ours, _) in ends.items()}
        engine = self._configurations[workers[0]].engine
        await self._processes.spawn({worker: end for worker, (_, end) in ends.items()}, engine)

    def _end(self, workers: Sequence[str]) -> None:
        self._processes.kill(workers)
        for worker in workers:
            if link := self._links.pop(worker, None):
                link.close()

    async def _until_ended(self, workers: Sequence[str]) -> None:
        await self._processes.join(workers)

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


def _check_sharing(placement: Placement, source: str, devices: Mapping[str, str]) -> None:
    """Refuse workers of one replica on the same GPU, which exchange tensors from GPU to GPU."""
    for replica in placement.replicas:
        used = [devices[gpu] for gpu in replica.gpus if devices[gpu] != "cpu"]
        if len(set(used)) < len(used):
            problem = f"{len(used)} GPUs would be {len(set(used))} CUDA devices"
            remedy = "give --cuda-devices more, or search a placement whose replicas have as many GPUs"
            raise InputError(source, f"replicas.{replica.id}", problem, remedy)


def _check_cuda(placement: Placement, source: str, cuda_devices: int | None) -> None:
    """Check that every GPU of the placement is present; imports torch only if the placement uses GPUs."""
    devices = {gpu: device_of(placement, gpu, cuda_devices) for gpu in workers_of(placement)}
    needed = {gpu: device for gpu, device in devices.items() if device != "cpu"}
    if not needed:
        return
    _check_sharing(placement, source, devices)
    import torch

    present = torch.cuda.device_count()
    for gpu, device in needed.items():
        if int(device.partition(":")[2]) >= present:
            raise InputError(
                source,
                gpu,
                f"needs {device}, but torch sees {present} CUDA devices here",
                "launch on a machine with these GPUs, search a placement for the GPUs of this one, or let "
                "several workers share a GPU (--cuda-devices)",
            )
