"""Three machines on a network: join, launch, serve, cut one off, freeze one, slow one down.

    python -m benchmarks.serving.three_machines [--rate-mbit 200] [--delay-ms 1] [--requests 8]

The machines are network namespaces on a switch of their own, each behind a link that the kernel shapes. This
needs root, `ip` and `tc`; where they are missing, the script says so and exits with 0. It starts a head and
two nodes as an operator would, with identities, a network key and addresses; each node has a prefill and a
decode replica of a random Llama of 55 million parameters. KV caches go over TCP, because processes on one
kernel could otherwise use shared memory, which no link slows down.

The script cuts a link and mends it; stops a node's agent (SIGSTOP) and continues it; and slows a link to a
tenth of its rate.

The exit code is 1 if a text differs from that of an undisturbed run, if a lost replica does not come back, or
if the slow link costs a replica.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from benchmarks.serving.fleet import make_model
from benchmarks.serving.fleet import make_placement as search_pair
from hexgen2.placement import Placement, Replica, Route

MACHINES = {"head": "10.77.0.1", "left": "10.77.0.2", "right": "10.77.0.3"}
NODES = ("left", "right")
SWITCH, PREFIX = "switch", "hexgen2-"
PORT = 7400
PROMPT_TOKENS, OUTPUT_TOKENS = 256, 64
CLONE_NEWNET = 0x40000000
LIMIT_S = 300.0
MAIN = [sys.executable, "-c", "from hexgen2.cli import main; main()"]


class Missing(Exception):
    """This machine cannot create network namespaces or shape their links."""


def run(*words: str) -> None:
    """Run a command of iproute2.

    Raises
    ------
    Missing : it failed
    """
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise Missing(f"`{' '.join(words)}`: {done.stderr.strip()}")


@contextmanager
def machines(links: Links) -> Iterator[str]:
    """The namespaces, and how their links are shaped."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        raise Missing("namespaces need root, ip and tc")
    names = [PREFIX + name for name in (SWITCH, *MACHINES)]
    try:
        for name in names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", PREFIX + SWITCH, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", PREFIX + SWITCH, "link", "set", "bridge", "up")
        for name, address in MACHINES.items():
            _connect(name, address)
        yield ", ".join(sorted({links.shape(name) for name in MACHINES}))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _connect(name: str, address: str) -> None:
    """Connect a machine to the switch."""
    machine, switch = PREFIX + name, PREFIX + SWITCH
    run("ip", "-n", switch, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", machine)
    run("ip", "-n", switch, "link", "set", name, "master", "bridge", "up")
    run("ip", "-n", machine, "addr", "add", f"{address}/24", "dev", "eth0")
    run("ip", "-n", machine, "link", "set", "eth0", "up")


@dataclass(frozen=True)
class Links:
    """The rate and delay of each machine's link, in each direction."""

    rate_mbit: float
    delay_ms: float

    def shape(self, name: str) -> str:
        """Shape a machine's link; return a description."""
        machine, switch = PREFIX + name, PREFIX + SWITCH
        rate = f"{self.rate_mbit:g}mbit"
        shape = f"{self.rate_mbit:g} Mbit/s each way"
        for where, device in ((machine, "eth0"), (switch, name)):
            qdisc = ("ip", "netns", "exec", where, "tc", "qdisc", "replace", "dev", device, "root")
            try:
                run(*qdisc, "netem", "rate", rate, "delay", f"{self.delay_ms:g}ms")
                shape = f"{self.rate_mbit:g} Mbit/s and {self.delay_ms:g} ms each way"
            except Missing:  # the kernel has no netem: shape only the rate
                run(*qdisc, "tbf", "rate", rate, "burst", "128kb", "latency", "100ms")
        return shape


def move_to(name: str) -> None:
    """Make this process open its sockets on a machine from now on."""
    with open(f"/var/run/netns/{PREFIX}{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


@contextmanager
def process(machine: str, log: Path, *words: str) -> Iterator[subprocess.Popen]:
    """Run a command of hexgen2 on a machine until the block ends."""
    command = ["ip", "netns", "exec", PREFIX + machine, *MAIN, *words]
    with log.open("w") as stderr:
        started = subprocess.Popen(command, stderr=stderr, start_new_session=True)
    try:
        yield started
    finally:
        started.terminate()
        started.wait(60)


def line_of(log: Path, start: str, process: subprocess.Popen) -> str:
    """Wait for the first line of a log with this start."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith(start):
                return line
        time.sleep(0.02)
    raise SystemExit(f"no line {start!r} in:\n{log.read_text()}")


def mirrored(pair: Placement) -> Placement:
    """The same pair of replicas on each of two nodes, with routes between all of them."""
    (template,) = pair.cluster.nodes
    nodes = [template.model_copy(update={"name": name}) for name in NODES]

    def moved(gpu: str, node: str) -> str:
        return f"{node}/{gpu.rpartition('/')[2]}"

    def on(replica: Replica, node: str) -> Replica:
        stages = [
            stage.model_copy(update={"gpus": [moved(gpu, node) for gpu in stage.gpus]})
            for stage in replica.stages
        ]
        return replica.model_copy(update={"id": f"{replica.role}-{node}", "stages": stages})

    def between(route: Route, source: str, target: str) -> Route:
        links = [
            link.model_copy(update={"from_": moved(link.from_, source), "to": moved(link.to, target)})
            for link in route.links
        ]
        ends = {"from_": f"prefill-{source}", "to": f"decode-{target}", "links": links}
        return route.model_copy(update=ends | {"flow_req_s": route.flow_req_s / len(NODES)})

    replicas = [on(replica, node) for node in NODES for replica in pair.replicas]
    routes = [between(route, source, target) for route in pair.routes for source in NODES for target in NODES]
    rates = {
        "throughput": pair.throughput.model_copy(
            update={"req_s": len(NODES) * pair.throughput.req_s},
        ),
        "bound": pair.bound.model_copy(update={"req_s": len(NODES) * pair.bound.req_s}),
    }
    cluster = pair.cluster.model_copy(update={"name": "two-machines", "nodes": nodes})
    return pair.model_copy(update={"cluster": cluster, "replicas": replicas, "routes": routes, **rates})


@dataclass
class Answer:
    """A streamed answer: its text, first token and longest gap in seconds, and its route."""

    text: str
    ttft_s: float
    gap_s: float
    route: str


class Client:
    """A client of the front end, on the head's machine."""

    def __init__(self, url: str) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=LIMIT_S)

    async def stream(self, number: int) -> Answer:
        """Stream one answer to a prompt of its own, so that no cache helps."""
        prompt = [16 + (31 * number + 7 * position) % 200 for position in range(PROMPT_TOKENS)]
        body = {"model": self.model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True}
        begun = time.monotonic()
        times, text = [begun], ""
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise SystemExit(f"request {number}: {response.status_code} {await response.aread()!r}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise SystemExit(f"request {number}: {event['error']['message']}")
                    text += event["choices"][0]["text"]
                    times.append(time.monotonic())
            ends = [response.headers[f"x-hexgen2-{role}-replica"] for role in ("prefill", "decode")]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times[1:])]
        return Answer(text, times[1] - begun, max(gaps), " -> ".join(ends))

    async def streams(self, count: int) -> list[Answer]:
        """Several at once."""
        return list(await asyncio.gather(*(self.stream(number) for number in range(count))))

    async def start(self) -> None:
        """Ask for the model's name."""
        self.model = (await self.http.get("/v1/models")).json()["data"][0]["id"]

    async def lost(self) -> set[str]:
        """Replicas that do not serve."""
        states = (await self.http.get("/health")).json()["replicas"]
        return {name for name, state in states.items() if state != "up"}

    async def kv_bytes(self) -> float:
        """KV-cache bytes moved so far."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith("hexgen2_route_kv_bytes_total")
        )

    async def until(self, condition: Callable[[set[str]], bool]) -> float:
        """Seconds until the set of lost replicas meets a condition."""
        begun = time.monotonic()
        while not condition(await self.lost()):
            if time.monotonic() - begun > LIMIT_S:
                raise SystemExit("the fleet did not reach the expected state")
            await asyncio.sleep(0.02)
        return time.monotonic() - begun


def say(what: str, answers: list[Answer]) -> None:
    """Print one line of figures."""
    ttft = sorted(answer.ttft_s for answer in answers)
    gap = max(answer.gap_s for answer in answers)
    routes = sorted({answer.route for answer in answers})
    print(f"{what}: TTFT {ttft[len(ttft) // 2]:.2f} s (median), longest gap {gap:.2f} s")
    print(f"  routes: {', '.join(routes)}", flush=True)


@dataclass
class Course:
    """What happens to the fleet, step by step; every answer is kept."""

    client: Client
    requests: int
    agents: dict[str, subprocess.Popen]
    links: Links
    answers: list[Answer] = field(default_factory=list)

    async def run(self) -> bool:
        """Run all steps; return whether all went as it should."""
        await self.client.start()
        first = await self.streams(f"serve, {self.requests} streams at once")
        self.first_s = min(answer.ttft_s for answer in first)
        print(f"  KV cache moved: {await self.client.kv_bytes() / 1e6:.1f} MB")
        await self.lose("left", "cut", lambda: _set_link("left", "down"))
        back = await self.heal("left", "heal", lambda: _set_link("left", "up"))
        await self.lose("right", "freeze", lambda: self.agents["right"].send_signal(signal.SIGSTOP))
        back &= await self.heal("right", "thaw", lambda: self.agents["right"].send_signal(signal.SIGCONT))
        kept = await self.slow("left")
        texts = [answer.text for answer in self.answers]
        same = texts == texts[: self.requests] * (len(texts) // self.requests)
        print(f"texts {'as undisturbed' if same else 'DIFFER'}")
        return same and back and kept

    async def streams(self, what: str) -> list[Answer]:
        """Several at once, said in one line."""
        answers = await self.client.streams(self.requests)
        self.answers += answers
        say(what, answers)
        return answers

    async def during(self, disturb: Callable[[], None]) -> asyncio.Task[list[Answer]]:
        """Stream answers, and disturb them soon after their first tokens."""
        streams = asyncio.create_task(self.client.streams(self.requests))
        await asyncio.sleep(self.first_s + 0.5)
        disturb()
        return streams

    async def lose(self, node: str, how: str, disturb: Callable[[], None]) -> None:
        """Lose a node during streams, then serve with what is left."""
        streams = await self.during(disturb)
        begun = time.monotonic()
        found_s = await self.client.until(lambda lost: {f"prefill-{node}", f"decode-{node}"} <= lost)
        print(f"{how}: both replicas of `{node}` are found lost after {found_s:.2f} s")
        answers = await streams
        self.answers += answers
        say(f"  {self.requests} in-flight streams ended after {time.monotonic() - begun:.2f} s", answers)
        await self.streams("  more streams, on what is left")

    async def heal(self, node: str, how: str, mend: Callable[[], None]) -> bool:
        """Let a node come back; return whether it serves."""
        mend()
        print(
            f"{how}: every replica serves again after {await self.client.until(lambda lost: not lost):.2f} s"
        )
        answers = await self.streams("  more streams, on all replicas")
        used = {replica for answer in answers for replica in answer.route.split(" -> ")}
        back = {f"prefill-{node}", f"decode-{node}"} <= used
        if not back:
            print(f"  `{node}` DOES NOT SERVE")
        return back

    async def slow(self, node: str) -> bool:
        """Slow a node's link to a tenth during streams, then restore it; return whether no replica was
        lost."""
        lost: set[str] = set()
        slower = replace(self.links, rate_mbit=self.links.rate_mbit / 10)
        streams = await self.during(lambda: print(f"slow: `{node}` has {slower.shape(node)}", flush=True))
        while not streams.done():
            lost |= await self.client.lost()
            await asyncio.sleep(0.05)
        self.answers += streams.result()
        say(f"  {self.requests} in-flight streams", streams.result())
        await self.streams("  and more")
        lost |= await self.client.lost()
        print(
            f"fast: `{node}` has {self.links.shape(node)}; replicas lost: {', '.join(sorted(lost)) or 'none'}"
        )
        await self.streams("  and more")
        return not lost


def _set_link(machine: str, state: str) -> None:
    run("ip", "-n", PREFIX + machine, "link", "set", "eth0", state)


def main() -> None:
    """Make the machines, the model and the fleet, and run all steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate-mbit", type=float, default=200)
    parser.add_argument("--delay-ms", type=float, default=1)
    parser.add_argument("--requests", type=int, default=8)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the machines are removed in any case
    try:
        links = Links(options.rate_mbit, options.delay_ms)
        with tempfile.TemporaryDirectory() as work, machines(links) as shape:
            print(f"three machines, links of {shape}", flush=True)
            done = fleet(Path(work), options.requests, links)
    except Missing as missing:
        print(f"skipped: {missing}")
        return
    sys.exit(0 if done else 1)


def fleet(work: Path, requests: int, links: Links) -> bool:
    """Join and launch, then run all steps."""
    model = work / "model"
    make_model(model)
    found = Placement.load(search_pair(work, model, False, PROMPT_TOKENS, OUTPUT_TOKENS))
    placement = work / "two-machines.json"
    mirrored(found).save(placement)
    key = work / "network.key"
    subprocess.run([*MAIN, "node", "--new-network-key", str(key)], check=True)
    secrets = ["--network-key", str(key), "--model-path", str(model), "--identity"]
    logs = {name: work / f"{name}.log" for name in MACHINES}
    begun = time.monotonic()

    def node(name: str, *joins: str):
        listen = f"/ip4/{MACHINES[name]}/tcp/{PORT}"
        words = ["node", "--name", name, "--listen", listen, *secrets, str(work / f"{name}.key"), *joins]
        return process(name, logs[name], *words)

    with node("left") as left:
        address = line_of(logs["left"], "node left listening on ", left).split()[-1]
        with node("right", "--join", address) as right:
            other = line_of(logs["right"], "node right listening on ", right).split()[-1]
            print(f"join: two nodes listen after {time.monotonic() - begun:.1f} s", flush=True)
            begun = time.monotonic()
            words = f"launch {placement} --launcher p2p --kv-transport tcp --restarts 99 --port 0".split()
            words += ["--join", address, "--join", other, *secrets, str(work / "head.key")]
            with process("head", logs["head"], *words) as head:
                url = line_of(logs["head"], "serving ", head).split(" on ")[1].split()[0]
                print(f"launch: serving after {time.monotonic() - begun:.1f} s", flush=True)
                move_to("head")
                course = Course(Client(url), requests, {"left": left, "right": right}, links)
                return asyncio.run(course.run())


if __name__ == "__main__":
    main()
