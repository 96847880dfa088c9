"""The lead of a replica: takes requests, makes steps of them, tells the followers and the front end."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable
from typing import NoReturn

from runtime.engine.budget import TokenBudget
from runtime.engine.member import Member
from runtime.engine.scheduler import Completed, Scheduler
from runtime.messages import (
    Cancel,
    Decode,
    Expect,
    KvLanded,
    KvMoved,
    KvSent,
    Message,
    Prefill,
    Release,
    Released,
    RequestFailed,
    Reserved,
    Step,
    StepOutput,
    StepResult,
)
from runtime.transport import Connection

log = logging.getLogger(__name__)


class Lead:
    """Requests of one replica, from the front end's messages to its answers.

    `reserve` and `acknowledge` run in reader threads, so that a reservation never waits for a step;
    everything else happens in `run`, in the main thread, in the order of the inbox.
    """

    def __init__(
        self,
        member: Member,
        front_end: Connection,
        followers: dict[str, Connection],
        inbox: queue.SimpleQueue[Message],
    ) -> None:
        self._member, self._front_end, self._followers, self._inbox = member, front_end, followers, inbox
        config = member.config
        self._replica = config.replica
        self._workers = len(followers) + 1
        self._budget = TokenBudget(config.kv_budget_tokens)
        self._scheduler = Scheduler(
            max_batch=config.max_batch,
            max_prefill_tokens=config.max_prefill_tokens,
            stages=len(config.stages),
            budget=self._budget,
        )
        self._unacknowledged: dict[str, set[str]] = {}
        self._lock = threading.Lock()
        self._landed: dict[str, list[KvLanded]] = {}
        self._sent: dict[str, int] = {}

    # -- reader threads

    def reserve(self, message: Expect) -> None:
        """Take room for a request here and on every follower, which then acknowledge."""
        request_id = message.request_id
        limit = self._member.stage.spec.position_limit
        fits = limit is None or message.capacity_tokens <= limit
        if not fits or not 0 < message.prompt_tokens < message.capacity_tokens:
            self._answer(request_id, False)
            return
        if not self._budget.take(request_id, message.capacity_tokens):
            self._answer(request_id, False)
            return
        self._inbox.put(message)
        with self._lock:
            self._unacknowledged[request_id] = {self._member.config.worker, *self._followers}
        self._broadcast(message)
        self.acknowledge(self._member.config.worker, request_id, self._member.expect(message))

    def acknowledge(self, worker: str, request_id: str, ok: bool) -> None:
        """One worker has made its room, or could not; the last one's answer goes to the front end."""
        with self._lock:
            waiting = self._unacknowledged.get(request_id)
            if waiting is None:
                return
            waiting.discard(worker)
            if ok and waiting:
                return
            del self._unacknowledged[request_id]
        if ok:
            self._answer(request_id, True)
        else:
            self._inbox.put(Reserved(request_id=request_id, ok=False))

    # -- main thread

    def run(self) -> NoReturn:
        """Serve until the process ends."""
        while True:
            step = self._scheduler.next_step()
            if step is None:
                self._handle(self._inbox.get())
            else:
                self._broadcast(step)
                if result := self._member.execute(step):
                    self._complete(result)
            while not self._inbox.empty():
                self._handle(self._inbox.get())

    def _handle(self, message: Message) -> None:
        match message:
            case Expect():
                self._scheduler.expect(message)
            case Prefill():
                self._prefill(message)
            case Decode():
                if problem := self._decode(message):
                    self._fail(message.request_id, problem)
            case Cancel():
                self._cancel(message.request_id)
            case Reserved():
                self._refuse(message.request_id)
            case StepResult():
                self._complete(message)
            case KvLanded():
                self._land(message)
            case KvSent():
                self._count_sent(message.request_id)
            case RequestFailed():
                if message.request_id in self._scheduler:
                    self._fail(message.request_id, message.text)
            case _:
                log.warning("replica %s: unexpected %s", self._replica, type(message).__name__)

    def _prefill(self, message: Prefill) -> None:
        if message.request_id in self._scheduler:
            log.warning("replica %s: request %s is here already", self._replica, message.request_id)
            return
        if problem := self._refusal(message):
            self._fail(message.request_id, problem)
            return
        self._scheduler.prefill(message)

    def _decode(self, message: Decode) -> str:
        vocab = self._member.stage.spec.vocab
        if not 0 <= message.last_token < vocab:
            return f"the last token is outside [0, {vocab})"
        return self._scheduler.decode(message)

    def _refusal(self, message: Prefill) -> str:
        """Why a prompt can never run here, or ""."""
        spec, config, count = self._member.stage.spec, self._member.config, len(message.prompt)
        total = count + max(message.sampling.max_tokens - message.index, 0)
        if not message.prompt or not all(0 <= token < spec.vocab for token in message.prompt):
            return f"the prompt is empty or has tokens outside [0, {spec.vocab})"
        if spec.position_limit is not None and total > spec.position_limit:
            return f"{total} tokens are over the model's limit of {spec.position_limit}"
        if (count if message.target else total) > config.kv_budget_tokens:
            return f"{total} tokens are over the replica's KV cache of {config.kv_budget_tokens}"
        if message.target and not self._member.knows(message.target):
            return f"the replica {message.target} is unknown"
        return ""

    def _complete(self, result: StepResult) -> None:
        done: Completed = self._scheduler.complete(result.step, result.tokens, result.logprobs)
        if done.outputs:
            self._front_end.send(StepOutput(replica=self._replica, outputs=done.outputs))
        self._free(done.released)

    def _cancel(self, request_id: str) -> None:
        with self._lock:
            self._unacknowledged.pop(request_id, None)
        if self._scheduler.cancel(request_id):
            self._free([request_id])
        elif request_id in self._scheduler:
            self._drop([request_id])

    def _refuse(self, request_id: str) -> None:
        """Undo a reservation for which a worker had no room, unless a Cancel has done so."""
        if self._scheduler.cancel(request_id):
            self._drop([request_id])
            self._answer(request_id, False)

    def _fail(self, request_id: str, text: str) -> None:
        """Give a request up; Released follows, at once if the replica has nothing of it."""
        failure = RequestFailed(request_id=request_id, replica=self._replica, text=text)
        self._front_end.send(failure)
        if request_id in self._scheduler:
            self._cancel(request_id)
        else:
            self._front_end.send(Released(request_id=request_id, replica=self._replica))

    def _land(self, message: KvLanded) -> None:
        if message.request_id not in self._scheduler:
            return
        parts = self._landed.setdefault(message.request_id, [])
        parts.append(message)
        if len(parts) == self._workers:
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
        if self._sent[request_id] == self._workers:
            del self._sent[request_id]
            if self._scheduler.sent(request_id):
                self._free([request_id])

    def _free(self, request_ids: Iterable[str]) -> None:
        """Drop requests everywhere and say so; their room is back in the budget already."""
        request_ids = tuple(request_ids)
        self._drop(request_ids)
        for request_id in request_ids:
            self._landed.pop(request_id, None)
            self._front_end.send(Released(request_id=request_id, replica=self._replica))

    def _drop(self, request_ids: Iterable[str]) -> None:
        """Drop what every worker has of these requests; no later step names them."""
        request_ids = tuple(request_ids)
        if not request_ids:
            return
        self._broadcast(Release(request_ids=request_ids))
        for request_id in request_ids:
            self._member.release(request_id)

    def _broadcast(self, message: Expect | Step | Release) -> None:
        for follower in self._followers.values():
            follower.send(message)

    def _answer(self, request_id: str, ok: bool) -> None:
        self._front_end.send(Reserved(request_id=request_id, ok=ok))
