"""A front end with scripted replicas: its workers speak the real messages but run no model.

    python -m benchmarks.serving.scripted_fleet PLACEMENT MODEL PORT [--link socket|libp2p] [--step-ms 10]

The front end is that of `hexgen2 launch` (API, coordinator, router, admission, tokenizer) with another
launcher. All workers are in one other process, over socket pairs like local workers, or over libp2p with one
channel per replica, like workers on a node. A prompt gets its first token at once, and every --step-ms a
decode replica sends one frame with a token for each of its requests.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hexgen2.placement import Placement
from runtime.frames import HEAD_BYTES
from runtime.launcher.base import Launcher
from runtime.launcher.nodes import agent_messages
from runtime.launcher.nodes.workers_channel import WorkersChannel
from runtime.launcher.startup import bring_to_ready
from runtime.launcher.worker_link import StreamLink, WorkerLink
from runtime.options import EMULATED, FrontOptions
from runtime.p2p.host import Peers
from runtime.p2p.membership.identity import new_identity, new_network_key
from runtime.p2p.transport.channel import Channel
from runtime.protocol.codec import decode as decode_message
from runtime.protocol.codec import encode as encode_message
from runtime.protocol.from_workers import (
    KvMoved,
    Listening,
    Pong,
    Ready,
    Released,
    Reserved,
    StepOutput,
    TokenOutput,
)
from runtime.protocol.message import Message
from runtime.protocol.to_workers import Cancel, Configure, Connect, Decode, Ping, Prefill, ReserveKv
from runtime.serve import serve

LOCAL = "/ip4/127.0.0.1/tcp/0"
FIRST_TOKEN, TOKENS = 260, 200
"""Token ids of a small Llama's vocabulary (see fleet.py): words and parts of words."""


def token_at(index: int) -> int:
    """Output token `index` of any request."""
    return FIRST_TOKEN + index % TOKENS


# the workers' process


class ScriptedWorker:
    """The only worker of a replica: it answers as a real one does, without a model.

    Parameters
    ----------
    send : sends a message to the front end
    step_s : seconds between two frames of tokens
    """

    def __init__(self, send: Callable[[Message], None], step_s: float) -> None:
        self._send, self._step_s = send, step_s
        self._replica = self._worker = ""
        self._last: dict[str, int] = {}
        self._next: dict[str, int] = {}
        self._stepping = asyncio.create_task(self._steps())

    def handle(self, message: Message | None) -> None:
        """Handle a message from the front end."""
        match message:
            case Configure():
                self._replica, self._worker = message.replica, message.worker
                self._send(Listening(worker=self._worker, port=1, store_port=0))
            case Connect():
                self._send(Ready(worker=self._worker, load_s=0.0, weight_bytes=0))
            case Ping():
                self._send(Pong(worker=self._worker))
            case ReserveKv(request_id=request_id):
                self._next[request_id] = 0
                self._send(Reserved(request_id=request_id, ok=True))
            case Prefill():
                self._prefill(message)
            case Decode(request_id=request_id) if request_id in self._next:
                self._send(KvMoved(request_id=request_id, bytes_received=1 << 20, seconds=0.001))
                self._next[request_id] = message.index
                self._last[request_id] = message.sampling.max_tokens - 1
            case Cancel(request_id=request_id) if request_id in self._next:
                self._release(request_id)

    def _prefill(self, message: Prefill) -> None:
        request_id, last = message.request_id, message.sampling.max_tokens - 1
        self._next[request_id] = message.index
        self._send(StepOutput(replica=self._replica, outputs=(self._token(request_id, last),)))
        if message.target or message.index == last:
            self._release(request_id)
        else:
            self._last[request_id] = last

    async def _steps(self) -> None:
        """Run decode steps forever."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self._step_s, loop.time())
            await asyncio.sleep(due - loop.time())
            outputs = [self._token(*each) for each in self._last.items()]
            if outputs:
                self._send(StepOutput(replica=self._replica, outputs=tuple(outputs)))
            for output in outputs:
                if output.finish_reason:
                    self._release(output.request_id)

    def _token(self, request_id: str, last: int) -> TokenOutput:
        index = self._next[request_id]
        self._next[request_id] = index + 1
        return TokenOutput(
            request_id=request_id,
            index=index,
            token=token_at(index),
            finish_reason="length" if index == last else "",
        )

    def _release(self, request_id: str) -> None:
        del self._next[request_id]
        self._last.pop(request_id, None)
        self._send(Released(request_id=request_id, replica=self._replica))


async def over_sockets(descriptors: Sequence[int], step_s: float) -> None:
    """Run a worker on each of these sockets until the front end closes them."""

    async def one(descriptor: int) -> None:
        link = await StreamLink.over(socket.socket(fileno=descriptor))
        worker = ScriptedWorker(link.send, step_s)
        while (message := await link.receive()) is not None:
            worker.handle(message)

    await asyncio.gather(*(one(descriptor) for descriptor in descriptors))


async def over_libp2p(network_key: bytes, step_s: float) -> None:
    """Run a worker on each channel that a head opens; print the address, and end when standard input ends."""
    peers = Peers(new_identity(), [LOCAL], network_key, None, [])

    async def one(channel: Channel) -> None:
        name = ""

        def send(message: Message) -> None:
            body = encode_message(message)[HEAD_BYTES:]
            channel.send(agent_messages.encode(agent_messages.WorkerFrame(worker=name, body=body)))

        worker = ScriptedWorker(send, step_s)
        while (frame := await channel.receive()) is not None:
            match agent_messages.decode(frame):
                case agent_messages.WorkerFrame(worker=name, body=body):
                    worker.handle(decode_message(body))
                case agent_messages.StopWorkers():
                    channel.send(agent_messages.encode(agent_messages.WorkersEnded()))

    peers.serve(agent_messages.WORKERS_SERVICE, one)
    await peers.start()
    print(peers.addresses[0], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await peers.stop()


# the front end's process


class ScriptedLauncher(Launcher):
    """All workers in one process, each with its own socket pair, or its own channel over libp2p."""

    def __init__(self, libp2p: bool, step_s: float) -> None:
        self._libp2p, self._step_s = libp2p, step_s
        self._process: subprocess.Popen[str] | None = None
        self._links: dict[str, WorkerLink] = {}
        self._peers: Peers | None = None

    def check(self, placement: Placement, source: str, emulated: bool = False) -> None:
        """Accept any placement whose replicas have one GPU each."""
        assert all(len(replica.gpus) == 1 for replica in placement.replicas)

    async def start(
        self, configurations: Mapping[str, Configure], report: Callable[[str], None]
    ) -> dict[str, WorkerLink]:
        connect = self._over_libp2p if self._libp2p else self._over_sockets
        self._links = await connect(list(configurations))
        await bring_to_ready(self._links, configurations, {}, report)
        return self._links

    async def restart(self, workers: Sequence[str], report: Callable[[str], None]) -> dict[str, WorkerLink]:
        raise RuntimeError("a scripted worker was lost")

    async def stop(self) -> None:
        for link in self._links.values():
            link.close()
        if self._peers is not None:
            await self._peers.stop()
        self.kill()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def _start_process(self, workers: str, descriptors: Sequence[int] = ()) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, "--workers", workers, "--step-ms", str(1e3 * self._step_s)]
        self._process = subprocess.Popen(
            command, pass_fds=descriptors, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self._process

    async def _over_sockets(self, workers: Sequence[str]) -> dict[str, WorkerLink]:
        ends = [socket.socketpair() for _ in workers]
        theirs = [end.fileno() for _, end in ends]
        self._start_process(",".join(map(str, theirs)), theirs)
        for _, end in ends:
            end.close()
        return {worker: await StreamLink.over(end) for worker, (end, _) in zip(workers, ends, strict=True)}

    async def _over_libp2p(self, workers: Sequence[str]) -> dict[str, WorkerLink]:
        key = new_network_key()
        process = self._start_process(key.hex())
        assert process.stdout is not None
        address = (await asyncio.to_thread(process.stdout.readline)).strip()
        self._peers = Peers(new_identity(), [], key, None, [])
        await self._peers.start()
        links: dict[str, WorkerLink] = {}
        for worker in workers:
            channel = await self._peers.open(address, agent_messages.WORKERS_SERVICE)
            links |= WorkersChannel(channel, "scripted", [worker]).links
        return links


def main() -> None:
    """Run the front end or, with --workers, its workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("placement", type=Path, nargs="?")
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("port", type=int, nargs="?")
    parser.add_argument("--link", choices=("socket", "libp2p"), default="socket")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--workers", help=argparse.SUPPRESS)
    options = parser.parse_args()
    step_s = options.step_ms / 1e3
    if options.workers is None:
        launcher = ScriptedLauncher(options.link == "libp2p", step_s)
        placement = Placement.load(options.placement)
        where = options.model, "127.0.0.1", options.port
        # All clients share one address; the front end of another checkout may not have this limit.
        limited = hasattr(FrontOptions, "max_address_connections")
        front = FrontOptions(max_address_connections=1000) if limited else FrontOptions()
        sys.exit(serve(placement, *where, launcher=launcher, engine=EMULATED, front=front))
    if len(options.workers) == 64:
        asyncio.run(over_libp2p(bytes.fromhex(options.workers), step_s))
    else:
        asyncio.run(over_sockets([int(each) for each in options.workers.split(",")], step_s))


if __name__ == "__main__":
    main()
