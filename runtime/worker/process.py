"""The worker process of one GPU, from its first message to its last.

Threads: the main thread computes, each socket has a reader, each KV destination a sender. A driver runs in
the main thread too, but in a pipeline in one of its own. The process ends at once on Shutdown, or when the
parent's end of the control socket closes, whatever is running.

When its replica takes another role, a worker gets a new executor, driver and KV cache, and keeps the rest:
process, weights, and connections within the replica.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import socket
import threading
import time
from typing import NoReturn

import msgspec

from runtime import logs
from runtime.engine.base import Engine, RangeEngine
from runtime.engine.rank import Rank
from runtime.engine.registry import make_engine
from runtime.kv_cache.blocks import BlockPool
from runtime.protocol.between_workers import ExpectingKv, ExpectKv, Hello, NewRole, Release, Step
from runtime.protocol.framing import Connection
from runtime.protocol.from_workers import Ready
from runtime.protocol.handshake import connect
from runtime.protocol.message import ATTENTION, Message
from runtime.protocol.to_workers import Configure, Connect, ReserveKv
from runtime.worker.attention_process import AttentionProcess
from runtime.worker.base import WorkerProcess, awaited
from runtime.worker.driver import Driver, Own
from runtime.worker.driver_base import DriverBase, Inbox, StageFree
from runtime.worker.executor import Executor, credentials
from runtime.worker.ranges.activations import PURPOSE as ACTIVATIONS
from runtime.worker.ranges.driver import RangeDriver

log = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 30.0


def worker_main(control_socket: socket.socket, secret: str = "") -> None:
    """Run one worker until Shutdown or the end of its parent.

    Parameters
    ----------
    control_socket : stream to the supervisor, which sends Configure, then Connect once every worker has
        answered Listening, and requests to the driver once every worker has answered Ready; later Configure
        again for another role
    secret : the launch's secret, given here if others may read the stream, so that Configure has none
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.set_up("worker")
    control = Connection(control_socket)
    try:
        config = awaited(control, Configure)
    except OSError as error:
        log.error("no configuration: %s", error)
        os._exit(1)
    if secret:
        config = msgspec.structs.replace(config, secret=secret)
    logs.set_up(config.worker, config.replica)
    kind: type[WorkerProcess] = AttentionProcess if config.role == ATTENTION else _Worker
    worker = kind(config, control)
    try:
        worker.run()
    except Exception as error:
        worker.die(error)


class _Worker(WorkerProcess):
    """Starts a worker, then runs the loop of its driver or executor in the main thread."""

    def __init__(self, config: Configure, control: Connection) -> None:
        super().__init__(config, control)
        self.rank = Rank.find(config.stages, config.worker, config.layers)
        self.inbox: Inbox = queue.SimpleQueue()
        self.own: Own = queue.SimpleQueue()
        self.engine: Engine | None = None
        self.executor: Executor | None = None
        self.driver: DriverBase | None = None
        self.to_driver: Connection | None = None
        self.others: dict[str, Connection] = {}
        self._all_here = threading.Event()
        self._roles = queue.SimpleQueue[Configure]()
        self._addresses: Connect | None = None
        self._connecting = threading.Lock()

    def run(self) -> NoReturn:
        """Open sockets, load weights, join the groups, then run steps until the process ends."""
        config, rank = self.config, self.rank
        self.check()
        engine = self.engine = make_engine(config, rank)
        addresses = self._addresses = self.open(engine.store_port)
        started = time.monotonic()
        engine.load()
        load_s = time.monotonic() - started
        log.info("loaded %d bytes of weights in %.2f s", engine.weight_bytes, load_s)
        self.executor = self._make_executor(engine)
        self._meet(addresses)
        engine.join(addresses)
        if not rank.is_driver:
            self._start("driver", self._read_driver)
        role = self._serve(self.executor, load_s)
        while True:
            role = self._serve(*self._turn(engine, role))

    # -- main thread

    def _make_executor(self, engine: Engine) -> Executor:
        with self._connecting:
            assert self._addresses is not None
            self.executor = Executor(self.config, self._addresses, engine, self._report)
            return self.executor

    def _serve(self, executor: Executor, load_s: float, pool: BlockPool | None = None) -> Configure:
        """Say that this worker is ready, and run steps until the replica is to take another role, whose
        configuration is returned."""
        is_pipeline, engine = len(self.config.stages) > 1, self.engine
        assert engine is not None
        if self.rank.is_driver:
            self.driver = self._make_driver(executor, pool)
        gc.collect()
        gc.freeze()  # these objects stay; collecting them again would stop a step for a tenth of a second
        self.control.send(Ready(worker=self.config.worker, load_s=load_s, weight_bytes=engine.weight_bytes))
        if self.driver is not None and not is_pipeline:
            return self.driver.run()
        if self.driver is not None:
            driver = self.driver
            self._start("driver", lambda: self._roles.put(driver.run()))
        self._follow(executor)
        return self._roles.get()

    def _make_driver(self, executor: Executor, pool: BlockPool | None) -> DriverBase:
        given = executor, self.control, self.others, self.inbox
        if self.config.ranges:
            with self._connecting:
                assert self._addresses is not None and isinstance(self.engine, RangeEngine)
                return RangeDriver(*given, self._addresses.peers, self.engine.row_bytes)
        return Driver(*given, self.own if len(self.config.stages) > 1 else None, pool)

    def _turn(self, engine: Engine, role: Configure) -> tuple[Executor, float, BlockPool | None]:
        """Take another role: the arguments of `_serve`. The replica holds no requests; blocks of the prompts
        that it had stay if the cache does."""
        began = time.monotonic()
        if role.stages != self.config.stages:
            raise RuntimeError(f"replica {role.replica} has other stages than {self.config.replica}")
        config = self.config = self.config.turned(role)
        logs.set_up(config.worker, config.replica)
        assert self.executor is not None
        sizes, pool = engine.cache_blocks, self.driver.pool if self.driver is not None else None
        self.driver = None
        self.executor.close()
        self.executor = None
        gc.unfreeze()
        gc.collect()  # old executor and KV cache, whose memory the new one may need
        engine.turn(config)
        executor = self._make_executor(engine)
        log.info("turned into a %s replica in %.3f s", config.role, time.monotonic() - began)
        return executor, 0.0, pool if engine.cache_blocks == sizes else None

    def _meet(self, addresses: Connect) -> None:
        """Connect the replica's other workers, once loaded, to the driver, which waits for all of them."""
        if not self.rank.is_driver:
            driver = addresses.peers[self.rank.workers[0]]
            self.to_driver = connect(driver, credentials(self.config, "control"), CONTROL_TIMEOUT_S)
            self.to_driver.stream.settimeout(None)
        elif len(self.rank.workers) > 1:
            self._all_here.wait()

    def _follow(self, executor: Executor) -> None:
        """Run the driver's steps until the replica is to take another role."""
        while True:
            match self.own.get():
                case NewRole():
                    return
                case Step() as step:
                    result = executor.execute(step)
                    if self.driver is not None:
                        self.inbox.put(StageFree())
                    elif result is not None:
                        self._report(result)
                case Release(request_ids=request_ids):
                    for request_id in request_ids:
                        executor.release(request_id)

    def _report(self, message: Message) -> None:
        """Send a message to the driver: through its socket, or to this worker's own inbox."""
        if self.to_driver is None:
            self.inbox.put(message)
        else:
            self.to_driver.send(message)

    # -- reader threads

    def take(self, message: Message) -> None:
        if isinstance(message, Connect):
            with self._connecting:
                self._addresses = message
                if self.executor is not None:
                    self.executor.reconnect(message)
                if isinstance(self.driver, RangeDriver):
                    self.driver.reconnect(message.peers)
        elif isinstance(message, Configure):
            (self.inbox if self.rank.is_driver else self._roles).put(message)
        elif self.driver is None:
            log.warning("worker %s: %s is for a driver only", self.config.worker, type(message).__name__)
        elif isinstance(message, ReserveKv) and isinstance(self.driver, Driver):
            self.driver.reserve(message)
        else:
            self.inbox.put(message)

    def _read_driver(self) -> None:
        assert self.to_driver is not None
        while (message := self.to_driver.receive()) is not None:
            executor = self.executor
            if isinstance(message, ExpectKv) and executor is not None:
                executor.expect(message)
                self.to_driver.send(ExpectingKv(request_id=message.request_id))
                continue
            if isinstance(message, Release) and executor is not None:
                for request_id in message.request_ids:
                    executor.silence(request_id)
            if isinstance(message, Step | Release | NewRole):
                self.own.put(message)
        raise ConnectionError("the replica's driver is gone")

    def _read_executor(self, name: str, connection: Connection) -> None:
        while (message := connection.receive()) is not None:
            if isinstance(message, ExpectingKv) and isinstance(self.driver, Driver):
                self.driver.acknowledge(name, message.request_id)
            else:
                self.inbox.put(message)
        raise ConnectionError(f"the executor {name} is gone")

    def serves(self, connection: Connection, introduced: Hello) -> bool:
        name = introduced.worker
        if self.executor is not None and self.executor.receive(introduced.purpose, connection, name):
            return True
        if introduced.purpose == "control" and self.rank.is_driver and self._is_new_executor(name):
            self.others[name] = connection
            if len(self.others) == len(self.rank.workers) - 1:
                self._all_here.set()
            self._read_executor(name, connection)
        elif introduced.purpose == ACTIVATIONS and isinstance(self.driver, RangeDriver):
            self.driver.receive_from(connection, name)
        else:
            return self.engine is not None and self.engine.welcome(connection, introduced)
        return True

    def _is_new_executor(self, name: str) -> bool:
        return name in self.rank.workers[1:] and name not in self.others
