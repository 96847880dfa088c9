"""Links to `vllm serve` replicas: they translate between the runtime's messages and vLLM's HTTP API.

To prefill for another replica, vLLM generates one token, which is thrown away. Its `kv_transfer_params` go
unchanged to the link of the decode replica, whose vLLM fetches the KV cache and chooses every token,
including the first. So when the first token arrives, the transfer is complete and the prefill side no longer
needs the cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import httpx

from runtime.launcher.worker_link import WorkerLink
from runtime.logs import about
from runtime.protocol.from_workers import (
    Failed,
    KvMoved,
    Load,
    Pong,
    Released,
    RequestFailed,
    Reserved,
    StepOutput,
)
from runtime.protocol.message import Message
from runtime.protocol.to_workers import Cancel, Decode, Ping, Prefill, ReserveKv, Shutdown
from runtime.vllm.health import Health
from runtime.vllm.requests import EngineError, completion, outputs_of, prefill

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0


class VllmFleet:
    """What the links of a fleet share: each other by replica, the model's name and KV cache size, and the API
    key, which keeps other users of this machine out.
    """

    def __init__(self, model: str, kv_bytes_per_token: float, key: str = "") -> None:
        self.model, self.kv_bytes_per_token, self.key = model, kv_bytes_per_token, key
        self.links: dict[str, VllmLink] = {}


@dataclass(slots=True)
class _Prefilled:
    """What the decode side receives once a prompt is prefilled."""

    message: Prefill
    kv: dict[str, Any] | None
    release: Callable[[], None]


class VllmLink(WorkerLink):
    """The link to a replica's vLLM server, in the place of its driver; its other workers have `QuietLink`s.

    Parameters
    ----------
    url : address of its API
    ended : set once its process has ended
    """

    def __init__(self, worker: str, replica: str, url: str, fleet: VllmFleet, ended: asyncio.Event) -> None:
        self.heard = 0
        self._worker, self._replica, self._fleet, self._ended = worker, replica, fleet, ended
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        headers = {"Authorization": f"Bearer {fleet.key}"} if fleet.key else {}
        self._http = httpx.AsyncClient(
            base_url=url, headers=headers, limits=limits, timeout=timeout, trust_env=False
        )
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._held: set[str] = set()
        self._prefilled: dict[str, _Prefilled] = {}
        self._closing: asyncio.Task[None] | None = None
        self._health = Health(self._http, fleet.model, lambda: bool(self._tasks), self._say, self._fail)
        fleet.links[replica] = self

    def send(self, message: Message) -> None:
        match message:
            case ReserveKv(request_id=request_id):
                self._held.add(request_id)
                self._say(Reserved(request_id=request_id, ok=True))
            case Prefill(request_id=request_id, target=""):
                self._held.add(request_id)
                self._begin(request_id, self._generate(message, None))
            case Prefill(request_id=request_id):
                self._held.add(request_id)
                self._begin(request_id, self._prefill(message))
            case Decode(request_id=request_id):  # the first token is here, so the transfer is complete
                self._release_prefill_side(request_id)
            case Cancel(request_id=request_id):
                self._release_prefill_side(request_id)
                if task := self._tasks.pop(request_id, None):
                    task.cancel()
                self._release(request_id)
            case Ping():
                self._health.ask()
                if self._health.good:
                    self._say(Pong(worker=self._worker))
            case Shutdown():
                self.close()

    async def receive(self) -> Message | None:
        news = asyncio.ensure_future(self._inbox.get())
        end = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait({news, end}, return_when=asyncio.FIRST_COMPLETED)
            return news.result() if news.done() else None
        finally:
            news.cancel()
            end.cancel()

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
        self._held.clear()
        self._health.close()
        if self._closing is None:
            self._closing = asyncio.create_task(self._http.aclose())

    def take_over(self, prefilled: _Prefilled) -> None:
        """Decode a request that another replica has prefilled."""
        request_id = prefilled.message.request_id
        if request_id not in self._held:
            prefilled.release()  # the request was cancelled meanwhile
            return
        self._prefilled[request_id] = prefilled
        self._begin(request_id, self._generate(prefilled.message, prefilled))

    def _say(self, message: Message) -> None:
        if not isinstance(message, Load):  # the API reports a load even if the engine hangs
            self.heard += 1
        self._inbox.put_nowait(message)

    def _release_prefill_side(self, request_id: str) -> None:
        """Let the prefill side of a request release its KV cache."""
        if prefilled := self._prefilled.pop(request_id, None):
            prefilled.release()

    def _release(self, request_id: str) -> None:
        if request_id in self._held:
            self._held.discard(request_id)
            self._say(Released(request_id=request_id, replica=self._replica))

    def _begin(self, request_id: str, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[request_id] = asyncio.create_task(self._guarded(request_id, work))

    async def _guarded(self, request_id: str, work: Coroutine[Any, Any, None]) -> None:
        """Do the work of one request; if that fails, report the request as failed and release it."""
        problem, fault = "", True
        try:
            await work
            return
        except EngineError as error:
            problem, fault = str(error), error.fault
        except (httpx.HTTPError, ValueError, KeyError) as error:
            problem = f"{type(error).__name__}: {error}"
        except Exception as error:
            log.exception("a request failed", extra=about(attempt=request_id))
            problem, fault = f"{type(error).__name__}: {error}", False
        if fault and await self._health.ends(self._ended):
            return  # the whole replica is lost, which covers this request
        self._tasks.pop(request_id, None)
        text = " ".join(problem.split())[:500]
        self._say(RequestFailed(request_id=request_id, replica=self._replica, text=text, fault=fault))
        self._release(request_id)

    async def _prefill(self, message: Prefill) -> None:
        request_id = message.request_id
        body = prefill(self._fleet.model, message.prompt, message.sampling)
        response = await self._http.post("/v1/completions", json=body)
        _check(response.status_code, response.content)
        kv = response.json().get("kv_transfer_params")
        self._health.moved()
        self._tasks.pop(request_id, None)
        target = self._fleet.links.get(message.target)
        if target is None:
            raise EngineError(f"there is no replica {message.target}", fault=True)
        target.take_over(_Prefilled(message, kv, lambda: self._release(request_id)))

    async def _generate(self, message: Prefill, prefilled: _Prefilled | None) -> None:
        request_id, sampling, index = message.request_id, message.sampling, message.index
        kv = prefilled.kv if prefilled else None
        body = completion(self._fleet.model, message.prompt, sampling, index, kv)
        begun_s = time.monotonic()
        async for chunk in self._stream(body):
            outputs = outputs_of(chunk, request_id, index, sampling.logprobs)
            if not outputs:
                continue
            if prefilled is not None and index == message.index:
                self._say(self._moved(message, kv, begun_s))
            self._health.moved()
            index += len(outputs)
            self._say(StepOutput(replica=self._replica, outputs=tuple(outputs)))
            if outputs[-1].finish_reason:
                self._tasks.pop(request_id, None)
                self._release(request_id)
                return
        raise EngineError("the stream ended before the output was complete", fault=True)

    def _moved(self, message: Prefill, kv: dict[str, Any] | None, begun_s: float) -> KvMoved:
        """The report of a transfer: bytes computed from the model, time including the first decode step."""
        size = len(message.prompt) * self._fleet.kv_bytes_per_token if kv else 0
        taken_s = time.monotonic() - begun_s
        return KvMoved(request_id=message.request_id, bytes_received=int(size), seconds=taken_s)

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                _check(response.status_code, await response.aread())
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line[len("data: ") :])

    def _fail(self, problem: str) -> None:
        self._say(Failed(worker=self._worker, kind="fault", text=problem))


class QuietLink(WorkerLink):
    """The link to a worker that vLLM itself manages: it lives as long as vLLM's process."""

    def __init__(self, ended: asyncio.Event) -> None:
        self.heard, self._ended = 0, ended

    def send(self, message: Message) -> None:
        if isinstance(message, Ping):
            self.heard += 1

    async def receive(self) -> Message | None:
        await self._ended.wait()
        return None

    def close(self) -> None:
        """Do nothing: there is no connection."""


def _check(status: int, body: bytes) -> None:
    if status != 200:
        text = body.decode(errors="replace")
        with contextlib.suppress(ValueError, AttributeError):
            text = json.loads(text)["error"]["message"]
        raise EngineError(f"HTTP {status}: {text}", fault=status >= 500)
