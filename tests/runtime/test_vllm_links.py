"""Links to vLLM, over servers that play its part: streams, failures and cancellations, without any model."""

from __future__ import annotations

import asyncio
import contextlib
import json
from contextlib import asynccontextmanager

import pytest
from scripted import run, settle, tokens_of

from runtime.coordinator import Coordinator
from runtime.engine.vllm import link
from runtime.engine.vllm.link import Exchange, QuietLink, VllmLink
from runtime.engine.vllm.requests import EngineError, completion, outputs_of
from runtime.messages import Sampling
from runtime.refusals import Unavailable
from runtime.replica import Replica
from runtime.router import Route, Router

PROMPT = [5, 6, 7]


def following(tokens: list[int], count: int) -> list[int]:
    """What the scripted model says after these tokens: each depends on all before it."""
    output: list[int] = []
    for _ in range(count):
        output.append((31 * sum([*tokens, *output]) + len(tokens) + len(output)) % 997)
    return output


class FakeVllm:
    """An HTTP server with the two paths of vLLM's that a link asks.

    `kv` has what a decode must be given back, by prompt; `open` counts the requests in work. `script` says
    what happens to the next completions: "500", "cut" after two tokens, "error" in the stream, "hang".
    """

    def __init__(self, kv: set[str]) -> None:
        self.kv, self.script, self.bodies, self.open = kv, [], [], 0
        self.hung = asyncio.Event()

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
                if head.startswith("get /health"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
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
        if what == "hang":
            self.hung.set()
            await reader.read(1)  # until the client goes away
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


@asynccontextmanager
async def serving(routes: list[Route]):
    """A coordinator over links to a scripted vLLM for every replica of the routes."""
    exchange, kv = Exchange("m", 10.0), set()
    servers, replicas, ends = {}, {}, {}
    for name in dict.fromkeys(name for route in routes for name in (route.prefill, route.decode)):
        servers[name], ends[name] = FakeVllm(kv), asyncio.Event()
        url = await servers[name].start()
        lead, quiet = f"n/{name}", f"n/{name}-1"
        links = {lead: VllmLink(lead, name, url, exchange, ends[name]), quiet: QuietLink(ends[name])}
        replicas[name] = Replica(name, "decode" if name.startswith("d") else "prefill", lead, links, 1000, 4)
    coordinator = Coordinator(Router(routes), replicas, ping_every_s=0.2)
    coordinator.start()
    try:
        yield coordinator, servers, ends
    finally:
        await coordinator.stop()
        for replica in replicas.values():
            for link in replica.links.values():
                link.close()
        for server in servers.values():
            server.server.close()


PAIR = [Route("p0", "d0", 1.0)]
TWO = [Route("p0", "d0", 1.0), Route("p1", "d1", 1.0)]


def test_tokens_come_from_the_decode_side_with_the_cache_of_the_prefill_side():
    async def scenario():
        async with serving(PAIR) as (coordinator, servers, _):
            several = [coordinator.submit([*PROMPT, k], Sampling(max_tokens=6)) for k in range(8)]
            for k, each in enumerate(several):
                assert await tokens_of(each) == following([*PROMPT, k], 6)
                assert each.record.kv_bytes == 40 and each.record.kv_arrived
            await settle(coordinator)
            assert all(body["max_tokens"] == 1 for body in servers["p0"].bodies)
            assert not servers["p0"].kv

    run(scenario)


def test_a_single_token_needs_no_second_replica():
    async def scenario():
        async with serving(PAIR) as (coordinator, servers, _):
            assert await tokens_of(coordinator.submit(PROMPT, Sampling(max_tokens=1))) == following(PROMPT, 1)
            await settle(coordinator)
            assert not servers["d0"].bodies

    run(scenario)


@pytest.mark.parametrize("what", ["500", "cut", "error"])
@pytest.mark.parametrize("where", ["p0", "d0"])
def test_what_vllm_fails_of_is_done_again_with_no_token_lost_or_repeated(what, where):
    async def scenario():
        async with serving(TWO) as (coordinator, servers, _):
            servers[where].script = [what]
            several = [coordinator.submit([*PROMPT, k], Sampling(max_tokens=6)) for k in range(4)]
            for k, each in enumerate(several):
                assert await tokens_of(each) == following([*PROMPT, k], 6)
            await settle(coordinator)

    run(scenario)


@pytest.mark.parametrize("where", ["p0", "d0"])
def test_a_cancelled_request_is_aborted_and_holds_nothing(where):
    async def scenario():
        async with serving(PAIR) as (coordinator, servers, _):
            servers[where].script = ["hang"]
            request = coordinator.submit(PROMPT, Sampling(max_tokens=6))
            await servers[where].hung.wait()
            coordinator.cancel(request)
            await settle(coordinator)
            while len(servers[where].bodies) and servers[where].open > 0:  # the connection closes
                await asyncio.sleep(0.005)

    run(scenario)


def test_a_replica_whose_process_ends_takes_its_requests_elsewhere():
    async def scenario():
        async with serving(TWO) as (coordinator, servers, ends):
            servers["d0"].script = ["hang"]
            several = [coordinator.submit([*PROMPT, k], Sampling(max_tokens=6)) for k in range(4)]
            await servers["d0"].hung.wait()
            ends["d0"].set()
            for k, each in enumerate(several):
                assert await tokens_of(each) == following([*PROMPT, k], 6)
            assert "d0" in coordinator.lost

    run(scenario)


@pytest.mark.parametrize("patience_s", [0.5, 30.0])
def test_a_server_that_answers_nobody_is_lost_once_patience_ends(monkeypatch, patience_s):
    monkeypatch.setattr(link, "PATIENCE_S", patience_s)

    async def scenario():
        async with serving(PAIR) as (coordinator, servers, _):
            servers["d0"].script = ["hang"]
            request = coordinator.submit(PROMPT, Sampling(max_tokens=6))
            await servers["d0"].hung.wait()
            servers["d0"].server.close()
            if patience_s > 10:
                await asyncio.sleep(2)
                assert not coordinator.lost
                return
            with pytest.raises(Unavailable):
                await tokens_of(request)

    run(scenario)


def test_the_rules_of_a_request_reach_vllm_from_where_it_goes_on():
    sampling = Sampling(
        temperature=0.5,
        top_k=7,
        logit_bias=((3, 1.5),),
        seed=2**64 - 1,
        min_tokens=5,
        max_tokens=20,
        stop_token_ids=(2, 9),
        logprobs=2,
    )
    body = completion("m", [1, 2, 3], sampling, 8, {"opaque": 1})
    assert body["max_tokens"] == 12 and body["min_tokens"] == 0 and body["logit_bias"] == {"3": 1.5}
    assert body["stop_token_ids"] == [2, 9] and body["ignore_eos"] and 0 <= body["seed"] < 2**63
    assert completion("m", [1], Sampling(stop_token_ids=(2,), ignore_eos=True), 0)["stop_token_ids"] == []


def test_logprobs_and_ends_of_a_stream():
    logprobs = {
        "token_logprobs": [-0.5, -1.5],
        "top_logprobs": [{"token_id:4": -0.5, "token_id:9": -0.7}, {"token_id:1": -0.1, "token_id:8": -1.5}],
    }
    chunk = {"choices": [{"token_ids": [4, 8], "logprobs": logprobs, "finish_reason": "stop"}]}
    first, second = outputs_of(chunk, "r", 3, 1)
    assert (first.index, first.finish_reason, second.index, second.finish_reason) == (3, "", 4, "stop")
    assert first.logprobs.chosen == -0.5 and first.logprobs.top == ((4, -0.5),)
    assert second.logprobs.top == ((1, -0.1),)
    assert outputs_of({"choices": []}, "r", 0, -1) == []
    for bad in ({"error": {"message": "x"}}, {"choices": [{"token_ids": [], "finish_reason": "error"}]}):
        with pytest.raises(EngineError):
            outputs_of(bad, "r", 0, -1)
