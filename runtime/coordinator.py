"""The front end's side of serving: takes requests through prefill, KV transfer and decode.

One state machine per request, driven by the messages of the replicas' lead workers:

    waiting -> reserving (Expect) -> prefilling (Prefill) -> decoding (Decode) -> ended

A request that decodes where it was prefilled, or that asks for one token, skips reserving and
decoding. One whose replica is lost or gives it up waits again, under another id, to be resumed elsewhere: its
prompt and the tokens so far are prefilled, and the stream goes on with the next one. Memory is accounted
for from the moment a request is routed until every replica involved has said Released (or refused it), so
that the accounting never runs ahead of the workers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from cost_model.errors import HexGen2Error
from runtime.admission import Admission
from runtime.fair_queue import FairQueue
from runtime.generation import UNKNOWN, Generation, Observer, Origin, Outcome, RequestRecord
from runtime.launcher.link import Link
from runtime.listeners import Listeners
from runtime.logs import about
from runtime.messages import (
    Cancel,
    KvMoved,
    Load,
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
from runtime.options import QUEUE_LIMIT, QUEUE_TIMEOUT_S
from runtime.pace import Pace
from runtime.patience import PING_EVERY_S
from runtime.reflow import Reflow
from runtime.refusals import Overloaded, TimedOut, Unavailable
from runtime.replica import Replica
from runtime.router import Route, Router

log = logging.getLogger(__name__)

RECORDS_KEPT = 1000
RESUMES = 3
"""How often a request is resumed at most: it may be what its replicas fail of."""


class Coordinator:
    """Routes requests, follows them through the replicas and accounts for their KV cache.

    Parameters
    ----------
    router : decides on the route of each request
    replicas : by id, with links to workers that are ready
    observer : told of tokens and ends
    queue_limit, client_queue_limit : requests that may wait for room, and those of one client (None: as many)
    queue_timeout_s : how long a request may wait before it starts
    ping_every_s : how often each worker is asked whether it is there
    plan : of the placement, gives the routes that are left after a loss; None: see Admission
    """

    def __init__(
        self,
        router: Router,
        replicas: Mapping[str, Replica],
        observer: Observer | None = None,
        queue_limit: int = QUEUE_LIMIT,
        client_queue_limit: int | None = None,
        queue_timeout_s: float = QUEUE_TIMEOUT_S,
        ping_every_s: float = PING_EVERY_S,
        plan: Reflow | None = None,
    ) -> None:
        self.replicas = dict(replicas)
        self.records: deque[RequestRecord] = deque(maxlen=RECORDS_KEPT)
        self._observer = observer
        self.plan = plan
        self._queue: FairQueue[Generation] = FairQueue(queue_limit, client_queue_limit)
        self._admission: Admission[Generation] = Admission(
            router, self.replicas, self._queue, plan.routes if plan else None
        )
        self._queue_timeout_s, self._pace = queue_timeout_s, Pace()
        self._usual_output_tokens = 2 * max(replica.growth_tokens for replica in self.replicas.values())
        self._requests: dict[str, Generation] = {}
        self._numbers = itertools.count()
        self._listeners = Listeners(self._handle, self._lose, ping_every_s)
        self._on_lost: Callable[[Replica], bool] = lambda _: False
        self._stopped = False

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def lost(self) -> Mapping[str, str]:
        """Replicas that are gone, with the reason."""
        return self._admission.lost

    @property
    def starting(self) -> Collection[str]:
        """Replicas that are on their way."""
        return self._admission.starting

    @property
    def absent(self) -> Collection[str]:
        """Replicas that take no requests: lost, on their way or about to leave."""
        return self._admission.absent

    @property
    def context_tokens(self) -> int:
        """Prompt and output tokens that the roomiest route can hold; 0 without routes."""
        return self._admission.context_tokens

    def check_serving(self) -> None:
        """Raise Unavailable if no route is left, or the server stops."""
        if self._stopped:
            raise Unavailable("the server is stopping")
        self._admission.check_serving()

    def check_place(self, client: str) -> None:
        """Raise Unavailable, Overloaded or TooMany if no request of a client can be taken now."""
        self.check_serving()
        try:
            self._queue.check_place(client)
        except Overloaded as refusal:
            refusal.retry_after_s = self._pace.retry_after_s(len(self._queue), time.monotonic())
            raise

    def start(self, on_lost: Callable[[Replica], bool] = lambda _: False) -> None:
        """Begin to listen to the workers and to watch them; needs a running event loop.

        Parameters
        ----------
        on_lost : told of a replica that is lost; whether it will be revived, so that requests may wait for it
        """
        self._on_lost = on_lost
        for replica in self.replicas.values():
            self._listeners.listen(replica)

    def revive(self, replica_id: str, links: Mapping[str, Link]) -> None:
        """Use a replica again that was lost: its workers have been started anew."""
        replica = self.replicas[replica_id]
        replica.begin_again(links)
        self._use(replica)

    def revive_no_more(self, replica_id: str) -> None:
        """Have no request wait any more for a replica that was lost."""
        error = Unavailable(self.lost.get(replica_id, ""))
        for request in self._admission.give_up(replica_id):
            self._end(request, "failed", error)

    # another placement

    def change(self, plan: Reflow, coming: Mapping[str, Replica], forgotten: Collection[str] = ()) -> None:
        """Go on with other replicas: those of a plan.

        Parameters
        ----------
        coming : those that do not serve yet; they `join` later
        forgotten : those that are lost for good and no part of the plan
        """
        self.plan = plan
        for name in forgotten:
            self.replicas.pop(name, None)
        self.replicas.update(coming)
        self._admission.change(plan.routes, coming.keys(), forgotten)
        self._admit()

    def join(self, replica_id: str, links: Mapping[str, Link]) -> None:
        """Use a replica that has started."""
        replica = self.replicas[replica_id]
        replica.links = links
        self._use(replica)

    def give_up(self, replica_id: str, reason: str) -> None:
        """Count a replica as lost that did not start."""
        self._lose(self.replicas[replica_id], reason)

    def retire(self, replica_ids: Collection[str]) -> None:
        """Give some replicas no new requests any more; what they serve, they finish."""
        for request in self._admission.retire(replica_ids):
            self._end(request, "failed", Unavailable("no replica is left that could serve it"))

    def send_away(self, replica_id: str) -> None:
        """Resume elsewhere what a replica still serves."""
        leaves = Unavailable(f"replica {replica_id} leaves")
        for request_id in reversed(list(self.replicas[replica_id].held)):
            request = self._requests.get(request_id)
            if request is not None and request.phase != "ended" and _needs(request, replica_id):
                self._resume(request, leaves)
        self._admit()

    def leave(self, replica_id: str) -> None:
        """Forget a replica that was retired and serves nothing any more; the launcher ends its workers."""
        self._listeners.leave(replica_id)
        del self.replicas[replica_id]

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        route: Route | None = None,
        origin: Origin = UNKNOWN,
    ) -> Generation:
        """Take a request; it starts at once or waits its turn.

        Parameters
        ----------
        route : take this route instead of the router's choice

        Raises
        ------
        Overloaded, Unavailable, TooLong
        """
        record = RequestRecord(
            self._new_id(),
            len(prompt),
            sampling.max_tokens,
            time.monotonic(),
            client=origin.client,
            client_request_id=origin.request_id,
            traceparent=origin.traceparent,
        )
        request = Generation(
            tuple(prompt), sampling, route, record, origin, usual_output_tokens=self._usual_output_tokens
        )
        self.check_serving()
        self._join_queue(request)
        _log(request, "received from %s: %d tokens", origin.client, len(prompt))
        self._admit()
        if request.phase == "waiting":
            self._end_after(request, self._queue_timeout_s, self._waited_too_long)
        if origin.timeout_s is not None:
            self._end_after(request, origin.timeout_s, self._ran_out_of_time)
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
        await self._listeners.stop()

    # admission

    def _new_id(self) -> str:
        return f"r{next(self._numbers)}"

    def _join_queue(self, request: Generation) -> None:
        """Queue a request, unless there is no place for it or it would wait longer than it may."""
        ahead, now = self._queue.ahead(request), time.monotonic()
        wait_s = self._pace.wait_s(ahead, now) or 0.0
        own_s = request.origin.timeout_s
        may_wait_s = self._queue_timeout_s if own_s is None else min(own_s, self._queue_timeout_s)
        try:
            if wait_s > may_wait_s:
                raise Overloaded(f"the request would wait {wait_s:.0f} s, and may wait {may_wait_s:g} s")
            crowded_out = self._admission.enqueue(request)
        except Overloaded as refusal:
            refusal.retry_after_s = self._pace.retry_after_s(ahead, now)
            raise
        if crowded_out is not None:
            self._give_up_waiting(
                crowded_out, "failed", "other clients wait, and this one has the most waiting"
            )

    def _end_after(self, request: Generation, limit_s: float, end: Callable[[Generation], None]) -> None:
        request.deadlines.append(asyncio.get_running_loop().call_later(limit_s, end, request))

    def _waited_too_long(self, request: Generation) -> None:
        """The request has not started in time."""
        if request.phase == "waiting" and not request.record.routed_s:
            self._give_up_waiting(request, "timeout", f"no room for it within {self._queue_timeout_s:g} s")

    def _still_waits(self, request_id: str, request: Generation) -> None:
        """Nothing has taken the request up again in time, since it was given this id."""
        if request.phase == "waiting" and request.request_id == request_id:
            late = f"no replica has taken it up again within {self._queue_timeout_s:g} s"
            self._give_up_waiting(request, "timeout", late)

    def _ran_out_of_time(self, request: Generation) -> None:
        late = TimedOut(f"the {request.origin.timeout_s:g} s of the request are over")
        if not request.record.routed_s:
            self._give_up_waiting(request, "timeout", str(late))
        else:
            self._end(request, "timeout", late)
            self._admit()

    def _give_up_waiting(self, request: Generation, outcome: Outcome, reason: str) -> None:
        refusal = Overloaded(reason)
        refusal.retry_after_s = self._pace.retry_after_s(len(self._queue), time.monotonic())
        self._end(request, outcome, refusal)
        self._admit()

    def _admit(self) -> None:
        """Start waiting requests as long as there is room."""
        while not self._stopped and (admitted := self._admission.next()) is not None:
            self._pace.started(time.monotonic())
            self._begin(*admitted)
        self._pace.waiting(len(self._queue) > 0, time.monotonic())

    def _begin(self, request: Generation, route: Route) -> None:
        request.route = route
        self._requests[request.request_id] = request
        record = request.record
        record.routed_s = record.routed_s or time.monotonic()
        record.prefill_replica = route.prefill
        _log(request, "routed to %s and %s", route.prefill, route.decode)
        alone = route.colocated or request.one_token
        record.decode_replica = route.prefill if alone else route.decode
        prefill, decode = self.replicas[route.prefill], self.replicas[route.decode]
        if alone:
            request.hold(prefill, request.prompt_tokens)
            request.phase = "prefilling"
            prefill.send(request.prefill(target=""))
        else:
            request.hold(prefill, request.prompt_tokens)
            request.hold(decode, request.prompt_tokens)
            request.phase = "reserving"
            decode.send(request.expect())

    def _use(self, replica: Replica) -> None:
        self._admission.restore(replica.replica_id)
        self._listeners.listen(replica)
        self._admit()

    # messages of the workers

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
                    request.record.kv_arrived, request.record.kv_arrived_s = True, time.monotonic()
            case RequestFailed():
                self._on_failed(replica, message)
            case Load():
                replica.take(message)
                self._admit()
            case Released(request_id=request_id):
                if replica.load is None:
                    replica.free_blocks, replica.preemptions = message.free_blocks, message.preemptions
                self._on_released(replica, request_id)
            case Pong():
                pass  # the link has counted it
            case _:
                log.warning("replica %s sent an unexpected %s", replica.replica_id, type(message).__name__)

    def _on_reserved(self, replica: Replica, request_id: str, ok: bool, cached_tokens: int) -> None:
        request = self._requests.get(request_id)
        if request is None:
            if not ok:
                replica.release(request_id)
                self._admit()
        elif not ok:
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
            self._wait_again(request)
        else:
            no_room = f"replica {replica.replica_id} has no room for the request"
            self._end(request, "failed", Unavailable(no_room))
        self._admit()

    def _wait_again(self, request: Generation) -> None:
        """Put a request first in the queue, under another id: workers may still be forgetting the old one."""
        request.phase, request.route = "waiting", None
        request.record.request_id = self._new_id()
        self._admission.put_back(request)
        self._end_after(request, self._queue_timeout_s, partial(self._still_waits, request.request_id))

    def _resume(self, request: Generation, error: HexGen2Error) -> None:
        """Go on elsewhere with a request that was failed by a replica; end it if that is impossible."""
        record = request.record
        if record.resumes == RESUMES or self._stopped or not self._admission.can_ever_start(request):
            self._end(request, "failed", error)
            return
        _log(request, "is resumed after %d tokens: %s", record.output_tokens, error)
        if request.phase == "reserving":
            request.release(record.prefill_replica)
        for replica in request.holders.values():
            replica.send(Cancel(request_id=record.request_id))
        request.holders.clear()  # what they hold counts as used until they say Released of the old id
        self._requests.pop(record.request_id, None)
        record.resumes += 1
        record.kv_bytes, record.kv_s, record.kv_arrived = 0, 0.0, False
        self._wait_again(request)

    def _on_token(self, output: TokenOutput) -> None:
        request = self._requests.get(output.request_id)
        if request is None or request.phase == "ended" or output.index < request.record.output_tokens:
            return
        record, now = request.record, time.monotonic()
        if output.index > record.output_tokens:
            lost = f"token {record.output_tokens} of request {record.request_id} never arrived"
            self._resume(request, Unavailable(lost))
            self._admit()
            return
        if output.index == 0:
            record.first_token_s = now
            _log(request, "has its first token")
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

    def _on_failed(self, replica: Replica, message: RequestFailed) -> None:
        """A replica gives a request up, and says Released later as it does after a Cancel."""
        request = self._requests.get(message.request_id)
        if request is not None and request.phase != "ended":
            gave_up = f"replica {replica.replica_id} gave up request {message.request_id}: {message.text}"
            log.warning(gave_up, extra=about(request.origin.request_id, request.request_id))
            if message.fault:
                self._resume(request, Unavailable(gave_up))
            else:
                self._end(request, "failed", Unavailable(gave_up))
            self._admit()

    def _on_released(self, replica: Replica, request_id: str) -> None:
        replica.release(request_id)
        request = self._requests.get(request_id)
        if request is not None:
            request.holders.pop(replica.replica_id, None)
            needed = replica.replica_id == request.record.decode_replica or request.phase == "prefilling"
            if needed and request.phase != "ended":
                gave_up = f"replica {replica.replica_id} gave up request {request_id}"
                self._resume(request, Unavailable(gave_up))
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
        for deadline in request.deadlines:
            deadline.cancel()
        request.record.outcome, request.record.ended_s = outcome, time.monotonic()
        _log(request, "ended (%s) after %d tokens", outcome, request.record.output_tokens)
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
        """A replica is gone: route around it, resume elsewhere what needs it, stop its other workers."""
        if replica.replica_id in self.lost or self._stopped:
            return
        text = f"replica {replica.replica_id} is lost ({reason})"
        log.error(text)
        stranded = self._admission.lose(replica.replica_id, text, returns=self._on_lost(replica))
        self._listeners.leave(replica.replica_id)
        for link in replica.links.values():
            link.send(Shutdown())
        error = Unavailable(text)
        for request_id in reversed(list(replica.held)):  # the oldest goes to the head of the queue last
            replica.release(request_id)
            request = self._requests.get(request_id)
            if request is None:
                continue
            request.release(replica.replica_id)
            if request.phase != "ended" and _needs(request, replica.replica_id):
                self._resume(request, error)
            self._forget_if_settled(request)
        for request in stranded:
            self._end(request, "failed", error)
        self._admit()


def _needs(request: Generation, replica_id: str) -> bool:
    """Whether a request cannot go on without a replica that holds some of it."""
    return replica_id == request.record.decode_replica or not request.record.kv_arrived


def _log(request: Generation, text: str, *values: object) -> None:
    """Say what became of a request."""
    if log.isEnabledFor(logging.INFO):
        log.info(f"request {text}", *values, extra=about(request.origin.request_id, request.request_id))
