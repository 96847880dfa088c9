"""In-flight requests: the messages to the replicas that serve them, and what each answer changes.

Each request is a state machine (`request_state.py`), driven by the messages of the replicas' drivers:

    waiting -> reserving (ReserveKv) -> prefilling (Prefill) -> decoding (Decode) -> ended

A request that decodes where it was prefilled, or that asks for one token, skips reserving and
decoding. When a replica is lost or gives a request up, the request waits again under a new id and resumes
elsewhere: its prompt and the tokens so far are prefilled, and the stream continues with the next token. A
request that may have killed two replicas is not resumed, and neither is one that a replica reports as
broken. Memory is accounted for from the moment a request is routed until every replica involved has sent
Released (or refused the request), so that the accounting never runs ahead of the workers.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from cost_model.errors import HexGen2Error
from runtime.frontend.replica import Replica
from runtime.frontend.request import Death, Observer, Outcome, Request, RequestRecord
from runtime.frontend.request_state import RequestEvent, RequestState
from runtime.logs import EACH, about
from runtime.protocol.from_workers import (
    HeadCounts,
    KvMoved,
    Load,
    Pong,
    Released,
    RequestFailed,
    Reserved,
    StepOutput,
    TokenOutput,
)
from runtime.protocol.message import Message
from runtime.protocol.to_workers import Cancel, Ping
from runtime.routing.refusals import Broken, Unavailable

log = logging.getLogger(__name__)

RECORDS_KEPT = 1000
RESUMES = 3
"""Most resumes of one request, since it may be the cause of the failures."""
DEATHS = 2
"""A request is not resumed after this many replicas died while serving it, since it may be the cause."""


class InFlight:
    """Tracks started requests through the replicas and accounts for their KV cache.

    Attributes
    ----------
    requests : those that messages may still refer to, by the id that the workers know
    records : the records of the latest requests that ended, oldest first

    Parameters
    ----------
    replicas : by id; they may come and go
    observer : notified of tokens and of the ends of requests
    admit : starts waiting requests after memory may have become free
    can_wait_again : whether a request could begin on some route, now or later
    wait_again : puts a request first in the queue, under a new id
    ended : called with a request that has ended
    explained : called with the replicas that a quarantined request is blamed for
    """

    def __init__(
        self,
        replicas: Mapping[str, Replica],
        observer: Observer | None,
        admit: Callable[[], None],
        can_wait_again: Callable[[Request], bool],
        wait_again: Callable[[Request], None],
        ended: Callable[[Request], None] = lambda _: None,
        explained: Callable[[Collection[str]], None] = lambda _: None,
    ) -> None:
        self.requests: dict[str, Request] = {}
        self.records: deque[RequestRecord] = deque(maxlen=RECORDS_KEPT)
        self._replicas, self._observer = replicas, observer
        self._admit, self._can_wait_again, self._wait_again = admit, can_wait_again, wait_again
        self._ended, self._explained, self._deaths = ended, explained, 0

    def begin(self, request: Request, route: Any) -> None:
        """Start a request on a route (or what else admission found) that has room for it."""
        try:
            self._begin(request, route)
        except Exception as error:
            self._break(request, error)

    def _note_start(self, request: Request) -> RequestRecord:
        """A request begins, under the id that it has now."""
        request.begun_tokens, record = len(request.tokens), request.record
        self.requests[request.request_id] = request
        record.routed_s = record.routed_s or time.monotonic()
        return record

    def _begin(self, request: Request, route: Any) -> None:
        record = self._note_start(request)
        request.route, record.prefill_replica = route, route.prefill
        log_request(request, "routed to %s and %s", route.prefill, route.decode)
        alone = route.colocated or request.one_token
        record.decode_replica = route.prefill if alone else route.decode
        prefill, decode = self._replicas[route.prefill], self._replicas[route.decode]
        if alone:
            request.hold(prefill, request.prompt_tokens)
            request.on(RequestEvent.PREFILL)
            ask(prefill, request, request.prefill(target=""))
        else:
            request.hold(prefill, request.prompt_tokens, route.decode)
            request.hold(decode, request.prompt_tokens)
            request.on(RequestEvent.RESERVE)
            ask(decode, request, request.reserve_kv())

    def end(
        self, request: Request, outcome: Outcome, error: HexGen2Error | None, by_itself: bool = False
    ) -> None:
        """Close the request's stream, and have every replica free what it still holds for it.

        After `by_itself` (the last token arrived) they do so without a message, except a decode replica that
        still waits for the KV cache.
        """
        if request.state is RequestState.RESERVING:
            request.release(request.record.prefill_replica)
        decode_side_waits = request.state is RequestState.PREFILLING
        request.on(RequestEvent.END)
        for deadline in request.deadlines:
            deadline.cancel()
        request.record.outcome, request.record.ended_s = outcome, time.monotonic()
        log_request(request, "ended (%s) after %d tokens", outcome, request.record.output_tokens)
        request.put(error)
        for replica_id, replica in request.holders.items():
            waits = decode_side_waits and replica_id != request.record.prefill_replica
            if waits or not by_itself:
                replica.send(Cancel(request_id=request.request_id))
        self._forget_if_settled(request)
        self.records.append(request.record)
        self._ended(request)
        if self._observer is not None:
            try:
                self._observer.ended(request.record)
            except Exception:
                log.exception("the observer failed at the end of request %s", request.client_request_id)

    def _break(self, request: Request, why: Exception | str) -> None:
        """End a request that is itself the cause of an error; other requests of its replicas continue."""
        extra = about(request.client_request_id, request.request_id)
        if isinstance(why, Exception):
            log.error("handling a request failed", exc_info=why, extra=extra)
        text = "request %s fails by itself, after %d tokens: %s"
        tokens = request.record.output_tokens
        log.error(text, request.client_request_id, tokens, why, extra={**extra, EACH: True})
        if not request.has_ended:
            self.end(request, "failed", Broken(request.client_request_id))

    # when a replica is lost

    def send_away(self, replica: Replica, error: HexGen2Error) -> None:
        """Resume the requests of a replica elsewhere; those that cannot be resumed end with the error."""
        for request_id in reversed(list(replica.held)):
            request = self.requests.get(request_id)
            if request is not None and not request.has_ended and _needs(request, replica.replica_id):
                self._resume(request, error)

    def end_larger(self, replica: Replica, error: HexGen2Error) -> None:
        """End the requests that a replica can hold no more, however long they wait."""
        for request_id in list(replica.held):
            request = self.requests.get(request_id)
            if request is None or request.has_ended:
                continue
            if request.capacity_tokens > replica.largest_request_tokens:
                self.end(request, "failed", error)

    def lose(self, replica: Replica, error: HexGen2Error) -> None:
        """Resume the requests of a lost replica, whose KV cache is gone, on other replicas."""
        on_board = list[Request]()
        for request_id in reversed(list(replica.held)):  # so that the oldest ends up at the head of the queue
            replica.release(request_id)
            request = self.requests.get(request_id)
            if request is None:
                continue
            request.release(replica.replica_id)
            if not request.has_ended and _needs(request, replica.replica_id):
                on_board.append(request)
            self._forget_if_settled(request)
        self._quarantine(replica, on_board)
        for request in on_board:
            if not request.has_ended:
                self._resume(request, error)

    def _quarantine(self, replica: Replica, on_board: Sequence[Request]) -> None:
        """End the requests that DEATHS replicas were serving when they died: one of them may be the cause.

        If some of these never got a token from a replica that died, only those are suspects: the others ran
        without harm. A death does not count against a request that was resumed on the replica but that the
        replica, dying together with the previous one, never received."""
        self._deaths += 1
        for request in on_board:
            if not request.deaths or replica.heard > request.boarded.get(replica.replica_id, 0):
                made = request.made_tokens(replica.replica_id)
                request.deaths.append(Death(self._deaths, replica.replica_id, made))
        suspects = [request for request in on_board if len(request.deaths) >= DEATHS]
        at_once = [each for each in suspects if not any(death.made_tokens for death in each.deaths)]
        caught = at_once or suspects
        explained = {death.number: death.replica_id for request in caught for death in request.deaths}
        for request in caught:
            died = ", ".join(death.replica_id for death in request.deaths)
            self._break(request, f"replicas died while serving it ({died}), so it is not resumed again")
        for request in on_board:
            if request not in caught:
                request.deaths = [death for death in request.deaths if death.number not in explained]
        if explained:
            self._explained(set(explained.values()))

    def _resume(self, request: Request, error: HexGen2Error) -> None:
        """Resume a request that a replica failed; end it with the error if that is impossible."""
        record = request.record
        if record.resumes == RESUMES or not self._can_wait_again(request):
            self.end(request, "failed", error)
            return
        log_request(request, "is resumed after %d tokens: %s", record.output_tokens, error)
        if request.state is RequestState.RESERVING:
            request.release(record.prefill_replica)
        record.resumes += 1
        self._put_back(request)

    def _put_back(self, request: Request) -> None:
        """Take a request off its replicas; it waits again, to go on from the tokens that it has."""
        record = request.record
        for replica in request.holders.values():
            replica.send(Cancel(request_id=record.request_id))
        request.holders.clear()  # what they hold counts as used until they send Released for the old id
        self.requests.pop(record.request_id, None)
        record.kv_bytes, record.kv_s, record.kv_arrived = 0, 0.0, False
        self._wait_again(request)

    # messages from the workers

    def handle(self, replica: Replica, message: Message) -> None:
        """Handle a message from a worker. If handling fails for one request, only that request ends."""
        for part in message.outputs if isinstance(message, StepOutput) else (message,):
            try:
                self._take(replica, part)
            except Exception as error:
                request = self.requests.get(getattr(part, "request_id", ""))
                if request is None:
                    raise
                self._break(request, error)
                self._admit()

    def _take(self, replica: Replica, message: Message | TokenOutput) -> None:
        match message:
            case TokenOutput():
                self._on_token(message)
            case Reserved(request_id=request_id, ok=ok, cached_tokens=cached_tokens):
                self._on_reserved(replica, request_id, ok, cached_tokens)
            case KvMoved(request_id=request_id, bytes_received=received, seconds=seconds):
                if request := self.requests.get(request_id):
                    request.record.kv_bytes, request.record.kv_s = received, seconds
                    request.record.kv_arrived, request.record.kv_arrived_s = True, time.monotonic()
            case RequestFailed():
                self._on_failed(replica, message)
            case Load():
                replica.take(message)
                self._admit()
            case HeadCounts():
                if replica.attention_workers is not None:
                    replica.attention_workers.counts = message
            case Released(request_id=request_id):
                if replica.load is None:
                    replica.free_blocks = message.free_blocks
                    replica.preemptions = max(replica.preemptions, message.preemptions)
                self._on_released(replica, request_id)
            case Pong():
                pass  # the link has already counted it
            case _:
                log.warning("replica %s sent an unexpected %s", replica.replica_id, type(message).__name__)

    def _on_reserved(self, replica: Replica, request_id: str, ok: bool, cached_tokens: int) -> None:
        request = self.requests.get(request_id)
        if request is None:
            if not ok:
                replica.release(request_id)
                self._admit()
        elif not ok:
            self._on_refused(replica, request)
        elif request.state is RequestState.RESERVING:
            request.on(RequestEvent.PREFILL)
            prefill = self._replicas[request.record.prefill_replica]
            ask(prefill, request, request.prefill(replica.replica_id, cached_tokens))

    def _on_refused(self, replica: Replica, request: Request) -> None:
        """A replica had no room although the accounting showed some: it holds nothing of the request."""
        if request.has_ended:
            self._on_released(replica, request.request_id)
            return
        for holder in list(request.holders):
            request.release(holder)
        del self.requests[request.request_id]
        if replica.held:
            replica.refused = True
            self._wait_again(request)
        else:
            no_room = f"replica {replica.replica_id} has no room for the request"
            self.end(request, "failed", Unavailable(no_room))
        self._admit()

    def _on_token(self, output: TokenOutput) -> None:
        request = self.requests.get(output.request_id)
        if request is None or request.has_ended or output.index < request.record.output_tokens:
            return
        record, now = request.record, time.monotonic()
        if output.index > record.output_tokens:
            lost = f"token {record.output_tokens} of request {record.request_id} never arrived"
            self._resume(request, Unavailable(lost))
            self._admit()
            return
        if output.index == 0:
            record.first_token_s = now
            log_request(request, "has its first token")
            record.cached_tokens = output.cached_tokens
        elif self._observer is not None:
            self._observer.token_gap(now - record.last_token_s)
        record.last_token_s = now
        record.output_tokens += 1
        request.put(output)
        if output.finish_reason:
            outcome: Outcome = "stop" if output.finish_reason == "stop" else "length"
            self.end(request, outcome, None, by_itself=True)
        else:
            began = request.state is RequestState.PREFILLING
            if began:
                request.on(RequestEvent.DECODE)
            self._go_on(request, output, began)

    def _go_on(self, request: Request, output: TokenOutput, is_first: bool) -> None:
        """A request has a token that is not its last one; is_first: since it began on its route."""
        record = request.record
        decode = self._replicas[record.decode_replica]
        decode.grow(record.request_id)
        if is_first and record.decode_replica != record.prefill_replica:
            decode.send(request.decode(output))

    def _on_failed(self, replica: Replica, message: RequestFailed) -> None:
        """A replica gave up a request; Released follows, as after a Cancel."""
        request = self.requests.get(message.request_id)
        if request is not None and not request.has_ended:
            gave_up = f"replica {replica.replica_id} gave up request {message.request_id}: {message.text}"
            if message.fault:
                log.warning(gave_up, extra=about(request.origin.request_id, request.request_id))
                self._resume(request, Unavailable(gave_up))
            else:
                self._break(request, gave_up)
            self._admit()

    def _on_released(self, replica: Replica, request_id: str) -> None:
        replica.release(request_id)
        request = self.requests.get(request_id)
        if request is not None:
            request.holders.pop(replica.replica_id, None)
            if self._misses(request, replica.replica_id) and not request.has_ended:
                gave_up = f"replica {replica.replica_id} gave up request {request_id}"
                self._resume(request, Unavailable(gave_up))
            self._forget_if_settled(request)
        self._admit()

    def _misses(self, request: Request, replica_id: str) -> bool:
        """Whether a request cannot go on without what a replica has just released."""
        return replica_id == request.record.decode_replica or request.state is RequestState.PREFILLING

    def _forget_if_settled(self, request: Request) -> None:
        """Drop a request that has ended and holds nothing: no more messages can refer to it."""
        if request.has_ended and not request.holders:
            self.requests.pop(request.request_id, None)


def _needs(request: Request, replica_id: str) -> bool:
    """Whether a request cannot continue without one of the replicas that hold its KV cache."""
    prefilled = request.state is RequestState.DECODING and request.record.kv_arrived
    return replica_id == request.record.decode_replica or not prefilled


def ask(replica: Replica, request: Request, message: Message) -> None:
    """Send a replica its first message about a request; if that fails, the replica holds nothing.

    A Ping precedes a request that may have killed another replica: the answer to it shows that this replica
    was alive when the request arrived.
    """
    try:
        if request.deaths:
            replica.send(Ping())
        replica.send(message)
    except Exception:
        request.release(replica.replica_id)
        raise


def log_request(request: Request, text: str, *values: object) -> None:
    """Log a step in the life of a request."""
    if log.isEnabledFor(logging.INFO):
        log.info(f"request {text}", *values, extra=about(request.origin.request_id, request.request_id))
