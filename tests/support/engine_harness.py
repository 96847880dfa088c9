"""A minimal front end for tests: it starts worker processes, wires replicas and drives requests."""

from __future__ import annotations

import multiprocessing
import queue
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from runtime.launcher.processes import preloaded
from runtime.protocol.framing import Connection
from runtime.protocol.from_workers import (
    Failed,
    KvMoved,
    Listening,
    Ready,
    Released,
    RequestFailed,
    Reserved,
    StepOutput,
)
from runtime.protocol.message import PROTOCOL_VERSION, Message, Sampling, StageShape
from runtime.protocol.to_workers import Cancel, Configure, Connect, Decode, Prefill, ReserveKv, Shutdown
from runtime.worker.process import worker_main

TIMEOUT_S = 60.0

Shape = list[tuple[int, int, int]]
"""Stages as (tensor-parallel degree, first layer, end layer)."""


@dataclass
class Outcome:
    """What the front end has seen of one request."""

    tokens: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str = ""
    moved: KvMoved | None = None
    reserved: bool | None = None
    already_there: int = 0
    cached: int = 0
    free_blocks: dict[str, int] = field(default_factory=dict)
    preemptions: dict[str, int] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)
    failures: list[RequestFailed] = field(default_factory=list)


@dataclass
class _Route:
    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    prefill: str
    decode: str
    index: int
    hold: bool


class Cluster:
    """Replicas of real worker processes, all started by one fork server, on the loopback address.

    If `patient`, a request that finds no room asks again when another one is released.
    """

    def __init__(
        self, checkpoint: Path, replicas: dict[str, Shape], patient: bool = False, **settings: Any
    ) -> None:
        self.replicas = replicas
        self.patient = patient
        self._refused: dict[str, list[str]] = {}
        self.stages: dict[str, tuple[StageShape, ...]] = {}
        self.checkpoint = checkpoint
        self.settings = {
            "device": "cpu",
            "dtype": "auto",
            "kv_budget_tokens": 20_000,
            "block_tokens": 8,
            "max_batch": 32,
            "max_prefill_tokens": 128,
            "max_mixed_tokens": 64,
            "reuse_prefixes": True,
            "host": "127.0.0.1",
            "threads": 1,
            "role": "colocated",
            "secret": secrets.token_hex(16),
            **settings,
        }
        self.processes: dict[str, BaseProcess] = {}
        self.controls: dict[str, Connection] = {}
        self.ports: dict[str, int] = {}
        self.stores: dict[str, int] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.failed: queue.SimpleQueue[Failed] = queue.SimpleQueue()
        self._routes: dict[str, _Route] = {}
        self._changed = threading.Condition()

    def __enter__(self) -> Cluster:
        try:
            self.start(self.replicas)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill() if exception[0] else self.stop()

    # -- processes

    def start(self, replicas: dict[str, Shape]) -> None:
        """Start replicas, alone or beside running ones, and wait until their workers are ready."""
        workers = self.spawn(replicas)
        self.connect()
        for worker in workers:
            message = self.controls[worker].receive()
            assert isinstance(message, Ready), message
        for name in replicas:
            control = self.controls[self.stages[name][0].workers[0]]
            control.stream.settimeout(None)
            threading.Thread(target=self._read, args=(name, control), daemon=True).start()

    def spawn(self, replicas: dict[str, Shape]) -> list[str]:
        """Start the processes and read their ports."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(preloaded("torch"))
        started = []
        for name, shape in replicas.items():
            stages = self.stages[name] = _stages(name, shape)
            for worker in (worker for stage in stages for worker in stage.workers):
                started.append(worker)
                ours, theirs = socket.socketpair()
                process = context.Process(target=worker_main, args=(theirs,), name=worker)
                process.start()
                theirs.close()
                ours.settimeout(TIMEOUT_S)
                self.processes[worker], self.controls[worker] = process, Connection(ours)
                self.controls[worker].send(
                    Configure(
                        protocol=PROTOCOL_VERSION,
                        worker=worker,
                        replica=name,
                        stages=stages,
                        checkpoint=str(self.checkpoint),
                        **{"steps_in_flight": len(stages), **self.settings},
                    )
                )
        for worker in started:
            message = self.controls[worker].receive()
            assert isinstance(message, Listening), message
            self.ports[worker], self.stores[worker] = message.port, message.store_port
        return started

    def connect(self) -> None:
        """Tell every worker the addresses of the others, including workers that know them already."""
        peers = {worker: ("127.0.0.1", port) for worker, port in self.ports.items()}
        for stages in self.stages.values():
            store_port = self.stores[stages[0].workers[0]]
            for worker in (worker for stage in stages for worker in stage.workers):
                if control := self.controls.get(worker):
                    control.send(Connect(peers=peers, replicas=self.stages, store_port=store_port))

    def stop(self) -> None:
        """Shut down; every worker must exit with 0."""
        for control in self.controls.values():
            control.send(Shutdown())
        for process in self.processes.values():
            process.join(10)
        codes = {name: process.exitcode for name, process in self.processes.items()}
        self.kill()
        assert set(codes.values()) <= {0}, codes

    def lose(self, *workers: str) -> list[int | None]:
        """Kill workers that still run and forget them; return their exit codes."""
        codes = []
        for worker in workers:
            process = self.processes.pop(worker)
            process.kill()
            process.join(10)
            codes.append(process.exitcode)
            self.controls.pop(worker).close()
        return codes

    def kill(self) -> None:
        """Kill whatever still runs."""
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
            process.join(10)
        for control in self.controls.values():
            control.close()

    # -- requests

    def send(self, replica: str, message: Message) -> None:
        """Send to the driver of a replica, unless it is lost."""
        if control := self.controls.get(self.stages[replica][0].workers[0]):
            control.send(message)

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        sampling: Sampling,
        prefill: str,
        decode: str,
        index: int = 0,
        hold: bool = False,
    ) -> None:
        """Start a request. The same replica twice means colocated; `hold` stops the request after its
        reservation."""
        self.outcomes[request_id] = Outcome()
        route = _Route(request_id, tuple(prompt), sampling, prefill, decode, index, hold)
        self._routes[request_id] = route
        if prefill == decode:
            self.prefill(request_id)
        else:
            self._expect(route)

    def _expect(self, route: _Route) -> None:
        capacity = len(route.prompt) + route.sampling.max_tokens
        expect = ReserveKv(request_id=route.request_id, prompt=route.prompt, capacity_tokens=capacity)
        self.send(route.decode, expect)

    def cancel(self, request_id: str, replica: str) -> None:
        self.send(replica, Cancel(request_id=request_id))

    def wait(
        self, request_id: str, condition: Callable[[Outcome], bool], timeout_s: float = TIMEOUT_S
    ) -> Outcome:
        """Wait until a request's outcome meets a condition."""
        with self._changed:
            met = self._changed.wait_for(lambda: condition(self.outcomes[request_id]), timeout_s)
        assert met, (request_id, self.outcomes[request_id])
        return self.outcomes[request_id]

    def finish(self, request_id: str) -> Outcome:
        """Wait until a request has ended and holds nothing anywhere."""
        route = self._routes[request_id]
        replicas = {route.prefill, route.decode}
        return self.wait(request_id, lambda o: bool(o.finish_reason) and o.released == replicas)

    def prefill(self, request_id: str) -> None:
        """Run a request's prompt."""
        route = self._routes[request_id]
        message = Prefill(
            request_id=route.request_id,
            prompt=route.prompt,
            sampling=route.sampling,
            target="" if route.prefill == route.decode else route.decode,
            target_tokens=self.outcomes[request_id].already_there,
            index=route.index,
        )
        self.send(route.prefill, message)

    def _read(self, replica: str, control: Connection) -> None:
        """Read answers of one driver; token 0 of a disaggregated request goes on to its decode replica."""
        while True:
            try:
                message = control.receive()
            except OSError:
                return
            if message is None:
                return
            with self._changed:
                self._take(replica, message)
                self._changed.notify_all()

    def _take(self, replica: str, message: Message) -> None:
        match message:
            case Reserved(request_id=request_id, ok=ok):
                self.outcomes[request_id].reserved = ok
                self.outcomes[request_id].already_there = message.cached_tokens
                if not ok and self.patient:
                    self._refused.setdefault(replica, []).append(request_id)
                if ok and not self._routes[request_id].hold:
                    self.prefill(request_id)
            case StepOutput(outputs=outputs):
                for output in outputs:
                    outcome = self.outcomes[output.request_id]
                    outcome.tokens.append(output.token)
                    outcome.indices.append(output.index)
                    outcome.logprobs.append(output.logprobs)
                    outcome.finish_reason = output.finish_reason
                    outcome.cached = max(outcome.cached, output.cached_tokens)
                    route = self._routes[output.request_id]
                    if output.index == 0 and route.prefill != route.decode:
                        self._hand_over(route, output.token, output.finish_reason)
            case KvMoved(request_id=request_id):
                self.outcomes[request_id].moved = message
            case Released(request_id=request_id):
                outcome = self.outcomes[request_id]
                outcome.released.add(replica)
                outcome.free_blocks[replica] = message.free_blocks
                outcome.preemptions[replica] = message.preemptions
                for refused in self._refused.pop(replica, []):
                    self._expect(self._routes[refused])
            case RequestFailed(request_id=request_id):
                self.outcomes[request_id].failures.append(message)
            case Failed():
                self.failed.put(message)

    def _hand_over(self, route: _Route, token: int, finish_reason: str) -> None:
        if finish_reason:
            self.cancel(route.request_id, route.decode)
            return
        decode = Decode(request_id=route.request_id, last_token=token, index=1, sampling=route.sampling)
        self.send(route.decode, decode)


def _stages(name: str, shape: Shape) -> tuple[StageShape, ...]:
    stages, gpu = [], 0
    for degree, first, end in shape:
        workers = tuple(f"{name}/{gpu + rank}" for rank in range(degree))
        stages.append(StageShape(workers=workers, first_layer=first, end_layer=end))
        gpu += degree
    return tuple(stages)
