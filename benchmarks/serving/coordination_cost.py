"""Cost of streaming tokens over libp2p instead of a socket: CPU time per token, and latency.

    python -m benchmarks.serving.coordination_cost [--repeats 3] [--steps 150]

Uses two processes on this machine: a node with decode replicas, and a front end. Each replica sends one
StepOutput per decode step, as real ones do, and the front end decodes it. The same frames go over socket
pairs (StreamLink, which `--launcher local` uses) and over libp2p (one Channel per replica, on one
connection), in turns. CPU time is that of both processes, all threads, from the first step to the last;
latency runs from before a frame is encoded to after it is decoded, by the machine's one clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from runtime.launcher.worker_link import StreamLink
from runtime.p2p.host import Peers
from runtime.p2p.membership.identity import new_identity, new_network_key
from runtime.p2p.transport.channel import Channel
from runtime.protocol.codec import decode, encode
from runtime.protocol.from_workers import StepOutput, TokenOutput
from runtime.protocol.message import Message

STEP_S = 0.04  # of a decode step: 25 tokens/s per stream
LOCAL = "/ip4/127.0.0.1/tcp/0"
SERVICE = "steps"


@dataclass(frozen=True)
class Load:
    """A number of replicas, each with a number of streams in its batch."""

    replicas: int
    tokens_a_frame: int

    @property
    def streams(self) -> int:
        return self.replicas * self.tokens_a_frame


LOADS = (Load(1, 1), Load(1, 16), Load(1, 32), Load(8, 32))


@dataclass(frozen=True)
class Cost:
    """cpu_us is the CPU time of both processes per token; latencies are in ms, one per frame."""

    cpu_us: float
    latency_ms: list[float]


async def stream_steps(send: Callable[[Message], None], replica: int, tokens: int, steps: int) -> None:
    """Send the frames of one replica on schedule; `index` of the first token carries the sending time."""
    await asyncio.sleep(random.random() * STEP_S)
    due = time.monotonic()
    for step in range(steps):
        due += STEP_S
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        outputs = [
            TokenOutput(request_id=f"cmpl-{replica:04d}-{stream:012d}", index=step, token=stream * 31 % 32000)
            for stream in range(1, tokens)
        ]
        first = TokenOutput(request_id=f"cmpl-{replica:04d}-0", index=time.monotonic_ns(), token=7)
        send(StepOutput(replica=f"decode-{replica}", outputs=(first, *outputs)))


async def take_steps(receive: Callable[[], Awaitable[Message | None]], steps: int) -> list[float]:
    """Milliseconds that each frame of one replica took."""
    taken = []
    for _ in range(steps):
        message = await receive()
        assert isinstance(message, StepOutput)
        taken.append((time.monotonic_ns() - message.outputs[0].index) / 1e6)
    return taken


# the node's process


async def node(load: Load, steps: int, descriptors: list[int]) -> float:
    """Serve the steps over these socket pairs, or over libp2p if there are none; return CPU seconds."""
    if descriptors:
        links = [await StreamLink.over(socket.socket(fileno=descriptor)) for descriptor in descriptors]
        senders = [link.send for link in links]
        return await send_all(senders, load, steps)
    peers = Peers(new_identity(), [LOCAL], bytes.fromhex(sys.stdin.readline()), None, [])
    channels: list[Channel] = []
    everybody, done = asyncio.Event(), asyncio.Event()

    async def keep(channel: Channel) -> None:
        channels.append(channel)
        if len(channels) == load.replicas:
            everybody.set()
        await done.wait()

    peers.serve(SERVICE, keep)
    await peers.start()
    print(peers.addresses[0], flush=True)
    await everybody.wait()
    cpu_s = await send_all([over(channel) for channel in channels], load, steps)
    done.set()
    await peers.stop()
    return cpu_s


def over(channel: Channel) -> Callable[[Message], None]:
    """Send messages over a channel."""
    return lambda message: channel.send(encode(message))


async def send_all(senders: Sequence[Callable[[Message], None]], load: Load, steps: int) -> float:
    await asyncio.sleep(1.0)  # lets the connections warm up
    started = time.process_time()
    work = [stream_steps(send, index, load.tokens_a_frame, steps) for index, send in enumerate(senders)]
    await asyncio.gather(*work)
    await asyncio.sleep(0.2)
    return time.process_time() - started


# the front end's process


async def front_end(load: Load, steps: int, libp2p: bool) -> Cost:
    """Start a node and receive all its steps."""
    pairs = [] if libp2p else [socket.socketpair() for _ in range(load.replicas)]
    theirs = [pair[1].fileno() for pair in pairs]
    command = [sys.executable, __file__, "--node", json.dumps([load.replicas, load.tokens_a_frame, theirs])]
    process = subprocess.Popen(
        [*command, "--steps", str(steps)],
        pass_fds=theirs,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        if not libp2p:
            links = []
            for ours, other in pairs:
                other.close()
                links.append(await StreamLink.over(ours))
            started = time.process_time()
            taken = await asyncio.gather(*(take_steps(link.receive, steps) for link in links))
            cpu_s = time.process_time() - started
            for link in links:
                link.close()
        else:
            key = new_network_key()
            process.stdin.write(key.hex() + "\n")
            process.stdin.flush()
            address = process.stdout.readline().strip()
            peers = Peers(new_identity(), [], key, None, [])
            await peers.start()
            channels = [await peers.open(address, SERVICE) for _ in range(load.replicas)]
            started = time.process_time()
            taken = await asyncio.gather(*(take_steps(decoded(channel), steps) for channel in channels))
            cpu_s = time.process_time() - started
            await peers.stop()
        cpu_s += float(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()
    tokens = load.streams * steps
    return Cost(1e6 * cpu_s / tokens, [ms for latencies in taken for ms in latencies])


def decoded(channel: Channel) -> Callable[[], Awaitable[Message | None]]:
    """Receive messages from a channel."""

    async def receive() -> Message | None:
        frame = await channel.receive()
        return None if frame is None else decode(memoryview(frame)[4:])

    return receive


def percentile(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def report(load: Load, direct: list[Cost], libp2p: list[Cost]) -> str:
    """One line of the table: CPU time and percentiles, as medians over the repeats."""

    def medians(costs: list[Cost]) -> tuple[float, float, float]:
        return (
            statistics.median(cost.cpu_us for cost in costs),
            statistics.median(percentile(cost.latency_ms, 50) for cost in costs),
            statistics.median(percentile(cost.latency_ms, 99) for cost in costs),
        )

    a, b = medians(direct), medians(libp2p)
    cells = [load.streams, load.replicas, load.tokens_a_frame, *a, *b, b[0] - a[0], b[1] - a[1], b[2] - a[2]]
    return " | ".join(f"{cell:11d}" if isinstance(cell, int) else f"{cell:11.2f}" for cell in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150, help="decode steps per replica")
    parser.add_argument("--node", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.node:
        replicas, tokens, descriptors = json.loads(options.node)
        print(asyncio.run(node(Load(replicas, tokens), options.steps, descriptors)), flush=True)
        return
    heads = "streams|replicas|tok/frame|direct us|direct p50|direct p99|libp2p us|libp2p p50|libp2p p99"
    print(f"us: CPU per token; p50, p99: ms per frame; load average {os.getloadavg()[0]:.1f}")
    print(" | ".join(f"{head.strip():>11}" for head in [*heads.split("|"), "added us", "add p50", "add p99"]))
    for load in LOADS:
        costs: dict[bool, list[Cost]] = {False: [], True: []}
        for _ in range(options.repeats):
            for libp2p in (False, True):
                costs[libp2p].append(asyncio.run(front_end(load, options.steps, libp2p)))
        print(report(load, costs[False], costs[True]), flush=True)


if __name__ == "__main__":
    main()
