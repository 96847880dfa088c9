"""Scripted servers in place of vLLM, and a coordinator with links to them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from contextlib import asynccontextmanager

from runtime.frontend.coordinator import Coordinator
from runtime.frontend.replica import Replica
from runtime.launcher.worker_link import WorkerLink
from runtime.routing.router import Route, Router
from runtime.vllm.link import QuietLink, VllmFleet, VllmLink

PROMPT = [5, 6, 7]


def following(tokens: list[int], count: int) -> list[int]:
    """The scripted model's output after these tokens: each token depends on all before it."""
    output: list[int] = []
    for _ in range(count):
        output.append((31 * sum([*tokens, *output]) + len(tokens) + len(output)) % 997)
    return output


class FakeVllm:
    """An HTTP server with the two vLLM paths that a link uses.

    `kv` has the parameters that a decode must be given back, by prompt; `open` counts in-flight requests.
    `script` says what happens to the next completions: "500", "cut" after two tokens, "error" in the stream,
    "hang". `health` is the status of /health, which answers after `takes_s` and has done so `answered` times;
    `figures` is the text of /metrics; `stuck` hangs everything that the engine does.
    """

    def __init__(self, kv: set[str]) -> None:
        self.kv, self.script, self.bodies, self.open = kv, [], [], 0
        self.hung = asyncio.Event()
        self.health, self.figures, self.stuck = "200 OK", "", False
        self.takes_s, self.answered = 0.0, 0

    async def start(self) -> str:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.partition("content-length: ")[2].partition("\r\n")[0] or 0)
                body = await reader.readexactly(length)
                if head.startswith("get "):
                    status, text = "200 OK", self.figures
                    if "/health" in head:
                        await asyncio.sleep(self.takes_s)
                        status, text, self.answered = self.health, "", self.answered + 1
                    size = f"content-length: {len(text)}\r\nconnection: close"
                    writer.write(f"HTTP/1.1 {status}\r\n{size}\r\n\r\n{text}".encode())
                else:
                    await self._complete(json.loads(body), reader, writer)
                await writer.drain()
        finally:
            self.open -= 1
            writer.close()

    async def _complete(self, body: dict, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.bodies.append(body)
        what = self.script.pop(0) if self.script else ""
        status = "500 X" if what == "500" else "200 OK"
        writer.write(f"HTTP/1.1 {status}\r\nconnection: close\r\n\r\n".encode())
        if what == "500":
            writer.write(b'{"error": {"message": "KV load failed", "code": 500}}')
            return
        if what == "hang" or self.stuck:
            self.hung.set()
            await reader.read(1)  # until the client disconnects
            return
        params, name = body.get("kv_transfer_params"), json.dumps(body["prompt"])
        if params and params.get("do_remote_decode"):
            self.kv.add(name)
            writer.write(json.dumps({"choices": [], "kv_transfer_params": {"opaque": name}}).encode())
            return
        if params is not None:
            assert params == {"opaque": name}
            self.kv.remove(name)
        tokens = following(body["prompt"], body["max_tokens"])
        for k, token in enumerate(tokens):
            if k == 2 and what in ("cut", "error"):
                if what == "error":
                    writer.write(b'data: {"error": {"message": "EngineDeadError", "code": 500}}\n\n')
                return
            reason = "length" if k == len(tokens) - 1 else None
            chunk = {"choices": [{"token_ids": [token], "finish_reason": reason}]}
            writer.write(f"data: {json.dumps(chunk)}\n\n".encode())
            await asyncio.sleep(0)
        writer.write(b"data: [DONE]\n\n")


async def begin(
    name: str,
    fleet: VllmFleet,
    kv: set[str],
    servers: dict[str, FakeVllm],
    ends: dict[str, asyncio.Event],
) -> dict[str, WorkerLink]:
    """Start a replica's vLLM, in place of an earlier one if there is one; return the links to it."""
    servers[name], ends[name] = FakeVllm(kv), asyncio.Event()
    driver, url = f"n/{name}", await servers[name].start()
    return {driver: VllmLink(driver, name, url, fleet, ends[name]), f"{driver}-1": QuietLink(ends[name])}


@asynccontextmanager
async def serving(routes: list[Route], revives: bool = False):
    """A coordinator with links to a scripted vLLM for every replica of the routes, the servers, and the
    events of their ends. `revives`: whether lost replicas come back."""
    fleet, kv = VllmFleet("m", 10.0), set()
    servers, replicas, ends = {}, {}, {}
    for name in dict.fromkeys(name for route in routes for name in (route.prefill, route.decode)):
        driver, links = f"n/{name}", await begin(name, fleet, kv, servers, ends)
        role = {"p": "prefill", "d": "decode", "m": "mixed"}[name[0]]
        replicas[name] = Replica(name, role, driver, links, 1000, 4)
    coordinator = Coordinator(Router(routes), replicas, ping_every_s=0.2)
    coordinator.start(lambda _: revives)
    try:
        yield coordinator, servers, ends
    finally:
        await coordinator.stop()
        for replica in replicas.values():
            for link in replica.links.values():
                link.close()
        for server in servers.values():
            server.server.close()
