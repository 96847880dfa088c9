"""Decides which waiting request starts next, whatever it starts on: the queue, and the states of replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, Generic, Protocol, TypeVar

from runtime.routing.fair_queue import Queue
from runtime.routing.pressure import Pressure
from runtime.routing.refusals import TooLong, Unavailable
from runtime.routing.replica_state import ReplicaEvent, ReplicaStates
from runtime.routing.router import Routable


class Waiting(Routable, Protocol):
    """A waiting request, with the KV cache tokens that it needs."""

    @property
    def capacity_tokens(self) -> int: ...


Request = TypeVar("Request", bound=Waiting)


class AdmissionBase(ABC, Generic[Request]):
    """Starts the first request in the queue as soon as there is KV cache for it.

    Parameters
    ----------
    queue : decides which request is first, and how many may wait

    Attributes
    ----------
    states : of the replicas
    pressure : whether requests have to wait
    """

    def __init__(self, queue: Queue[Request]) -> None:
        self.states, self.pressure, self._queue = ReplicaStates(), Pressure(), queue

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def waiting(self) -> Sequence[Request]:
        """The queue, in the order in which requests will start."""
        return tuple(self._queue)

    # -- what subclasses say

    @property
    @abstractmethod
    def context_tokens(self) -> int:
        """Prompt and output tokens of the longest request that can be served; 0 if none can be."""

    @property
    @abstractmethod
    def weighs(self) -> bool:
        """Whether it counts the work of requests in the backlogs of replicas."""

    @abstractmethod
    def learn(self, prompt_tokens: int, output_limit: int | None, output_tokens: int) -> None:
        """A request has ended by itself."""

    @abstractmethod
    def next(self) -> tuple[Request, Any] | None:
        """Take out the first request, with what it starts on; None while it must wait."""

    @abstractmethod
    def can_ever_start(self, request: Request) -> bool:
        """Whether a request could start if nothing else were served, now or once starting replicas serve."""

    @abstractmethod
    def _can_serve(self) -> bool:
        """Whether any request could start, now or once starting replicas serve."""

    @abstractmethod
    def _follow_states(self) -> None:
        """Use the replicas that serve."""

    # -- the queue

    def check_serving(self) -> None:
        """Raise Unavailable if nothing can be served, and starting replicas will not change that."""
        if not self._can_serve():
            raise Unavailable("no replica is left to serve: " + "; ".join(self.states.lost.values()))

    def enqueue(self, request: Request) -> Request | None:
        """Put a new request into the queue.

        Returns
        -------
        the request that must be withdrawn to make room for it, if any

        Raises
        ------
        Overloaded, Unavailable, TooLong
        """
        self.check_serving()
        if not self.can_ever_start(request):
            raise TooLong(f"{request.capacity_tokens} tokens exceed the KV cache of every replica")
        self.pressure.arrived(len(self._queue) > 0)
        crowded_out = self._queue.make_way(request)
        self._queue.append(request)
        return crowded_out

    def put_back(self, request: Request) -> None:
        """Put a request that could not start, or must start again, at the head of the queue."""
        self._queue.appendleft(request)

    def withdraw(self, request: Request) -> None:
        """Take a request out of the queue."""
        self._queue.remove(request)

    # -- replicas

    def lose(self, replica_id: str, reason: str, returns: bool = False) -> list[Request]:
        """Start no requests on a replica that failed.

        Parameters
        ----------
        returns : it is being restarted, so requests may wait for it

        Returns
        -------
        the requests in the queue that can no longer start
        """
        event = ReplicaEvent.FAIL if returns else ReplicaEvent.FAIL_FOR_GOOD
        self.states.on(event, replica_id, reason)
        self._follow_states()
        return self._stranded()

    def give_up(self, replica_id: str) -> list[Request]:
        """Stop expecting a lost replica back; returns the requests in the queue that can no longer start."""
        self.states.on(ReplicaEvent.GIVE_UP, replica_id)
        self._follow_states()
        return self._stranded()

    def restore(self, replica_id: str) -> None:
        """Use a replica that has started or restarted."""
        self.states.on(ReplicaEvent.SERVE, replica_id)
        self._follow_states()

    def retire(self, replica_ids: Collection[str]) -> list[Request]:
        """Start no more requests on some replicas; returns queued requests that can no longer start."""
        for replica_id in replica_ids:
            self.states.on(ReplicaEvent.RETIRE, replica_id)
        self._follow_states()
        return self._stranded()

    def stranded(self) -> list[Request]:
        """The requests in the queue that can no longer start, because a replica holds less than before."""
        return self._stranded()

    def _stranded(self) -> list[Request]:
        return [request for request in self._queue if not self.can_ever_start(request)]
