"""The driver of a replica: takes requests, makes steps of them for all executors, answers the front end.

In a pipeline it has a thread of its own: while this worker computes its stage of one step, results of earlier
steps come back from the last stage, and their tokens are not to wait for this stage.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from runtime.engine.faults import describe, of_replica
from runtime.kv_cache.blocks import BlockPool, Digest, prefix_digests
from runtime.kv_cache.leases import Leases
from runtime.kv_cache.windows import WindowedPool, make_pool
from runtime.logs import about
from runtime.protocol.between_workers import (
    ExpectKv,
    HeadsLost,
    HeadsProfiled,
    HeadsReady,
    KvLanded,
    KvSent,
    NewRole,
    Release,
    Step,
    StepResult,
)
from runtime.protocol.framing import Connection
from runtime.protocol.from_workers import KvMoved, RequestFailed, Reserved, StepOutput
from runtime.protocol.to_workers import Cancel, Configure, Decode, Prefill, ReserveKv
from runtime.worker.driver_base import DriverBase, Inbox, Item, StageFree
from runtime.worker.executor import Executor
from runtime.worker.scheduled_request import Reservation
from runtime.worker.scheduler import Completed, Scheduler

if TYPE_CHECKING:
    from runtime.headwise.pool import HeadPool

log = logging.getLogger(__name__)

MOST_LOSSES = 8
"""A request whose logits are no numbers so often fails by itself: that is no loss of attention workers."""
STEPS_PER_REPORT = 32
"""Steps from one report on KV heads to the next, at most."""


Own = queue.SimpleQueue[Step | Release | NewRole]


class Driver(DriverBase):
    """Handles the requests of one replica, in the first worker of its first stage.

    `reserve` and `acknowledge` run in reader threads, so that a reservation never waits for a step. All else
    happens in `run`, in one thread, in the order of the inbox.

    Parameters
    ----------
    executor : this worker's own
    others : connections to the replica's other workers, by name
    inbox : messages of the front end and the executors, and reservations
    own : what the main thread is to run on this worker, where the driver has another thread; the answer to a
        step is StageFree. None: steps run in `run`
    pool : the blocks of the cache, of which some may hold what prompts share; None: all are blank
    """

    def __init__(
        self,
        executor: Executor,
        front_end: Connection,
        others: dict[str, Connection],
        inbox: Inbox,
        own: Own | None = None,
        pool: BlockPool | None = None,
    ) -> None:
        config, cache = executor.config, executor.cache
        self._heads: HeadPool | None = None
        if config.lanes:
            from runtime.headwise.pool import HeadPool

            pool = self._heads = HeadPool(config, cache.shape.bytes_per_token_cell)
        pool = pool or make_pool(config, cache, config.reuse_prefixes)
        if isinstance(pool, WindowedPool):
            pool.expect(config.tokens_running)
        super().__init__(executor, front_end, others, inbox, pool)
        self._own, self._stage_free = own, True
        self._workers = len(others) + 1
        self._parts = self._workers * (1 if config.windowed is None else 2)
        self._scheduler = Scheduler(
            max_batch=config.max_batch,
            max_prefill_tokens=config.max_prefill_tokens,
            max_mixed_tokens=config.max_mixed_tokens,
            in_flight=config.steps_in_flight,
            pool=self.pool,
        )
        self._unacknowledged: dict[str, tuple[set[str], int]] = {}
        self._lock = threading.Lock()
        self._landed: dict[str, list[KvLanded]] = {}
        self._sent: dict[str, int] = {}
        self._leases = Leases(config.kv_lease_s)
        self._losses = Counter[str]()
        self._next_role: Configure | None = None

    @property
    def preemptions(self) -> int:
        return self._scheduler.preemptions

    def _has(self, request_id: str) -> bool:
        return request_id in self._scheduler

    # -- reader threads

    def reserve(self, message: ReserveKv) -> None:
        """Take blocks for a request and announce it to every executor; each of them acknowledges."""
        request_id, prompt = message.request_id, message.prompt
        try:
            begun, digests = self._blocks_for(message)
        except Exception as error:
            if of_replica(error):
                raise
            log.exception("could not reserve a KV cache", extra=about(message.client_request_id, request_id))
            self._say_failed(request_id, describe(error), fault=False)
            self._say_released(request_id)
            return
        if begun is None:
            self._front_end.send(Reserved(request_id=request_id, ok=False))
            return
        blocks, cached = begun
        self._client_request_ids[request_id] = message.client_request_id
        log.info(
            "reserved a KV cache of %d tokens",
            len(prompt),
            extra=about(message.client_request_id, request_id),
        )
        self._inbox.put(Reservation(request_id, prompt, blocks, cached, digests))
        with self._lock:
            self._unacknowledged[request_id] = {self._executor.config.worker, *self._others}, cached
        arrival = ExpectKv(
            request_id=request_id,
            table=tuple(blocks),
            first_token=cached,
            end_token=len(prompt),
            windowed_table=self.pool.windowed_table(request_id),
        )
        self._broadcast(arrival)
        self._executor.expect(arrival)
        self.acknowledge(self._executor.config.worker, request_id)

    def _blocks_for(self, message: ReserveKv) -> tuple[tuple[list[int], int] | None, list[Digest]]:
        """Blocks for an expected prompt and how many of its tokens they hold already (None: no room), and the
        prompt's digests."""
        prompt = message.prompt
        digests = prefix_digests(prompt, self.pool.block_tokens) if self.pool.reuse else []
        if not 0 < len(prompt) < message.capacity_tokens or self._excess(message.capacity_tokens):
            return None, digests
        return self.pool.reserve(len(prompt), digests, self._scheduler.growing, message.request_id), digests

    def acknowledge(self, worker: str, request_id: str) -> None:
        """Note that a worker is ready for a request's KV cache; after the last one, answer the front end."""
        with self._lock:
            waiting, cached = self._unacknowledged.get(request_id, (set(), 0))
            if worker not in waiting:
                return
            waiting.discard(worker)
            if waiting:
                return
            del self._unacknowledged[request_id]
        self._front_end.send(Reserved(request_id=request_id, ok=True, cached_tokens=cached))

    # -- the driver's thread

    def run(self) -> Configure:
        """Run steps until the replica is to take another role, which all its workers learn of.

        Returns
        -------
        this worker's configuration in that role; without one, it runs until the process ends
        """
        while self._next_role is None:
            step = self._scheduler.next_step() if self._stage_free else None
            faults = self._scheduler.take_faults()
            for request_id, why in faults.items():
                self._fail(request_id, why, fault=False)
            if step is None and faults:
                continue
            if step is None:
                with suppress(queue.Empty):
                    self._handle(self._inbox.get(timeout=self._leases.next_s()))
            else:
                if self._heads is not None:
                    step = self._heads.attach(step)
                self._broadcast(step)
                self._execute(step)
            while not self._inbox.empty():
                self._handle(self._inbox.get())
            for request_id in self._leases.over():
                self._expire(request_id)
        self._broadcast(NewRole())
        if self._own is not None:
            self._own.put(NewRole())
        return self._next_role

    def _execute(self, step: Step) -> None:
        """Run this worker's stage of a step, or let the main thread do so."""
        if self._own is not None:
            self._stage_free = False
            self._own.put(step)
        elif result := self._executor.execute(step):
            self._complete(result)

    def _dispatch(self, message: Item) -> None:
        match message:
            case StageFree():
                self._stage_free = True
            case Configure():
                if len(self._scheduler):
                    raise RuntimeError(f"replica {self._replica} has requests, and takes no other role")
                self._next_role = message
            case Reservation():
                self._scheduler.expect(message)
                self._leases.begin(message.request_id)
            case Prefill():
                self._prefill(message)
            case Decode():
                self._decode(message)
            case Cancel():
                self._cancel(message.request_id)
            case StepResult():
                self._complete(message)
            case HeadsLost() | HeadsReady() | HeadsProfiled() if self._heads is not None:
                self._follow_heads(self._heads, message)
            case KvLanded():
                self._land(message)
            case KvSent():
                self._count_sent(message.request_id)
            case RequestFailed():
                # Other workers, and other groups of their layers, say the same of a replica that is lost.
                if not self._scheduler.is_over(message.request_id):
                    self._fail(message.request_id, message.text, message.fault)
            case _:
                log.warning("replica %s: unexpected %s", self._replica, type(message).__name__)

    def _prefill(self, message: Prefill) -> None:
        if message.request_id in self._scheduler:
            log.warning("replica %s: request %s exists already", self._replica, message.request_id)
            return
        self._client_request_ids[message.request_id] = message.client_request_id
        extra = about(message.client_request_id, message.request_id)
        log.info("prefills %d tokens", len(message.prompt), extra=extra)
        held = message.sampling.max_tokens - message.index
        total = len(message.prompt) + max(held, 0)
        if problem := self._refusal(message.prompt, total, len(message.prompt) if message.target else total):
            self._fail(message.request_id, problem, fault=False)
        elif message.target and not self._executor.knows(message.target):
            self._fail(message.request_id, f"the replica {message.target} is unknown", fault=True)
        else:
            self._scheduler.prefill(message)

    def _decode(self, message: Decode) -> None:
        """Continue an expected request, or fail it."""
        request_id, vocab = message.request_id, self._executor.spec.vocab
        if not 0 <= message.last_token < vocab:
            self._fail(request_id, f"the last token is outside [0, {vocab})", fault=False)
        elif problem := self._scheduler.decode(message):
            self._fail(request_id, problem, fault=True)
        else:
            known = len(self._scheduler.tokens_of(request_id))
            if problem := self._excess(known + message.sampling.max_tokens - message.index):
                self._fail(request_id, problem, fault=False)

    def _expire(self, request_id: str) -> None:
        """Free the blocks of a request whose KV cache or Decode did not come in time: its prefill replica may
        be lost, and the Cancel with it. A request whose KV cache is still arriving gets a new lease."""
        if not self._scheduler.is_expected(request_id):
            return
        if self._executor.silent_s(request_id) < self._leases.lease_s:
            self._leases.begin(request_id)
        else:
            self._fail(request_id, f"its KV cache did not come within {self._leases.lease_s:g} s", fault=True)

    def _complete(self, result: StepResult) -> None:
        broken = dict(result.broken)
        done: Completed = self._scheduler.complete(
            result.step, result.tokens, result.logprobs, broken.keys(), result.lost
        )
        if done.outputs:
            self._front_end.send(StepOutput(replica=self._replica, outputs=done.outputs))
        self._free(done.released)
        for request_id in result.lost:
            self._losses[request_id] += 1
            if self._losses[request_id] > MOST_LOSSES and request_id in self._scheduler:
                self._fail(request_id, "its logits are not numbers", fault=False)
            else:
                self._spoil(request_id)
        if self._heads is not None and result.step % STEPS_PER_REPORT == 0:
            self._front_end.send(self._heads.counts())
        for request_id, why in broken.items():
            if request_id in self._scheduler:
                self._fail(request_id, why, fault=False)

    def _follow_heads(self, heads: HeadPool, message: HeadsLost | HeadsReady | HeadsProfiled) -> None:
        """Compute requests again whose heads were on an attention worker that is lost; or use one again."""
        if isinstance(message, HeadsProfiled):
            heads.believe(message.worker, message.profiles)
        elif isinstance(message, HeadsReady):
            heads.regain(message.worker, message.attention_worker)
        else:
            for request_id in heads.lose(message.worker, message.attention_worker):
                self._spoil(request_id)
        self._front_end.send(heads.counts())

    def _spoil(self, request_id: str) -> None:
        """Compute a request again, part of whose KV cache is lost; its client sees nothing of that."""
        client_request_id = self._client_request_ids.get(request_id, "")
        if self._heads is not None and self._scheduler.spoil(request_id):
            self._heads.recomputed += 1
            log.info(
                "its KV heads are lost; it is computed again", extra=about(client_request_id, request_id)
            )

    def _cancel(self, request_id: str) -> None:
        if request_id not in self._scheduler:
            return
        with self._lock:
            self._unacknowledged.pop(request_id, None)
        self._drop([request_id])
        if self._scheduler.cancel(request_id):
            self._released([request_id])

    def _land(self, message: KvLanded) -> None:
        if message.request_id not in self._scheduler:
            return
        parts = self._landed.setdefault(message.request_id, [])
        parts.append(message)
        if len(parts) == self._parts:
            del self._landed[message.request_id]
            moved = KvMoved(
                request_id=message.request_id,
                bytes_received=sum(part.bytes_received for part in parts),
                seconds=max(part.seconds for part in parts),
            )
            self._front_end.send(moved)
            self._scheduler.landed(message.request_id)

    def _count_sent(self, request_id: str) -> None:
        self._sent[request_id] = self._sent.get(request_id, 0) + 1
        if self._sent[request_id] == self._parts:
            del self._sent[request_id]
            if self._scheduler.sent(request_id):
                self._free([request_id])

    def _free(self, request_ids: Iterable[str]) -> None:
        """Drop requests everywhere and report them released; their blocks are back in the pool already."""
        request_ids = tuple(request_ids)
        self._drop(request_ids)
        self._released(request_ids)

    def _drop(self, request_ids: Iterable[str]) -> None:
        """Drop what every executor holds of these requests; no later step names them."""
        request_ids = tuple(request_ids)
        if not request_ids:
            return
        release = Release(request_ids=request_ids)
        self._broadcast(release)
        for request_id in request_ids:
            if self._own is None:
                self._executor.release(request_id)
            else:
                self._executor.silence(request_id)
        if self._own is not None:
            self._own.put(release)

    def _released(self, request_ids: Iterable[str]) -> None:
        request_ids = tuple(request_ids)
        for request_id in request_ids:
            self._landed.pop(request_id, None)
            self._sent.pop(request_id, None)
            self._losses.pop(request_id, None)
        if self._heads is not None:
            self._front_end.send(self._heads.counts())
        super()._released(request_ids)
