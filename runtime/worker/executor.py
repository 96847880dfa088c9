"""The executor of a worker: holds its part of the KV cache, runs the driver's steps, moves KV caches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from runtime.engine.base import Engine, HopOutcome, RangeEngine, Rows
from runtime.kv_cache.layout import KvTransfer, outgoing
from runtime.kv_transfer import KvReceiver, KvSender
from runtime.protocol.between_workers import ExpectKv, KvSent, SequenceStart, Step, StepResult
from runtime.protocol.from_workers import RequestFailed
from runtime.protocol.handshake import Credentials
from runtime.protocol.message import Message
from runtime.protocol.to_workers import Configure, Connect

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class Executor:
    """Carries out on one worker what the driver of its replica says; every worker has one, the driver's too.

    Parameters
    ----------
    engine : computes the steps; it is loaded
    report : called with messages for the driver (KvLanded, KvSent, RequestFailed), from any thread

    Notes
    -----
    Only the main thread calls `execute` and `release`; `expect`, `silence` and the KV threads may run
    at the same time.
    """

    def __init__(
        self, config: Configure, connect: Connect, engine: Engine, report: Callable[[Message], None]
    ) -> None:
        self.config, self.spec, self.cache = config, engine.spec, engine.cache
        self._engine = engine
        engine.report = report
        self._replicas = connect.replicas
        self._report = report
        self.tables: dict[str, list[int]] = {}
        self.receiver = KvReceiver(config.worker, self.cache, report, self._failed)
        self._sender = KvSender(
            credentials(config, "kv"),
            self.cache,
            connect.peers,
            self._sent,
            self._failed,
            shared=engine.shared,
            transport=config.kv_transport,
            links=config.kv_links,
        )
        self._sending: set[str] = set()

    def reconnect(self, connect: Connect) -> None:
        """Take new addresses and stages of other replicas; the worker's own replica has not changed."""
        self._replicas = connect.replicas
        self._engine.reconnect(connect)
        self._sender.reconnect(connect.peers, self.config.kv_links)

    def close(self) -> None:
        """End all KV connections: the cache is used no more."""
        self.receiver.close()
        self._sender.close()

    def knows(self, replica: str) -> bool:
        """Whether this worker can send KV caches to a replica."""
        return replica in self._replicas

    def expect(self, message: ExpectKv) -> None:
        """Prepare for a request's KV cache, which will arrive for the blocks of the message."""
        self.receiver.expect(message.request_id, message.table, message.first_token, message.end_token)

    def silence(self, request_id: str) -> None:
        """Stop writing a request's KV cache as it arrives: its blocks may go to other requests now."""
        self.receiver.forget(request_id)

    def execute(self, step: Step) -> StepResult | None:
        """Run this worker's share of a step; returns the tokens if this worker samples, otherwise None."""
        if self.config.ranges:
            self.execute_hop(step)
            return None
        self._begin(step)
        sent = [
            (each.request_id, self.tables[each.request_id], each.position + len(each.tokens))
            for each in step.sequences
            if each.request_id in self._sending
        ]

        def on_layer(layer: int, ready: torch.cuda.Event | None) -> None:
            for request_id, table, upto in sent:
                self._sender.layer_ready(request_id, layer, table, upto, ready)

        return self._engine.run(step, self.tables, on_layer if sent else None)

    def execute_hop(self, step: Step, entering: Sequence[Rows | None] = ()) -> HopOutcome:
        """Run this worker's share of a step through its range of layers (see RangeEngine.run_hop)."""
        if not isinstance(self._engine, RangeEngine):
            raise RuntimeError(f"the {self.config.engine} engine cannot run ranges of layers")
        self._begin(step)
        return self._engine.run_hop(step, self.tables, entering)

    def _begin(self, step: Step) -> None:
        """Take note of the requests and blocks of a step."""
        for request_id in step.preempted:
            self._forget(request_id)
        for start in step.starts:
            self.tables[start.request_id] = []
            if start.target:
                self._sending.add(start.request_id)
                plan = self._plan(start)
                self._sender.begin(start.request_id, plan, start.target_tokens, start.end_token)
        for sequence in step.sequences:
            self.tables[sequence.request_id] += sequence.blocks
        self._engine.begin(step)

    def release(self, request_id: str) -> None:
        """Forget a request: no more of it is written to the cache, and the rest is not sent."""
        self.silence(request_id)
        if request_id in self._sending:
            self._sending.discard(request_id)
            self._sender.give_up(request_id)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self.tables.pop(request_id, None)
        self._engine.forget(request_id)

    def _plan(self, start: SequenceStart) -> tuple[KvTransfer, ...]:
        """What this worker sends to the request's target. If the target has gone since the driver accepted
        the request: nothing, and the request fails."""
        try:
            target = self._replicas[start.target]
            return outgoing(self.config.stages, self.config.worker, target, self.spec.kv_heads)
        except (KeyError, ValueError) as error:
            self._failed(start.request_id, f"the KV cache can't go to replica {start.target}: {error}")
            return ()

    def _sent(self, request_id: str) -> None:
        self._report(KvSent(request_id=request_id, worker=self.config.worker))

    def _failed(self, request_id: str, text: str) -> None:
        failure = RequestFailed(request_id=request_id, replica=self.config.replica, text=text, fault=True)
        self._report(failure)


def credentials(config: Configure, purpose: str) -> Credentials:
    """With which this worker connects to another."""
    return Credentials(config.worker, purpose, config.secret)
