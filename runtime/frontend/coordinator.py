"""The front end of a fleet: queues requests, starts them on replicas and adds or removes replicas.

A request waits until a route has room for it (`routing/admission.py`) or its time is up. From its start it is
in flight (`in_flight.py`) until it ends, or until a replica fails it and it waits again. Meanwhile replicas
are lost, return, and are replaced by those of another placement.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from cost_model.errors import HexGen2Error
from runtime.frontend.in_flight import InFlight, log_request
from runtime.frontend.listeners import Listeners
from runtime.frontend.on_paths import InFlightOnPaths
from runtime.frontend.replica import Replica
from runtime.frontend.request import UNKNOWN, Observer, Origin, Outcome, Request, RequestRecord
from runtime.frontend.request_state import RequestEvent, RequestState
from runtime.launcher.worker_link import WorkerLink
from runtime.liveness import PING_EVERY_S
from runtime.options import QUEUE_TIMEOUT_S
from runtime.protocol.message import Sampling
from runtime.protocol.to_workers import Shutdown
from runtime.routing.admission import Admission
from runtime.routing.admission_base import AdmissionBase
from runtime.routing.fair_queue import QUEUE_LIMIT, FairQueue
from runtime.routing.load_shift import LoadShift
from runtime.routing.output_lengths import OutputLengths
from runtime.routing.paths.path_admission import PathAdmission
from runtime.routing.paths.path_router import PathRouter
from runtime.routing.paths.range_plan import RangePlan
from runtime.routing.reflow import Reflow
from runtime.routing.refusals import Overloaded, TimedOut, Unavailable
from runtime.routing.replica_state import ReplicaStates
from runtime.routing.router import Router
from runtime.routing.wait_estimate import WaitEstimate

log = logging.getLogger(__name__)


class Coordinator:
    """Queues requests, starts each on a route with room for it, and tracks which replicas serve.

    Parameters
    ----------
    router : chooses the route of each request, or the path, where replicas hold ranges of layers
    replicas : by id, with links to workers that are ready
    observer : notified of tokens and of the ends of requests
    queue_limit, client_queue_limit : requests that may wait for room, and those of one client (None: the
        same as queue_limit)
    queue_timeout_s : how long a request may wait before it starts
    ping_every_s : interval at which each worker is pinged
    plan : computes the routes that remain after a loss; None: see Admission
    shifts : what moves the shares of a plan's routes with the lengths of requests; None: they stay
    lengths : says how long answers will be, for paths through ranges of layers
    """

    def __init__(
        self,
        router: Router | PathRouter,
        replicas: Mapping[str, Replica],
        observer: Observer | None = None,
        queue_limit: int = QUEUE_LIMIT,
        client_queue_limit: int | None = None,
        queue_timeout_s: float = QUEUE_TIMEOUT_S,
        ping_every_s: float = PING_EVERY_S,
        plan: Reflow | RangePlan | None = None,
        shifts: Callable[[Reflow], LoadShift] | None = None,
        lengths: OutputLengths | None = None,
    ) -> None:
        self.replicas = dict(replicas)
        self.plan, self._shifts = plan, shifts
        self._shift = shifts(plan) if isinstance(plan, Reflow) and shifts else None
        self.share_moves = 0
        self._queue: FairQueue[Request] = FairQueue(queue_limit, client_queue_limit)
        self._queue_timeout_s, self._wait_estimate = queue_timeout_s, WaitEstimate()
        self._usual_output_tokens = 2 * max(replica.growth_tokens for replica in self.replicas.values())
        notified = self.replicas, observer, self._admit, self._can_wait_again, self._wait_again
        ends = self._on_ended, lambda replicas: self._on_explained(replicas)
        self._admission: AdmissionBase[Request]
        if isinstance(router, PathRouter):
            assert lengths is not None
            self._admission = PathAdmission(router, self._queue, lengths)
            self._in_flight: InFlight = InFlightOnPaths(router, *notified, *ends)
        else:
            routes_left = (self._shift or plan).routes if isinstance(plan, Reflow) else None
            self._admission = Admission(router, self.replicas, self._queue, routes_left)
            self._in_flight = InFlight(*notified, *ends)
        self._numbers = itertools.count()
        self._listeners = Listeners(
            self._in_flight.handle, self._lose, self._lose_attention_worker, ping_every_s
        )
        self._on_lost: Callable[[Replica], bool] = lambda _: False
        self._on_attention_worker_lost: Callable[[Replica, str], bool] = lambda *_: False
        self._on_explained: Callable[[Collection[str]], None] = lambda _: None
        self._stopped = False

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def weighs(self) -> bool:
        """Whether the scheduler counts the work of requests."""
        return self._admission.weighs

    @property
    def states(self) -> ReplicaStates:
        """What each replica is doing."""
        return self._admission.states

    @property
    def lost(self) -> Mapping[str, str]:
        """Lost replicas, with the reason."""
        return self.states.lost

    @property
    def records(self) -> Sequence[RequestRecord]:
        """Records of the latest requests that ended, oldest first."""
        return self._in_flight.records

    @property
    def context_tokens(self) -> int:
        """Prompt and output tokens of the longest request that can be served; 0 if none can be."""
        return self._admission.context_tokens

    def check_serving(self) -> None:
        """Raise Unavailable if no route is left or the server is stopping."""
        if self._stopped:
            raise Unavailable("the server is stopping")
        self._admission.check_serving()

    def check_place(self, client: str) -> None:
        """Raise Unavailable, Overloaded or TooMany if no request of a client can be taken now."""
        self.check_serving()
        try:
            self._queue.check_place(client)
        except Overloaded as refusal:
            refusal.retry_after_s = self._wait_estimate.retry_after_s(len(self._queue), time.monotonic())
            raise

    def start(
        self,
        on_lost: Callable[[Replica], bool] = lambda _: False,
        on_explained: Callable[[Collection[str]], None] = lambda _: None,
        on_attention_worker_lost: Callable[[Replica, str], bool] = lambda *_: False,
    ) -> None:
        """Start listening to the workers and watching them; needs a running event loop.

        Parameters
        ----------
        on_lost : called with a lost replica; returns whether it is being restarted, so that requests may wait
            for it
        on_explained : called with replicas that died of a request which is not resumed again
        on_attention_worker_lost : called with a replica and its lost attention worker; returns whether it is
            being restarted
        """
        self._on_lost, self._on_explained = on_lost, on_explained
        self._on_attention_worker_lost = on_attention_worker_lost
        for replica in self.replicas.values():
            self._listeners.listen(replica)

    def revive(self, replica_id: str, links: Mapping[str, WorkerLink]) -> None:
        """Use a lost replica again whose workers have been restarted."""
        replica = self.replicas[replica_id]
        replica.begin_again(links)
        self._use(replica)

    def revive_no_more(self, replica_id: str) -> None:
        """Stop waiting for a lost replica: requests that only it could serve fail."""
        error = Unavailable(self.lost.get(replica_id, ""))
        for request in self._admission.give_up(replica_id):
            self._end(request, "failed", error)

    def revive_attention_worker(self, replica_id: str, worker: str, link: WorkerLink) -> None:
        """Use an attention worker again that has been restarted."""
        replica = self.replicas[replica_id]
        replica.change_attention_workers(lambda workers: workers.regain(worker, link))
        if replica_id not in self.lost:
            self._listeners.listen_to(replica, worker)
        self._admit()

    def give_up_attention_worker(self, replica_id: str, worker: str) -> None:
        """Stop waiting for a lost attention worker: requests that are too large without it fail."""
        replica = self.replicas[replica_id]
        replica.change_attention_workers(lambda workers: workers.give_up(worker))
        error = Unavailable(f"without attention worker {worker}, no replica holds the request")
        self._in_flight.end_larger(replica, error)
        for request in self._admission.stranded():
            self._end(request, "failed", error)
        self._admit()

    # another placement

    def change(self, plan: Reflow, coming: Mapping[str, Replica], forgotten: Collection[str] = ()) -> None:
        """Switch to the replicas of another plan.

        Parameters
        ----------
        coming : replicas that do not serve yet; they `join` later
        forgotten : replicas that are lost for good and not part of the plan
        """
        self.plan = plan
        self._shift = self._shifts(plan) if self._shifts else None
        for name in forgotten:
            self.replicas.pop(name, None)
        self.replicas.update(coming)
        assert isinstance(self._admission, Admission)
        self._admission.change((self._shift or plan).routes, coming.keys(), forgotten)
        self._admit()

    def join(self, replica_id: str, links: Mapping[str, WorkerLink]) -> None:
        """Use a new replica whose workers have started."""
        replica = self.replicas[replica_id]
        replica.links = links
        self._use(replica)

    def give_up(self, replica_id: str, reason: str) -> None:
        """Count a replica as lost, because it did not start or did not finish."""
        self._lose(self.replicas[replica_id], reason)

    def retire(self, replica_ids: Collection[str]) -> None:
        """Send some replicas no new requests; they finish those that they have."""
        for request in self._admission.retire(replica_ids):
            self._end(request, "failed", Unavailable("no replica is left that could serve it"))

    def send_away(self, replica_id: str) -> None:
        """Resume the requests of a replica on others."""
        self._in_flight.send_away(self.replicas[replica_id], Unavailable(f"replica {replica_id} leaves"))
        self._admit()

    def leave(self, replica_id: str) -> None:
        """Forget a retired replica that has finished its requests; the launcher ends its workers."""
        self._listeners.leave(replica_id)
        del self.replicas[replica_id]

    async def hand_over(self, replica_id: str) -> None:
        """Forget a retired replica that has finished its requests; its workers go on as another one."""
        await self._listeners.hand_over(replica_id)
        self.replicas.pop(replica_id, None)

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        origin: Origin = UNKNOWN,
    ) -> Request:
        """Accept a request; it starts at once or waits in the queue.

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
        request = Request(tuple(prompt), sampling, record, origin, self._usual_output_tokens)
        self.check_serving()
        self._join_queue(request)
        self._move_shares(len(prompt))
        log_request(request, "received from %s: %d tokens", origin.client, len(prompt))
        self._admit()
        if request.state is RequestState.WAITING:
            self._end_after(request, self._queue_timeout_s, self._waited_too_long)
        if origin.timeout_s is not None:
            self._end_after(request, origin.timeout_s, self._ran_out_of_time)
        return request

    def cancel(self, request: Request, outcome: Outcome = "cancelled") -> None:
        """Stop a request in any state. Its memory counts as used until the replicas have freed it."""
        if not request.has_ended:
            self._end(request, outcome, None)
            self._admit()

    async def stop(self) -> None:
        """Fail every request and stop listening. The launcher stops the workers."""
        self._stopped = True
        for request in [*self._admission.waiting, *self._in_flight.requests.values()]:
            if not request.has_ended:
                self._end(request, "failed", Unavailable("the server is stopping"))
        await self._listeners.stop()

    # admission

    def _new_id(self) -> str:
        return f"r{next(self._numbers)}"

    def _join_queue(self, request: Request) -> None:
        """Queue a request, unless the queue is full or the request would wait longer than it may."""
        ahead, now = self._queue.ahead(request), time.monotonic()
        wait_s = self._wait_estimate.wait_s(ahead, now) or 0.0
        own_s = request.origin.timeout_s
        may_wait_s = self._queue_timeout_s if own_s is None else min(own_s, self._queue_timeout_s)
        try:
            if wait_s > may_wait_s:
                raise Overloaded(f"the request would wait {wait_s:.0f} s, and may wait {may_wait_s:g} s")
            crowded_out = self._admission.enqueue(request)
        except Overloaded as refusal:
            refusal.retry_after_s = self._wait_estimate.retry_after_s(ahead, now)
            raise
        if crowded_out is not None:
            self._give_up_waiting(
                crowded_out, "failed", "other clients wait, and this one has the most waiting"
            )

    def _end_after(self, request: Request, limit_s: float, end: Callable[[Request], None]) -> None:
        request.deadlines.append(asyncio.get_running_loop().call_later(limit_s, end, request))

    def _waited_too_long(self, request: Request) -> None:
        """Time out a request that has not started."""
        if request.state is RequestState.WAITING and not request.record.routed_s:
            self._give_up_waiting(request, "timeout", f"no room for it within {self._queue_timeout_s:g} s")

    def _still_waits(self, request_id: str, request: Request) -> None:
        """Time out a request that no replica has resumed since it got this id."""
        if request.state is RequestState.WAITING and request.request_id == request_id:
            late = f"no replica has taken it up again within {self._queue_timeout_s:g} s"
            self._give_up_waiting(request, "timeout", late)

    def _ran_out_of_time(self, request: Request) -> None:
        late = TimedOut(f"the {request.origin.timeout_s:g} s of the request are over")
        if not request.record.routed_s:
            self._give_up_waiting(request, "timeout", str(late))
        else:
            self._end(request, "timeout", late)
            self._admit()

    def _give_up_waiting(self, request: Request, outcome: Outcome, reason: str) -> None:
        refusal = Overloaded(reason)
        refusal.retry_after_s = self._wait_estimate.retry_after_s(len(self._queue), time.monotonic())
        self._end(request, outcome, refusal)
        self._admit()

    def _admit(self) -> None:
        """Start waiting requests while there is room."""
        while not self._stopped and (admitted := self._admission.next()) is not None:
            self._wait_estimate.started(time.monotonic())
            if self._shift:
                self._shift.began(admitted[0])
            self._in_flight.begin(*admitted)
        self._wait_estimate.waiting(len(self._queue) > 0, time.monotonic())

    def _move_shares(self, prompt_tokens: int) -> None:
        """A request has arrived: move shares of routes if lengths have changed and requests wait."""
        if self._shift is None:
            return
        self._shift.arrived(prompt_tokens)
        moved = self._shift.move(self.states.absent, self._admission.pressure.high)
        if moved and isinstance(self._admission, Admission):
            log.warning(moved)
            self.share_moves += 1
            self._admission.reroute()

    def _on_ended(self, request: Request) -> None:
        record = request.record
        if self._shift is not None:
            self._shift.ended(request, record.output_tokens, record.prompt_tokens, record.cached_tokens)
        if record.outcome in ("stop", "length"):
            self._admission.learn(record.prompt_tokens, record.max_tokens, record.output_tokens)

    def _can_wait_again(self, request: Request) -> bool:
        return not self._stopped and self._admission.can_ever_start(request)

    def _wait_again(self, request: Request) -> None:
        """Put a request first in the queue under a new id: workers may still be releasing the old one."""
        request.on(RequestEvent.WAIT_AGAIN)
        request.route = None
        request.record.request_id = self._new_id()
        self._admission.put_back(request)
        self._end_after(request, self._queue_timeout_s, partial(self._still_waits, request.request_id))

    def _end(self, request: Request, outcome: Outcome, error: HexGen2Error | None) -> None:
        if request.state is RequestState.WAITING:
            self._admission.withdraw(request)
        self._in_flight.end(request, outcome, error)

    # replicas that come and go

    def _use(self, replica: Replica) -> None:
        self._admission.restore(replica.replica_id)
        self._listeners.listen(replica)
        self._admit()

    def _lose_attention_worker(self, replica: Replica, worker: str, reason: str) -> None:
        """Let a replica go on without one of its attention workers, whose driver knows or will find out."""
        workers = replica.attention_workers
        if self._stopped or workers is None or worker in workers.away:
            return
        log.error("attention worker %s of %s is lost (%s)", worker, replica.replica_id, reason)
        self._listeners.leave_attention_worker(replica.replica_id, worker)
        workers.links[worker].send(Shutdown())
        replica.change_attention_workers(lambda own: own.lose(worker))
        if not self._on_attention_worker_lost(replica, worker):
            self.give_up_attention_worker(replica.replica_id, worker)

    def _lose(self, replica: Replica, reason: str) -> None:
        """Route around a replica that failed, resume its requests elsewhere and stop its other workers."""
        if replica.replica_id in self.lost or self._stopped:
            return
        text = f"replica {replica.replica_id} is lost ({reason})"
        log.error(text)
        stranded = self._admission.lose(replica.replica_id, text, returns=self._on_lost(replica))
        self._listeners.leave(replica.replica_id)
        for link in replica.links.values():
            link.send(Shutdown())
        error = Unavailable(text)
        self._in_flight.lose(replica, error)
        for request in stranded:
            self._end(request, "failed", error)
        self._admit()
