"""The Ray launcher: a placement group for each replica of an existing Ray cluster, an actor for each worker.

Ray chooses the machines and reserves the devices. Messages do not go through Ray: each worker connects to the
head and authenticates with a secret. The supervisor restarts a lost replica in the same placement group,
which Ray moves if its node is gone. When a replica leaves, its group is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from cost_model.errors import HexGen2Error, InputError
from hexgen2.devices import gpus_by_node, is_cpu, node_of, node_spec
from hexgen2.export.ray import CPU_SHARE, bundles_of, node_resource
from hexgen2.placement import Placement
from runtime.launcher.ray_actor import PURPOSE, WorkerActor
from runtime.launcher.worker_link import StreamLink, WorkerLink
from runtime.launcher.worker_listener import WorkerListener
from runtime.launcher.workers import START_TIMEOUT_S, WorkersLauncher
from runtime.protocol.to_workers import Configure, Shutdown

PLACE_TIMEOUT_S = 60.0
STOP_GRACE_S = ANSWER_TIMEOUT_S = 3.0
ADDRESS = "RAY_ADDRESS"

Members = tuple[str, ...]


class RayLauncher(WorkersLauncher):
    """Starts workers as actors of the Ray cluster at RAY_ADDRESS, or else of the one on this machine."""

    def __init__(self, start_timeout_s: float = START_TIMEOUT_S) -> None:
        super().__init__(start_timeout_s)
        self._placement: Placement | None = None
        self._groups: dict[Members, Any] = {}
        self._actors: dict[str, Any] = {}
        self._listener: WorkerListener | None = None
        self._secret = ""

    def check(self, placement: Placement, source: str, emulated: bool = False) -> None:
        if emulated:
            problem = "cannot emulate devices"
            raise InputError("--launcher", "ray", problem, "use --launcher local or p2p")
        ray = _connected()
        self._placement = placement
        have = Counter({name: float(amount) for name, amount in ray.available_resources().items()})
        needed: Counter[str] = Counter()
        for replica in placement.replicas:
            for bundle in self._bundles(replica.gpus, is_cpu(placement, replica.gpus[0])):
                needed.update(bundle)
        for name, amount in needed.items():
            if have[name] >= amount - 1e-6:
                continue
            if name in ("CPU", "GPU"):
                problem = f"the placement needs {amount:g} {name}, and Ray has {have[name]:g} free"
                remedy = "add machines to the Ray cluster, or stop what is running there"
            else:
                problem = f"no Ray node has the resource {name}"
                remedy = f"start Ray on that node with --resources '{{\"{name}\": 1}}'"
                if name.startswith("node:"):
                    remedy = "start Ray at this address, or correct the placement's addresses"
            raise InputError("--launcher", "ray", problem, remedy)

    async def start(
        self, configurations: Mapping[str, Configure], report: Callable[[str], None]
    ) -> dict[str, WorkerLink]:
        import ray

        self._configurations = dict(configurations)
        self._secret = next(iter(configurations.values())).secret
        self._listener = WorkerListener(ray.util.get_node_ip_address(), self._secret, PURPOSE)
        return await self._start(list(configurations), report)

    async def change(
        self, ended: Sequence[str], started: Mapping[str, Configure], report: Callable[[str], None]
    ) -> dict[str, WorkerLink]:
        staying = {worker: each for worker, each in self._configurations.items() if worker not in ended}
        used = {_members(each) for each in (staying | dict(started)).values()}
        self._forget(ended)
        await asyncio.to_thread(self._give_back, [each for each in self._groups if each not in used])
        return await super().change(ended, started, report)

    async def stop(self) -> None:
        for link in self._links.values():
            link.send(Shutdown())
        if self._links:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_GRACE_S):
                    await asyncio.gather(*(_drained(link) for link in self._links.values()))
        await asyncio.to_thread(self.kill)
        for link in self._links.values():
            link.close()
        self._links.clear()
        if self._listener is not None:
            self._listener.close()
        await asyncio.to_thread(_disconnect)

    def kill(self) -> None:
        self._end(list(self._actors))
        self._give_back(list(self._groups))

    def _give_back(self, groups: Sequence[Members]) -> None:
        """Remove the placement groups of some replicas."""
        import ray

        for members in groups:
            with contextlib.suppress(Exception):  # Ray itself may be gone
                ray.util.remove_placement_group(self._groups.pop(members))

    def _bundles(self, gpus: Sequence[str], cpu: bool) -> list[dict[str, float]]:
        """The resource bundles of a replica on these GPUs. A Ray cluster of one node stands for all nodes."""
        import ray

        assert self._placement is not None
        placement, nodes = self._placement, gpus_by_node(gpus)
        bundles = bundles_of(placement, gpus, cpu)
        alive = [node for node in ray.nodes() if node["Alive"]]
        if len(alive) > 1 or any(node_spec(placement, node).address for node in nodes):
            return bundles
        names = {node_resource(placement, node) for node in nodes}
        return [{key: value for key, value in bundle.items() if key not in names} for bundle in bundles]

    def _make_room(self, workers: Sequence[str]) -> None:
        """Create missing placement groups of these workers' replicas, and wait until Ray has placed all."""
        import ray

        replicas = {_members(each): each for each in map(self._configurations.__getitem__, workers)}
        for members, configuration in replicas.items():
            if members not in self._groups:
                bundles = self._bundles(members, configuration.device == "cpu")
                self._groups[members] = ray.util.placement_group(bundles, strategy="PACK")
        for members, configuration in replicas.items():
            if not self._groups[members].wait(PLACE_TIMEOUT_S):
                resources = ", ".join(f"{key} {value:g}" for key, value in ray.available_resources().items())
                problem = f"Ray could not place replica {configuration.replica}"
                raise HexGen2Error(f"{problem} (free resources: {resources})")

    async def _connect(self, workers: Sequence[str]) -> None:
        import ray

        assert self._listener is not None
        await asyncio.to_thread(self._make_room, workers)
        coming = {worker: self._listener.expect(worker) for worker in workers}
        addresses = {}
        for worker in workers:
            self._actors[worker] = actor = self._make_actor(worker)
            addresses[worker] = actor.start.remote(worker, self._listener.address, self._secret)
        try:
            hosts = await asyncio.to_thread(ray.get, list(addresses.values()))
        except ray.exceptions.RayError as error:
            raise HexGen2Error(f"Ray could not start the workers: {' '.join(str(error).split())}") from error
        for worker, host in zip(addresses, hosts, strict=True):
            configuration = self._configurations[worker]
            cpu = configuration.device == "cpu"
            self._configurations[worker] = msgspec.structs.replace(
                configuration,
                host=host,
                device="cpu" if cpu else "cuda:0",  # Ray shows a worker only its own GPU
                cores=(),
                threads=1 if cpu else configuration.threads,
                secret="",  # the worker has it from Ray; others may be able to read our connections
            )
        self._links |= {worker: await StreamLink.over(await coming[worker]) for worker in workers}

    def _make_actor(self, worker: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        configuration = self._configurations[worker]
        members, cpu = _members(configuration), configuration.device == "cpu"
        bundle = list(gpus_by_node(members)).index(node_of(worker))
        return (
            ray.remote(WorkerActor)
            .options(
                num_cpus=CPU_SHARE if cpu else 0,
                num_gpus=0 if cpu else 1,
                max_restarts=0,  # the supervisor restarts whole replicas
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._groups[members], placement_group_bundle_index=bundle
                ),
            )
            .remote()
        )

    def _end(self, workers: Sequence[str]) -> None:
        import ray

        for worker in workers:
            if link := self._links.pop(worker, None):
                link.close()
            if actor := self._actors.pop(worker, None):
                with contextlib.suppress(Exception):  # it, its node or Ray may be gone
                    ray.kill(actor)


def _members(configuration: Configure) -> Members:
    """All workers of the replica that this configuration belongs to, in the order of its stages."""
    return tuple(worker for stage in configuration.stages for worker in stage.workers)


async def _drained(link: WorkerLink) -> None:
    """Wait until the worker at the other end has closed its connection."""
    with contextlib.suppress(HexGen2Error):
        while await link.receive() is not None:
            pass


def _connected() -> Any:
    """The package ray, connected to the cluster.

    Raises
    ------
    InputError : ray is not installed, or no cluster answers
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        problem = "the Python package ray is not installed"
        raise InputError("--launcher", "ray", problem, "pip install 'hexgen2[ray]'") from error
    if ray.is_initialized():
        return ray
    address = os.environ.get(ADDRESS, "auto")
    try:
        _check_answers(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        where = f"at {os.environ[ADDRESS]}" if ADDRESS in os.environ else "on this machine"
        remedy = f"start one with `ray start --head`, or set {ADDRESS}"
        raise InputError("--launcher", "ray", f"no Ray cluster answers {where}", remedy) from error
    return ray


def _check_answers(address: str) -> None:
    """Raise OSError if nothing listens at this host:port; Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=ANSWER_TIMEOUT_S).close()


def _disconnect() -> None:
    import ray

    ray.shutdown()
