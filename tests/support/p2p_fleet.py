"""Node processes, and a head that launches a placement on them, all on this machine's loopback address."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
from served import Process, Server, make_placement

from cluster_specs.schema import NodeSpec
from hexgen2.placement import Placement, Route, Stage
from runtime.p2p.membership.membership import LOOPBACK_LISTEN

MAIN = [sys.executable, "-c", "from hexgen2.cli import main; main()"]
PATIENT_MAIN = [*MAIN[:2], "from runtime import liveness; liveness.PERIODS = 1000; " + MAIN[2]]
TOKENS = 250
LONG = {"model": "tiny-llama", "prompt": "the", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
GONE_S = 60.0
NODES = ("left", "right")
WORKERS = 2
"""Workers per node; the placement has one replica on each worker."""


def fleet_placement(folder: Path) -> Placement:
    """Two nodes, each with a prefill and a decode replica of one GPU, and routes between all of them."""
    placement = make_placement(folder)
    model_layers = placement.model.layers
    replicas = [
        placement.replicas[0].model_copy(
            update={
                "id": f"{role}-{node}",
                "role": role,
                "stages": [Stage(gpus=[f"{node}/{index}"], layers=(0, model_layers))],
                "utilisation": 0.5,
            }
        )
        for node in NODES
        for index, role in enumerate(("prefill", "decode"))
    ]
    routes = [
        Route(
            from_=f"prefill-{source}",
            to=f"decode-{target}",
            flow_req_s=1.0,
            capacity_req_s=4.0,
            kv_bytes_per_req=placement.routes[0].kv_bytes_per_req,
        )
        for source in NODES
        for target in NODES
    ]
    nodes = [
        NodeSpec(name=name, accelerators=f"Core:{WORKERS}", interconnect="shared-memory") for name in NODES
    ]
    cluster = placement.cluster.model_copy(update={"name": "two-nodes", "nodes": nodes})
    return placement.model_copy(update={"cluster": cluster, "replicas": replicas, "routes": routes})


class Node(Process):
    """A `hexgen2 node` process. A replacement for an earlier one has the same identity and address."""

    def __init__(
        self,
        name: str,
        work: Path,
        model: Path,
        joins: list[Node],
        listen: str = LOOPBACK_LISTEN,
        options: tuple[str, ...] = (),
    ) -> None:
        self.name, self.work, self.model, self.joins, self.options = name, work, model, joins, options
        words = ["--name", name, "--listen", listen, "--model-path", str(model), *options]
        words += ["--identity", str(work / f"{name}.key"), "--network-key", str(network_key(work))]
        words += [word for node in joins for word in ("--join", node.address)]
        super().__init__([*MAIN, "node", *words], work / f"{name}.log")

    @property
    def address(self) -> str:
        return self.wait_for(r"listening on (\S+)")[1]

    def again(self) -> Node:
        """Start a new process in place of this one, which has ended."""
        listen = self.address.partition("/p2p/")[0]
        return Node(self.name, self.work, self.model, self.joins, listen, self.options)


class Head(Server):
    """A `hexgen2 launch --launcher p2p` process that knows the address of only one node. A patient one never
    takes a worker that is slow to answer, on a machine that is busy, for one that is lost."""

    def __init__(
        self, work: Path, placement: Path, model: Path, node: Node, *options: str, patient: bool = False
    ) -> None:
        how = ["--launcher", "p2p", "--identity", str(work / "head.key"), "--join", node.address, *options]
        where = ["--model-path", str(model), "--port", "0", "--network-key", str(network_key(work))]
        main = PATIENT_MAIN if patient else MAIN
        Process.__init__(self, [*main, "launch", str(placement), *where, *how], work / "head.log")


def network_key(work: Path) -> Path:
    """The network key of a test folder, written on the first call."""
    path = work / "network.key"
    if not path.exists():
        path.write_text("5a" * 32)
    return path


def workers(node: Process) -> list[psutil.Process]:
    """The worker processes of a node."""
    fork_servers = [each for each in node.family() if "forkserver" in " ".join(each.cmdline()[:4])]
    return [child for each in fork_servers for child in each.children()]


def until(condition: Callable[[], bool], *logs: Process) -> None:
    """Wait for a condition; show the logs if it does not come true."""
    deadline = time.monotonic() + GONE_S
    while not condition():
        assert time.monotonic() < deadline, "\n".join(each.log.read_text() for each in logs)
        time.sleep(0.05)


def stream_through(http: httpx.Client, disturb: Callable[[], object], tokens: int = TOKENS) -> list[str]:
    """Stream several requests at once and return their texts; call `disturb` once each has begun."""
    body = LONG | {"n": 6, "stream": True, "max_tokens": tokens}
    texts, disturbed = dict.fromkeys(range(6), ""), False
    with http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                texts[choice["index"]] += choice["text"]
                if not disturbed and all(texts.values()):
                    disturb()
                    disturbed = True
    assert disturbed
    return list(texts.values())
