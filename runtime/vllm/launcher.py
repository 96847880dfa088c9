"""The vLLM launcher: runs the `vllm serve` commands of an export, one per replica, on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx

from cost_model.config import architecture_from_folder
from cost_model.errors import HexGen2Error, InputError
from hexgen2.devices import node_of
from hexgen2.export.vllm_command import Surroundings, VllmProcess, check_vllm, vllm_processes
from hexgen2.placement import Placement
from runtime.launcher.base import Launcher
from runtime.launcher.configure import device_of
from runtime.launcher.local import LocalLauncher
from runtime.launcher.worker_link import WorkerLink
from runtime.options import DEFAULTS, EngineOptions
from runtime.protocol.to_workers import Configure
from runtime.vllm.guard import kill_rest
from runtime.vllm.link import QuietLink, VllmFleet, VllmLink

START_TIMEOUT_S = 1200.0
STOP_GRACE_S = 10.0
ASK_EVERY_S = 0.5
COMMAND = "vllm"
HERE = "127.0.0.1"
PORT_ATTEMPTS = 100
TORCH_ONLY = ("chunk_tokens", "kv_transport", "emulate_links", "cuda_devices")


class VllmLauncher(Launcher):
    """Starts one vLLM server per replica. A lost replica is restarted as a whole, on a new port."""

    def __init__(self, options: EngineOptions = DEFAULTS, start_timeout_s: float = START_TIMEOUT_S) -> None:
        self._options, self._start_timeout_s = options, start_timeout_s
        self._placement: Placement | None = None
        self._fleet: VllmFleet | None = None
        self._folder = ""
        self._replica_of: dict[str, str] = {}
        self._links: dict[str, WorkerLink] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ends: dict[str, asyncio.Event] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._logs = Path()

    def check(self, placement: Placement, source: str, emulated: bool = False) -> None:
        check_vllm(placement, source)
        LocalLauncher().check(placement, source)
        for replica in placement.replicas:
            if len({node_of(gpu) for gpu in replica.gpus}) > 1:
                problem = f"{replica.id} spans several nodes, but --engine vllm runs a replica on one machine"
                remedy = "use `hexgen2 export --format vllm`, or --engine torch"
                raise InputError(source, "replicas", problem, remedy)
        for name in TORCH_ONLY:
            if getattr(self._options, name) != getattr(DEFAULTS, name):
                option = f"--{name.replace('_', '-')}"
                raise InputError(option, "", "works with --engine torch only", "leave it out")
        if vllm_command() is None:
            raise InputError(
                "--engine", "vllm", "the command vllm is not installed", "pip install 'hexgen2[vllm]'"
            )
        self._placement = placement
        key = secrets.token_hex(16)
        self._fleet = VllmFleet(placement.model.name, placement.model.kv_bytes_per_token, key)

    async def start(
        self, configurations: Mapping[str, Configure], report: Callable[[str], None]
    ) -> dict[str, WorkerLink]:
        self._folder = next(iter(configurations.values())).checkpoint
        self._replica_of = {worker: each.replica for worker, each in configurations.items()}
        self._logs = Path(tempfile.mkdtemp(prefix="hexgen2-vllm-"))
        replicas = list(dict.fromkeys(self._replica_of.values()))
        report(f"starting vLLM for {len(replicas)} replicas; logs are in {self._logs}")
        return await self._start(replicas, report)

    async def restart(self, workers: Sequence[str], report: Callable[[str], None]) -> dict[str, WorkerLink]:
        replicas = list(dict.fromkeys(self._replica_of[worker] for worker in workers))
        await asyncio.to_thread(self._end, replicas)
        try:
            return await self._start(replicas, report)
        except BaseException:
            await asyncio.to_thread(self._end, replicas)
            raise

    async def stop(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()
        await asyncio.to_thread(self._end, list(self._processes))
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)

    def kill(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()

    async def _start(self, replicas: Sequence[str], report: Callable[[str], None]) -> dict[str, WorkerLink]:
        assert self._placement is not None and self._fleet is not None
        placement = self._placement
        around = Surroundings(
            self._folder,
            lambda _: HERE,
            lambda gpu: _number(placement, gpu),
            lambda _, count: _free_ports(count),
            architecture_from_folder(Path(self._folder)).weight_type,
        )
        processes = {each.replica: each for each in vllm_processes(placement, around)}
        links: dict[str, WorkerLink] = {}
        for name in replicas:
            self._spawn(processes[name])
            workers = [worker for worker, replica in self._replica_of.items() if replica == name]
            url = f"http://{HERE}:{processes[name].port}"
            links[workers[0]] = VllmLink(workers[0], name, url, self._fleet, self._ends[name])
            links |= {worker: QuietLink(self._ends[name]) for worker in workers[1:]}
        self._links |= links
        ready = 0

        async def one(name: str) -> None:
            nonlocal ready
            await self._until_it_serves(processes[name])
            ready += 1
            report(f"{ready}/{len(replicas)} replicas ready")

        try:
            async with asyncio.timeout(self._start_timeout_s), asyncio.TaskGroup() as group:
                for name in replicas:
                    group.create_task(one(name))
        except TimeoutError:
            raise HexGen2Error(f"vLLM was not ready after {self._start_timeout_s:.0f} s") from None
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return links

    def _spawn(self, process: VllmProcess) -> None:
        command, fleet = vllm_command(), self._fleet
        assert command is not None and fleet is not None
        environment = {**process.environment, "VLLM_API_KEY": fleet.key, "PYTHONUNBUFFERED": "1"}
        dtype = [] if self._options.dtype == "auto" else ["--dtype", self._options.dtype]
        cache = [] if self._options.reuse_prefixes else ["--no-enable-prefix-caching"]
        guard = [sys.executable, "-m", "runtime.vllm.guard"]
        with (self._logs / f"{process.replica}.log").open("ab") as log:
            started = subprocess.Popen(
                [*guard, command, *process.arguments, *dtype, *cache],
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        ended = asyncio.Event()
        self._processes[process.replica], self._ends[process.replica] = started, ended
        watcher = asyncio.create_task(_watch(started, ended))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _until_it_serves(self, process: VllmProcess) -> None:
        url = f"http://{HERE}:{process.port}/health"
        ended = self._ends[process.replica]
        async with httpx.AsyncClient(trust_env=False, timeout=10.0) as http:
            while not ended.is_set():
                with contextlib.suppress(httpx.HTTPError):
                    if (await http.get(url)).status_code == 200:
                        return
                await asyncio.sleep(ASK_EVERY_S)
        log = self._logs / f"{process.replica}.log"
        raise HexGen2Error(f"vLLM of replica {process.replica} ended: {_last_error(log)} (full log: {log})")

    def _end(self, replicas: Sequence[str]) -> None:
        """Stop some processes, gracefully if possible, and wait until they have ended."""
        processes = [self._processes.pop(name) for name in replicas if name in self._processes]
        for process in processes:
            with contextlib.suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()  # its guard then ends vLLM
        for process in processes:
            try:
                process.wait(STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            kill_rest(process.pid)


def vllm_command() -> str | None:
    """The path of `vllm`, next to this Python or on PATH; None if it is not installed."""
    beside = Path(sys.executable).with_name(COMMAND)
    return str(beside) if beside.exists() else shutil.which(COMMAND)


def _number(placement: Placement, gpu: str) -> int:
    device = device_of(placement, gpu)
    return 0 if device == "cpu" else int(device.partition(":")[2])


def _free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    for _ in range(PORT_ATTEMPTS):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError, OverflowError):
            first = 0
            for k in range(count):
                probe = held.enter_context(socket.socket())
                probe.bind((HERE, first + k if first else 0))
                first = first or probe.getsockname()[1]
            return first
    raise HexGen2Error(f"{count} free ports in a row were not found")


async def _watch(process: subprocess.Popen[bytes], ended: asyncio.Event) -> None:
    while process.poll() is None:
        await asyncio.sleep(0.1)
    await asyncio.to_thread(kill_rest, process.pid)  # in case the guard itself was killed
    ended.set()


def _last_error(log: Path) -> str:
    """The last line of a log that mentions an error, or else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["no output"])[-1][-300:]
