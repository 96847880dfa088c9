"""The executor of a worker: holds its part of the KV cache, runs the driver's steps, moves KV caches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from runtime.engine.base import Engine, HopOutcome, RangeEngine, Rows
from runtime.kv_transfer.layer_group import WHOLE, WINDOWED, KvPlan, LayerGroup
from runtime.kv_transfer.stream import Shapers
from runtime.protocol.between_workers import ExpectKv, KvSent, SequenceStart, Step, StepResult
from runtime.protocol.framing import Connection
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
        told = report, self._sent, self._failed, Shapers()
        if config.windowed is None:
            self._groups = [LayerGroup(WHOLE, config, connect, engine.cache, engine.shared, *told)]
        else:
            limited, cache = config.windowed, engine.windowed_cache
            if cache is None:
                raise RuntimeError(f"the {config.engine} engine keeps no windowed layers apart")
            layers = config.layers or config.stages[-1].end_layer
            others = [layer for layer in range(layers) if layer not in limited.layers]
            self._groups = [
                LayerGroup(WHOLE, config, connect, engine.cache, engine.shared, *told, layers=others),
                LayerGroup(
                    *(WINDOWED, config, connect, cache, engine.windowed_shared, *told),
                    layers=limited.layers,
                    window=limited.window,
                ),
            ]
        self._whole, self._windowed = self._groups[0], self._groups[-1]
        self._sending: set[str] = set()

    def reconnect(self, connect: Connect) -> None:
        """Take new addresses and stages of other replicas; the worker's own replica has not changed."""
        self._replicas = connect.replicas
        self._engine.reconnect(connect)
        for group in self._groups:
            group.reconnect(connect, self.config)

    def close(self) -> None:
        """End all KV connections: the cache is used no more."""
        for group in self._groups:
            group.close()

    def knows(self, replica: str) -> bool:
        """Whether this worker can send KV caches to a replica."""
        return replica in self._replicas

    def expect(self, message: ExpectKv) -> None:
        """Prepare for a request's KV cache, which will arrive for the blocks of the message."""
        tables = (message.table, message.windowed_table)
        for group, table in zip(self._groups, tables, strict=False):
            group.expect(message.request_id, table, message.first_token, message.end_token)

    def silent_s(self, request_id: str) -> float:
        """Seconds since a part of a request's KV cache came; infinite if none did, or all has come."""
        return min(group.receiver.silent_s(request_id) for group in self._groups)

    def receive(self, purpose: str, connection: Connection, peer: str) -> bool:
        """Serve a connection that carries KV caches until it ends; False if it is for something else."""
        for group in self._groups:
            if group.purpose == purpose:
                group.receiver.serve(connection, peer)
                return True
        return False

    def silence(self, request_id: str) -> None:
        """Stop writing a request's KV cache as it arrives: its blocks may go to other requests now."""
        for group in self._groups:
            group.receiver.forget(request_id)

    def execute(self, step: Step) -> StepResult | None:
        """Run this worker's share of a step; returns the tokens if this worker samples, otherwise None."""
        if self.config.ranges:
            self.execute_hop(step)
            return None
        self._begin(step)
        sent = [
            (each.request_id, each.position + len(each.tokens))
            for each in step.sequences
            if each.request_id in self._sending
        ]

        def on_layer(layer: int, ready: torch.cuda.Event | None) -> None:
            for group in self._groups:
                for request_id, upto in sent:
                    group.layer_ready(request_id, layer, upto, ready)

        tables = self._whole.tables, self._windowed.tables
        return self._engine.run(step, *tables, on_layer if sent else None)

    def execute_hop(self, step: Step, entering: Sequence[Rows | None] = ()) -> HopOutcome:
        """Run this worker's share of a step through its range of layers (see RangeEngine.run_hop)."""
        if not isinstance(self._engine, RangeEngine):
            raise RuntimeError(f"the {self.config.engine} engine cannot run ranges of layers")
        self._begin(step)
        return self._engine.run_hop(step, self._whole.tables, self._windowed.tables, entering)

    def _begin(self, step: Step) -> None:
        """Take note of the requests and blocks of a step."""
        for request_id in step.preempted:
            self._forget(request_id)
        for start in step.starts:
            for group in self._groups:
                group.tables[start.request_id] = []
            if start.target:
                self._sending.add(start.request_id)
                self._begin_sending(start)
        for sequence in step.sequences:
            self._whole.tables[sequence.request_id] += sequence.blocks
            if sequence.windowed_blocks:
                self._windowed.tables[sequence.request_id] += sequence.windowed_blocks
        self._engine.begin(step)

    def release(self, request_id: str) -> None:
        """Forget a request: no more of it is written to the cache, and the rest is not sent."""
        self.silence(request_id)
        if request_id in self._sending:
            self._sending.discard(request_id)
            for group in self._groups:
                group.give_up(request_id)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        for group in self._groups:
            group.tables.pop(request_id, None)
        self._engine.forget(request_id)

    def _begin_sending(self, start: SequenceStart) -> None:
        """Get ready to send a request's KV cache to its target. If that has gone since the driver accepted
        the request: nothing is sent, and the request fails."""
        plans: list[KvPlan]
        try:
            target = self._replicas[start.target]
            plans = [group.plan(target, self.spec.kv_heads) for group in self._groups]
        except (KeyError, ValueError) as error:
            self._failed(start.request_id, f"the KV cache can't go to replica {start.target}: {error}")
            plans = [() for _ in self._groups]
        for group, plan in zip(self._groups, plans, strict=True):
            group.begin(start.request_id, plan, start.target_tokens, start.end_token)

    def _sent(self, request_id: str) -> None:
        self._report(KvSent(request_id=request_id, worker=self.config.worker))

    def _failed(self, request_id: str, text: str) -> None:
        failure = RequestFailed(request_id=request_id, replica=self.config.replica, text=text, fault=True)
        self._report(failure)


def credentials(config: Configure, purpose: str) -> Credentials:
    """With which this worker connects to another."""
    return Credentials(config.worker, purpose, config.secret)
