"""In-flight requests on paths through ranges of layers: each token starts a step at the first replica of its
path, and comes back from the last.

The account of KV caches is the router's (runtime/routing/paths/path_router.py), in blocks as workers have
them: a token is sent only once every replica of the path has room for it, so workers never lack a block.
Where there is none, the request that came to that replica last is taken off its path and resumed later, and
the token waits until what this frees has been reported. A request that runs alone always fits, so one of them
always goes on.
"""

from __future__ import annotations

import itertools
import logging
from itertools import pairwise
from typing import Any

from cost_model.errors import HexGen2Error
from runtime.frontend.in_flight import InFlight, ask, log_request
from runtime.frontend.replica import Replica
from runtime.frontend.request import Outcome, Request
from runtime.frontend.request_state import RequestEvent
from runtime.protocol.from_workers import HopTimes, TokenOutput
from runtime.protocol.message import Message
from runtime.routing.paths.path_router import PathRouter
from runtime.routing.paths.range_graph import COORDINATOR, RangePath

log = logging.getLogger(__name__)


class InFlightOnPaths(InFlight):
    """Tracks started requests along their paths.

    Parameters
    ----------
    router : has each request on its account from its start until every replica of its path has released it
    given : the parameters of InFlight
    """

    def __init__(self, router: PathRouter, *given: Any) -> None:
        super().__init__(*given)
        self._router, self._numbers = router, itertools.count()
        self._without_room: dict[str, Request] = {}

    def _begin(self, request: Request, route: RangePath) -> None:
        record, number, timed = self._note_start(request), next(self._numbers), self._router.learns
        record.path = tuple(hop.replica for hop in route)
        record.prefill_replica, record.decode_replica = record.path[0], record.path[-1]
        log_request(request, "takes the path %s", " > ".join(record.path))
        request.on(RequestEvent.PREFILL)
        drivers = [*(self._replicas[name].driver for name in record.path[1:]), ""]
        for place, name in enumerate(record.path):
            replica = self._replicas[name]
            request.hold(replica, request.prompt_tokens)
            try:
                ask(replica, request, request.join_path(place, route, drivers[place], number, timed))
            except Exception:
                for other in record.path[place:]:
                    self._router.release(request.request_id, other)
                raise

    def end(
        self, request: Request, outcome: Outcome, error: HexGen2Error | None, by_itself: bool = False
    ) -> None:
        """As in InFlight, but only the last replica of a path can tell when a request has ended by itself."""
        super().end(request, outcome, error)

    def lose(self, replica: Replica, error: HexGen2Error) -> None:
        for request_id in list(replica.held):
            self._router.release(request_id, replica.replica_id)
        super().lose(replica, error)
        self._go_on_with_room()

    # tokens

    def _go_on(self, request: Request, output: TokenOutput, is_first: bool) -> None:
        for replica in request.holders.values():
            replica.grow(request.request_id)
        full = self._router.grow(request.request_id)
        if full is None:
            self._send_token(request)
        else:
            self._make_room(request, full)

    def _send_token(self, request: Request) -> None:
        self._replicas[request.record.path[0]].send(request.next_token())

    def _make_room(self, request: Request, full: str) -> None:
        """Take the request that came last off a replica that has no room for the next token of another."""
        self._without_room[request.request_id] = request
        latest = self.requests.get(str(self._router.latest_on(full)))
        if latest is None or latest.has_ended:
            return  # It is being released already.
        self._replicas[full].preemptions += 1
        log_request(latest, "gives way: replica %s has no room for all", full)
        self._put_back(latest)
        self._admit()

    def _go_on_with_room(self) -> None:
        """Send the tokens that waited for room and have it now."""
        for request_id, request in list(self._without_room.items()):
            del self._without_room[request_id]
            if request.has_ended or request_id not in self.requests:
                continue
            full = self._router.overfull(request_id)
            if full is None:
                self._send_token(request)
            else:
                self._make_room(request, full)

    # messages from the workers

    def _take(self, replica: Replica, message: Message | TokenOutput) -> None:
        if not isinstance(message, HopTimes):
            super()._take(replica, message)
        elif request := self.requests.get(message.request_id):
            hops = pairwise((COORDINATOR, *request.record.path))
            for (before, name), seconds in zip(hops, message.seconds, strict=False):
                self._router.answered(before, name, seconds)

    def _on_released(self, replica: Replica, request_id: str) -> None:
        self._router.release(request_id, replica.replica_id)
        super()._on_released(replica, request_id)
        self._go_on_with_room()

    def _misses(self, request: Request, replica_id: str) -> bool:
        return True
