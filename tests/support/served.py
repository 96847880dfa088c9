"""A placement of six CPU workers, and a server process that serves it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from placements import CORE, placement_of, replica_of

from cluster_specs.schema import ClusterSpec, NodeSpec
from cost_model.config import architecture_from_folder
from hexgen2.placement import Placement, Route
from hexgen2.workload.lengths import RequestClass, Workload

ROOT = Path(__file__).resolve().parents[2]
WORKERS = 6
START_S = 120.0
STOP_S = 30.0
SECONDS = 60
MODEL = "tiny-llama"
KEY = "a-key"
SHAPES = {
    "prefill-0": [("box/0", 4)],
    "prefill-1": [("box/1", 3), ("box/2", 1)],
    "decode-0": [("box/3 box/4", 4)],
    "decode-1": [("box/5", 4)],
}
CAPACITY_REQ_S = 4.0
FLOWS = {("prefill-0", "decode-0"): 1.0, ("prefill-1", "decode-0"): 1.0, ("prefill-1", "decode-1"): 2.0}
MIXED_SHAPES = {
    "mixed-0": [("box/0 box/1", 4)],
    "mixed-1": [("box/2", 3), ("box/3", 1)],
    "prefill-0": [("box/4", 4)],
    "decode-0": [("box/5", 4)],
}
MIXED_FLOWS = {
    ("mixed-0", "mixed-1"): 1.0,
    ("mixed-1", "mixed-0"): 1.0,
    ("mixed-0", "mixed-0"): 0.5,
    ("mixed-1", "decode-0"): 0.5,
    ("prefill-0", "mixed-0"): 0.5,
    ("prefill-0", "mixed-1"): 0.5,
}
REGION = [(0.0, 12.0), (4.0, 6.0), (6.0, 0.0)]
COMMAND = "from hexgen2.cli import main; main()"
RUN = """
import json
import sys
from pathlib import Path
from cost_model.errors import HexGen2Error
from hexgen2.placement import Placement
from runtime.options import FrontOptions
from runtime.serve import serve
placement, folder, port, front, restarts = sys.argv[1:]
where = Path(folder), "127.0.0.1", int(port)
try:
    options = {"restarts": int(restarts), "front": FrontOptions(**json.loads(front))}
    sys.exit(serve(Placement.load(placement), *where, **options))
except HexGen2Error as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def make_placement(folder: Path) -> Placement:
    """Two prefill replicas (one GPU; two stages of 3 and 1 layers) and two decode replicas (tp2; one GPU) of
    the model in a folder, with three routes between them."""
    box = NodeSpec(name="box", accelerators=f"Core:{WORKERS}", interconnect="shared-memory")
    model = architecture_from_folder(folder).model_copy(update={"name": MODEL})
    carried = {name: sum(flow for ends, flow in FLOWS.items() if name in ends) for name in SHAPES}
    return placement_of(
        ClusterSpec(name="one-box", nodes=[box], accelerators={"Core": CORE}),
        model,
        Workload(name="short", classes=(RequestClass(name="short", isl=32, osl=16),)),
        [
            replica_of(
                name,
                stages,
                max_batch=4,
                capacity_req_s=CAPACITY_REQ_S,
                utilisation=carried[name] / CAPACITY_REQ_S,
            )
            for name, stages in SHAPES.items()
        ],
        [
            Route(
                from_=prefill,
                to=decode,
                flow_req_s=flow,
                capacity_req_s=CAPACITY_REQ_S,
                kv_bytes_per_req=32 * model.kv_bytes_per_token,
            )
            for (prefill, decode), flow in FLOWS.items()
        ],
    )


def make_mixed_placement(folder: Path) -> Placement:
    """Two mixed replicas (tp2; two stages) that prefill for each other, for a decode replica and for
    themselves, and decode for a prefill replica, too; on the same six CPU workers."""
    whole = make_placement(folder)
    replicas = []
    for name, stages in MIXED_SHAPES.items():
        prompts = sum(flow for (source, _), flow in MIXED_FLOWS.items() if source == name)
        answers = sum(flow for (_, target), flow in MIXED_FLOWS.items() if target == name)
        mixed = name.startswith("mixed")
        replica = replica_of(
            name, stages, max_batch=4, capacity_req_s=CAPACITY_REQ_S, region=REGION if mixed else None
        )
        used = replica.busy(prompts, answers) if mixed else (prompts + answers) / CAPACITY_REQ_S
        replicas.append(replica.model_copy(update={"utilisation": used}))
    routes = [
        Route(
            from_=source,
            to=target,
            flow_req_s=flow,
            capacity_req_s=CAPACITY_REQ_S,
            kv_bytes_per_req=0.0 if source == target else 32 * whole.model.kv_bytes_per_token,
        )
        for (source, target), flow in MIXED_FLOWS.items()
    ]
    placement = placement_of(whole.cluster, whole.model, whole.workload, replicas, routes)
    bound = placement.bound.model_copy(update={"req_s": 24.0})  # six GPUs at full load; also after a loss
    return placement.model_copy(update={"bound": bound})


def small(placement: Placement) -> Placement:
    """The same placement with little memory, so that the KV caches of a new placement are small too."""
    card = placement.cluster.accelerators["Core"].model_copy(update={"memory_gib": 0.3})
    cluster = placement.cluster.model_copy(update={"accelerators": {"Core": card}})
    return placement.model_copy(update={"cluster": cluster})


class Process:
    """A process in a session of its own, with its stderr in a file."""

    def __init__(self, command: list[str], log: Path, **environment: str) -> None:
        self.log = log
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **environment},
                start_new_session=True,
            )

    def wait_for(self, pattern: str, limit_s: float = START_S) -> re.Match[str]:
        """Wait until a line of the log matches."""
        deadline = time.monotonic() + limit_s
        while not (found := re.search(pattern, self.log.read_text())):
            assert self.process.poll() is None, f"the process ended:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"no {pattern!r} in:\n{self.log.read_text()}"
            time.sleep(0.05)
        return found

    def family(self) -> list[psutil.Process]:
        """Every process of the session: the server, its workers and their helper processes."""
        return [each for each in psutil.process_iter() if _session(each.pid) == self.process.pid]

    def interrupt(self) -> int:
        """Send SIGINT to all, as Ctrl-C at the terminal does; return the exit code."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(STOP_S)

    def close(self) -> None:
        """Kill whatever a test left."""
        for each in self.family():
            if each.pid != self.process.pid or self.process.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        self.process.wait(STOP_S)


class Server(Process):
    """A process that serves a placement; `front` has the options of the front end."""

    def __init__(
        self,
        folder: Path,
        work: Path,
        key: str = "",
        port: int = 0,
        placement: Placement | None = None,
        restarts: int = 0,
        **front: Any,
    ) -> None:
        front = {"api_keys": {"tests": key} if key else {}, **front}
        path = work / "placement.json"
        (placement or make_placement(folder)).save(path)
        numbers = [str(port), json.dumps(front), str(restarts)]
        super().__init__([sys.executable, "-c", RUN, str(path), str(folder), *numbers], work / "server.log")
        self.key, self.url = key, ""

    def until_serving(self, limit_s: float = START_S) -> Server:
        self.url = self.wait_for(r"serving \S+ on (http://\S+)", limit_s)[1]
        return self

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


class Launched(Server):
    """`hexgen2 launch` with options and environment variables."""

    def __init__(
        self, placement: Placement, folder: Path, work: Path, *options: str, key: str = "", **environment: str
    ) -> None:
        placement.save(work / "placement.json")
        command = [sys.executable, "-c", COMMAND, "launch", str(work / "placement.json")]
        where = ["--model-path", str(folder), "--port", "0", *(["--api-key", key] if key else [])]
        Process.__init__(self, [*command, *where, *options], work / "server.log", **environment)
        self.key, self.url = key, ""


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return -1


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """The processes that still run, without zombies that wait for their parent."""
    return [each for each in processes if each.is_running() and _status(each) != psutil.STATUS_ZOMBIE]


def _status(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def listens(port: int) -> bool:
    """Whether anyone accepts connections on this port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def gauge(http: httpx.Client, name: str) -> float:
    """The sum over all labels of a metric."""
    lines = http.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + " ", name + "{")))


def until_idle(http: httpx.Client) -> None:
    """Wait until no replica holds anything, by the server's own metrics."""
    deadline = time.monotonic() + SECONDS
    while gauge(http, "hexgen2_kv_tokens") or gauge(http, "hexgen2_requests_running"):
        assert time.monotonic() < deadline, http.get("/metrics").text
        time.sleep(0.05)
