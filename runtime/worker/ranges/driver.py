"""The driver of a replica that holds a range of layers: runs what arrives, and passes it on along its path.

The sampled tokens go to the front end, which starts the next step of each request at the first hop of its
path, as Helix's coordinator does (section 5.1). So all memory is accounted for in one place before a token
needs it, and a request that is cancelled, preempted or moved to another path simply gets no further token.
The way over the front end costs one message more than from the last hop to the first; both carry one token.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping

import msgspec

from runtime.kv_cache.windows import make_pool
from runtime.logs import about
from runtime.protocol.between_workers import ActivationPart, Release, StepResult
from runtime.protocol.framing import Connection
from runtime.protocol.from_workers import HopTimes, RequestFailed, StepOutput, TokenOutput
from runtime.protocol.message import Message
from runtime.protocol.to_workers import Cancel, Configure, JoinPath, NextToken
from runtime.worker.driver_base import Arrived, DriverBase, Inbox, Item
from runtime.worker.executor import Executor, credentials
from runtime.worker.ranges.activations import PURPOSE, ActivationSender, Address, Piece, arriving
from runtime.worker.ranges.scheduler import RangeScheduler

log = logging.getLogger(__name__)


class RangeDriver(DriverBase):
    """Handles the requests on one replica whose paths lead through it.

    `receive_from` runs in reader threads, all else in the thread of `run`, in the order of the inbox.

    Parameters
    ----------
    executor : this worker's own
    others : connections to the replica's other workers, by name
    inbox : messages of the front end, and what arrives
    peers : address of every worker
    row_bytes : of the activations of one token
    """

    def __init__(
        self,
        executor: Executor,
        front_end: Connection,
        others: dict[str, Connection],
        inbox: Inbox,
        peers: Mapping[str, Address],
        row_bytes: int,
    ) -> None:
        config, cache = executor.config, executor.cache
        pool = make_pool(config, cache, reuse=False)
        super().__init__(executor, front_end, others, inbox, pool)
        self._scheduler = RangeScheduler(config.max_prefill_tokens, config.max_mixed_tokens, pool)
        self._sender = ActivationSender(credentials(config, PURPOSE), peers, self._lost)
        self._row_bytes = row_bytes

    def reconnect(self, peers: Mapping[str, Address]) -> None:
        """Take new addresses of workers; from any thread."""
        self._sender.reconnect(peers)

    def receive_from(self, connection: Connection, worker: str) -> None:
        """Take the activations that another worker sends until it closes the connection."""
        try:
            for pieces in arriving(connection, self._row_bytes):
                self._inbox.put(Arrived(tuple(pieces)))
        except OSError as error:
            log.warning("activations from %s: %s", worker, error)
        connection.close()

    def _lost(self, request_id: str, text: str) -> None:
        """Activations of a request may not have arrived; from the sender's threads."""
        failure = RequestFailed(request_id=request_id, replica=self._replica, text=text, fault=True)
        self._inbox.put(failure)

    # -- the driver's thread

    def run(self) -> Configure:
        while True:
            made = self._scheduler.next_step()
            faults = self._scheduler.take_faults()
            for request_id, why in faults.items():
                self._fail(request_id, why, fault=True)
            if made is not None:
                step, pieces = made
                self._broadcast(step)
                outcome = self._executor.execute_hop(step, [piece.rows for piece in pieces])
                self._scheduler.ran(pieces)
                if outcome.result is None:
                    self._pass_on(pieces, outcome.rows)
                else:
                    self._answer(pieces, outcome.result)
            elif not faults:
                self._handle(self._inbox.get())
            while not self._inbox.empty():
                self._handle(self._inbox.get())

    def _has(self, request_id: str) -> bool:
        return request_id in self._scheduler

    def _dispatch(self, message: Item) -> None:
        match message:
            case Arrived(pieces=pieces):
                self._scheduler.arrive(pieces)
            case JoinPath():
                self._join(message)
            case NextToken():
                self._scheduler.next_token(message, time.monotonic())
            case Cancel():
                self._cancel(message.request_id)
            case RequestFailed():
                if message.request_id in self._scheduler:
                    self._fail(message.request_id, message.text, message.fault)
            case Configure():
                raise RuntimeError(
                    f"replica {self._replica} holds a range of layers, and takes no other role"
                )
            case _:
                log.warning("replica %s: unexpected %s", self._replica, type(message).__name__)

    def _join(self, hop: JoinPath) -> None:
        self._client_request_ids[hop.request_id] = hop.client_request_id
        extra = about(hop.client_request_id, hop.request_id)
        log.info(
            "computes layers from %d on, then %s", hop.first_layer, hop.next_worker or "samples", extra=extra
        )
        self._scheduler.join(hop, time.monotonic())
        total = len(hop.tokens) + max(hop.sampling.max_tokens - hop.index, 0)
        if not hop.first_layer and (problem := self._refusal(hop.tokens, total, total)):
            self._fail(hop.request_id, problem, fault=False)

    def _cancel(self, request_id: str) -> None:
        if not self._scheduler.leave(request_id):
            return
        self._broadcast(Release(request_ids=(request_id,)))
        self._executor.release(request_id)
        self._released([request_id])

    # -- what a step comes to

    def _pass_on(self, pieces: list[Piece], rows: tuple[memoryview, ...]) -> None:
        """Send the activations of a step to the next hops."""
        onward: dict[str, tuple[list[ActivationPart], list[memoryview]]] = defaultdict(lambda: ([], []))
        for piece, own in zip(pieces, rows, strict=True):
            parts, buffers = onward[self._scheduler.visits[piece.part.request_id].hop.next_worker]
            parts.append(msgspec.structs.replace(piece.part, hops_s=self._times(piece)))
            buffers.append(own)
        for worker, (parts, buffers) in onward.items():
            self._sender.send(worker, parts, buffers)

    def _answer(self, pieces: list[Piece], result: StepResult) -> None:
        """Send the tokens of a step to the front end."""
        broken = dict(result.broken)
        drawn = [piece for piece in pieces if piece.part.samples and piece.part.request_id not in broken]
        outputs, times = list[TokenOutput](), list[Message]()
        logprobs = result.logprobs or (None,) * len(drawn)
        for piece, token, detail in zip(drawn, result.tokens, logprobs, strict=True):
            part = piece.part
            hop = self._scheduler.visits[part.request_id].hop
            output = TokenOutput(
                request_id=part.request_id,
                index=part.index,
                token=token,
                finish_reason=hop.sampling.finish_reason(token, part.index),
                logprobs=detail,
            )
            outputs.append(output)
            if hop.timed:
                times.append(HopTimes(request_id=part.request_id, seconds=self._times(piece)))
        for message in times:
            self._front_end.send(message)
        if outputs:
            self._front_end.send(StepOutput(replica=self._replica, outputs=tuple(outputs)))
        for request_id, why in broken.items():
            if request_id in self._scheduler:
                self._fail(request_id, why, fault=False)

    def _times(self, piece: Piece) -> tuple[float, ...]:
        """The seconds at each hop, up to this one; none if nobody wants to know."""
        if not self._scheduler.visits[piece.part.request_id].hop.timed:
            return ()
        return (*piece.part.hops_s, time.monotonic() - piece.arrived_s)
