"""The front end's side of serving: takes requests through prefill, KV transfer and decode.

One state machine per request, driven by the messages of the replicas' lead workers:

    waiting -> reserving (Expect) -> prefilling (Prefill) -> decoding (Decode) -> ended

A request that decodes where it was prefilled, or that asks for one token, skips reserving and
decoding. Memory is accounted for from the moment a request is routed until every replica involved has
said Released (or refused it), so that the accounting never runs ahead of the workers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence

from cost_model.errors import HexGen2Error
from runtime.admission import QUEUE_LIMIT, Admission
from runtime.generation import Generation, Observer, Outcome, RequestRecord
from runtime.heartbeat import PING_EVERY_S, silence
from runtime.launcher.link import Link
from runtime.messages import (
    Cancel,
    Failed,
    KvMoved,
    Message,
    Pong,
    Released,
    RequestFailed,
    Reserved,
    Sampling,
    Shutdown,
    StepOutput,
    TokenOutput,
)
from runtime.refusals import Unavailable
from runtime.replica import Replica
from runtime.router import Route, Router

log = logging.getLogger(__name__)

RECORDS_KEPT = 1000


class Coordinator:
    """Routes requests, follows them through the replicas and accounts for their KV cache.

    Parameters
    ----------
    router : decides on the route of each request
    replicas : by id, with links to workers that are ready
    observer : told of tokens and ends
    queue_limit : requests that may wait for room
    ping_every_s : how often each worker is asked whether it is there
    """

    def __init__(
        self,
        router: Router,
        replicas: Mapping[str, Replica],
        observer: Observer | None = None,
        queue_limit: int = QUEUE_LIMIT,
        ping_every_s: float = PING_EVERY_S,
    ) -> None:
        self.replicas = dict(replicas)
        self.records: deque[RequestRecord] = deque(maxlen=RECORDS_KEPT)
        self._observer, self._ping_every_s = observer, ping_every_s
        self._admission: Admission[Generation] = Admission(router, self.replicas, queue_limit)
        self._requests: dict[str, Generation] = {}
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = False

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._admission.waiting)

    @property
    def lost(self) -> Mapping[str, str]:
        """Replicas that are gone, with the reason."""
        return self._admission.lost

    @property
    def context_tokens(self) -> int:
        """Prompt and output tokens that the roomiest route can hold; 0 without routes."""
        return self._admission.context_tokens

    def check_serving(self) -> None:
        """Raise Unavailable if no route is left, or the server stops."""
        if self._stopped:
            raise Unavailable("the server is stopping")
        self._admission.check_serving()

    def start(self) -> None:
        """Begin to listen to the workers and to watch them; needs a running event loop."""
        for replica in self.replicas.values():
            for worker, link in replica.links.items():
                self._tasks.append(asyncio.create_task(self._read(replica, worker, link)))
                self._tasks.append(asyncio.create_task(self._watch(replica, worker, link)))

    def submit(self, prompt: Sequence[int], sampling: Sampling, route: Route | None = None) -> Generation:
        """Take a request; it starts at once or waits its turn (first come, first served).

        Parameters
        ----------
        route : take this route instead of the router's choice

        Raises
        ------
        Overloaded, Unavailable, TooLong
        """
        record = RequestRecord(self._new_id(), len(prompt), sampling.max_tokens, time.monotonic())
        request = Generation(tuple(prompt), sampling, route, record)
        self.check_serving()
        self._admission.enqueue(request)
        self._admit()
        return request

    def cancel(self, request: Generation, outcome: Outcome = "cancelled") -> None:
        """Stop a request, in whatever phase. Its memory counts as used until the replicas freed it."""
        if request.phase != "ended":
            self._end(request, outcome, None)
            self._admit()

    async def stop(self) -> None:
        """Fail every request and stop listening. The workers are left to the launcher."""
        self._stopped = True
        for request in [*self._admission.waiting, *self._requests.values()]:
            if request.phase != "ended":
                self._end(request, "failed", Unavailable("the server is stopping"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # admission

    def _new_id(self) -> str:
        return f"r{next(self._numbers)}"

    def _admit(self) -> None:
        """Start waiting requests as long as there is room."""
        while not self._stopped and (admitted := self._admission.next()) is not None:
            self._begin(*admitted)

    def _begin(self, request: Generation, route: Route) -> None:
        request.route = route
        self._requests[request.request_id] = request
        record = request.record
        record.routed_s = time.monotonic()
        record.prefill_replica = route.prefill
        alone = route.colocated or request.one_token
        record.decode_replica = route.prefill if alone else route.decode
        prefill, decode = self.replicas[route.prefill], self.replicas[route.decode]
        if alone:
            request.hold(prefill, len(request.prompt))
            request.phase = "prefilling"
            prefill.send(request.prefill(target=""))
        else:
            request.hold(prefill, len(request.prompt))
            request.hold(decode, len(request.prompt))
            request.phase = "reserving"
            decode.send(request.expect())

    # messages of the workers

    async def _read(self, replica: Replica, worker: str, link: Link) -> None:
        try:
            while (message := await link.receive()) is not None:
                if isinstance(message, Failed):
                    return self._lose(replica, f"worker {worker} failed: {message.text}")
                self._handle(replica, message)
        except Exception as error:  # whatever it is, no request may wait for this replica any more
            log.exception("worker %s sent what could not be handled", worker)
            return self._lose(replica, f"worker {worker}: {error}")
        self._lose(replica, f"worker {worker} ended")

    async def _watch(self, replica: Replica, worker: str, link: Link) -> None:
        await silence(link, self._ping_every_s)
        self._lose(replica, f"worker {worker} does not answer")

    def _handle(self, replica: Replica, message: Message) -> None:
        match message:
            case StepOutput(outputs=outputs):
                for output in outputs:
                    self._on_token(output)
            case Reserved(request_id=request_id, ok=ok, cached_tokens=cached_tokens):
                self._on_reserved(replica, request_id, ok, cached_tokens)
            case KvMoved(request_id=request_id, bytes_received=received, seconds=seconds):
                if request := self._requests.get(request_id):
                    request.record.kv_bytes, request.record.kv_s = received, seconds
                    request.record.kv_arrived = True
            case RequestFailed(request_id=request_id, text=text):
                self._on_failed(replica, request_id, text)
            case Released(request_id=request_id):
                replica.free_blocks, replica.preemptions = message.free_blocks, message.preemptions
                self._on_released(replica, request_id)
            case Pong():
                pass  # the link has counted it
            case _:
                log.warning("replica %s sent an unexpected %s", replica.replica_id, type(message).__name__)

    def _on_reserved(self, replica: Replica, request_id: str, ok: bool, cached_tokens: int) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        if not ok:
            self._on_refused(replica, request)
        elif request.phase == "reserving":
            request.phase = "prefilling"
            prefill = self.replicas[request.record.prefill_replica]
            prefill.send(request.prefill(replica.replica_id, cached_tokens))

    def _on_refused(self, replica: Replica, request: Generation) -> None:
        """A replica had no room, although the accounting saw some: it holds nothing of the request."""
        if request.phase == "ended":
            self._on_released(replica, request.request_id)
            return
        for holder in list(request.holders):
            request.release(holder)
        del self._requests[request.request_id]
        if replica.held:
            replica.refused = True
            request.phase, request.route = "waiting", None
            request.record.request_id = self._new_id()  # the workers may still be forgetting the old one
            self._admission.put_back(request)
        else:
            no_room = f"replica {replica.replica_id} has no room for the request"
            self._end(request, "failed", Unavailable(no_room))
        self._admit()

    def _on_token(self, output: TokenOutput) -> None:
        request = self._requests.get(output.request_id)
        if request is None or request.phase == "ended" or output.index < request.record.output_tokens:
            return
        record, now = request.record, time.monotonic()
        if output.index > record.output_tokens:
            lost = f"token {record.output_tokens} of request {record.request_id} never arrived"
            self._end(request, "failed", Unavailable(lost))
            return
        if output.index == 0:
            record.first_token_s = now
            record.cached_tokens = output.cached_tokens
        elif self._observer is not None:
            self._observer.token_gap(now - record.last_token_s)
        record.last_token_s = now
        record.output_tokens += 1
        self.replicas[record.decode_replica].grow(record.request_id)
        request.put(output)
        if output.finish_reason:
            outcome: Outcome = "stop" if output.finish_reason == "stop" else "length"
            self._end(request, outcome, None, by_itself=True)
        elif request.phase == "prefilling":
            request.phase = "decoding"
            if record.decode_replica != record.prefill_replica:
                self.replicas[record.decode_replica].send(request.decode(output))

    def _on_failed(self, replica: Replica, request_id: str, text: str) -> None:
        """A replica gives a request up, and says Released later as it does after a Cancel."""
        request = self._requests.get(request_id)
        if request is not None and request.phase != "ended":
            gave_up = f"replica {replica.replica_id} gave up request {request_id}: {text}"
            log.warning(gave_up)
            self._end(request, "failed", Unavailable(gave_up))

    def _on_released(self, replica: Replica, request_id: str) -> None:
        replica.release(request_id)
        request = self._requests.get(request_id)
        if request is not None:
            request.holders.pop(replica.replica_id, None)
            needed = replica.replica_id == request.record.decode_replica or request.phase == "prefilling"
            if needed and request.phase != "ended":
                gave_up = f"replica {replica.replica_id} gave up request {request_id}"
                self._end(request, "failed", Unavailable(gave_up))
            self._forget_if_settled(request)
        self._admit()

    # ends

    def _end(
        self, request: Generation, outcome: Outcome, error: HexGen2Error | None, by_itself: bool = False
    ) -> None:
        """Close the request's stream, and have every replica free what it still holds for it.

        After an end by itself (its last token came) they do so unasked, but for a decode replica that
        still waits for its KV cache.
        """
        if request.phase == "waiting":
            self._admission.withdraw(request)
        if request.phase == "reserving":
            request.release(request.record.prefill_replica)
        decode_side_waits = request.phase == "prefilling"
        request.phase = "ended"
        request.record.outcome, request.record.ended_s = outcome, time.monotonic()
        request.put(error)
        for replica_id, replica in request.holders.items():
            waits = decode_side_waits and replica_id != request.record.prefill_replica
            if waits or not by_itself:
                replica.send(Cancel(request_id=request.request_id))
        self._forget_if_settled(request)
        self.records.append(request.record)
        if self._observer is not None:
            self._observer.ended(request.record)

    def _forget_if_settled(self, request: Generation) -> None:
        """Once a request has ended and holds nothing, no message can be about it."""
        if request.phase == "ended" and not request.holders:
            self._requests.pop(request.request_id, None)

    def _lose(self, replica: Replica, reason: str) -> None:
        """A replica is gone: fail what needs it, route around it, stop the rest of its workers."""
        if replica.replica_id in self.lost or self._stopped:
            return
        text = f"replica {replica.replica_id} is lost ({reason})"
        log.error(text)
        stranded = self._admission.lose(replica.replica_id, text)
        for link in replica.links.values():
            link.send(Shutdown())
        error = Unavailable(text)
        for request_id in list(replica.held):
            request = self._requests[request_id]
            request.release(replica.replica_id)
            record = request.record
            needed = replica.replica_id == record.decode_replica or not record.kv_arrived
            if needed and request.phase != "ended":
                self._end(request, "failed", error)
            self._forget_if_settled(request)
        for request in stranded:
            self._end(request, "failed", error)
        self._admit()
