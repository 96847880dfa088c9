"""What every worker of a replica does, lead or follower: hold caches, run steps, move KV."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from runtime.engine.cache import CacheShape, CacheTable
from runtime.engine.kv_receive import KvReceiver
from runtime.engine.kv_transfer import KvSender
from runtime.engine.models.base import DecoderStage
from runtime.engine.runner import StageRunner
from runtime.kv_layout import KvTransfer, outgoing
from runtime.messages import (
    PROTOCOL_VERSION,
    Configure,
    Connect,
    Expect,
    Hello,
    KvSent,
    Message,
    RequestFailed,
    SequenceStep,
    Step,
    StepResult,
)

log = logging.getLogger(__name__)


class Member:
    """One worker's part of its replica.

    Parameters
    ----------
    report : takes what the lead must know (KvLanded, KvSent, RequestFailed), from any thread

    Notes
    -----
    `execute` and `release` belong to the main thread; `expect` and the KV threads may run beside it.
    """

    def __init__(
        self, config: Configure, connect: Connect, stage: DecoderStage, report: Callable[[Message], None]
    ) -> None:
        self.config, self.stage = config, stage
        self._replicas = connect.replicas
        self._report = report
        shape = CacheShape(stage.part, stage.spec.head_dim, stage.dtype, stage.device)
        self.caches = CacheTable(shape)
        self.receiver = KvReceiver(config.worker, self.caches, report, self._failed)
        self._sender = KvSender(hello(config, "kv"), connect.peers, self._sent, self._failed)
        self._runner = StageRunner(stage, self.caches)

    def reconnect(self, connect: Connect) -> None:
        """Other replicas have come, gone or moved; the own one is as it was."""
        self._replicas, self._sender.peers = connect.replicas, connect.peers

    def knows(self, replica: str) -> bool:
        """Whether KV can be sent to a replica."""
        return replica in self._replicas

    def expect(self, message: Expect) -> bool:
        """Make room for a request whose KV cache will arrive; False if the device has none."""
        try:
            self.receiver.expect(message.request_id, message.prompt_tokens, message.capacity_tokens)
        except RuntimeError as error:  # out of memory, on a GPU or not
            log.warning(
                "worker %s: no room for request %s: %s", self.config.worker, message.request_id, error
            )
            return False
        return True

    def execute(self, step: Step) -> StepResult | None:
        """Run this worker's share of a step; the tokens, if it is the one that samples.

        A prefill with a target is forgotten at once: its cache lives on until it is sent.
        """
        queues = []
        if step.phase == "prefill":
            for sequence in step.sequences:
                cache = self.caches.create(sequence.request_id, sequence.capacity_tokens)
                if sequence.target:
                    plan = self._plan(sequence)
                    tokens = len(sequence.tokens)
                    queues.append(self._sender.begin(sequence.request_id, cache, tokens, plan))

        def on_layer(layer: int) -> None:
            ready = None
            if queues and self.stage.device.type == "cuda":
                ready = torch.cuda.Event()
                ready.record()
            for layer_ready in queues:
                layer_ready(layer, ready)

        result = self._runner.run(step, on_layer)
        for sequence in step.sequences:
            if sequence.target:
                self.caches.drop(sequence.request_id)
        return result

    def release(self, request_id: str) -> None:
        """Drop all that this worker has of a request."""
        self.receiver.forget(request_id)
        self._sender.give_up(request_id)
        self.caches.drop(request_id)

    def _plan(self, sequence: SequenceStep) -> tuple[KvTransfer, ...]:
        """What this worker sends to the request's target; nothing, and the request fails, if the target
        is gone since the lead accepted it."""
        try:
            target = self._replicas[sequence.target]
            return outgoing(self.config.stages, self.config.worker, target, self.stage.spec.kv_heads)
        except (KeyError, ValueError) as error:
            self._failed(sequence.request_id, f"no way to the replica {sequence.target}: {error}")
            return ()

    def _sent(self, request_id: str) -> None:
        self._report(KvSent(request_id=request_id, worker=self.config.worker))

    def _failed(self, request_id: str, text: str) -> None:
        self._report(RequestFailed(request_id=request_id, replica=self.config.replica, text=text))


def hello(config: Configure, purpose: str) -> Hello:
    """How this worker introduces itself to another."""
    return Hello(protocol=PROTOCOL_VERSION, secret=config.secret, worker=config.worker, purpose=purpose)
