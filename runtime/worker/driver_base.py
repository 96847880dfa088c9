"""What the drivers of replicas have in common: an inbox, the replica's other workers, and what the front end
hears."""

from __future__ import annotations

import logging
import queue
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.engine.faults import describe, of_replica
from runtime.kv_cache.blocks import BlockPool
from runtime.logs import about
from runtime.protocol.between_workers import ExpectKv, NewRole, Release, Step
from runtime.protocol.framing import Connection
from runtime.protocol.from_workers import Released, RequestFailed
from runtime.protocol.message import Message
from runtime.protocol.to_workers import Configure
from runtime.worker.executor import Executor
from runtime.worker.scheduled_request import Reservation

if TYPE_CHECKING:
    from runtime.worker.ranges.activations import Piece

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StageFree:
    """This worker's own executor has run its stage of a step, and can take the next one."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Activations have come from the hop before."""

    pieces: tuple[Piece, ...]


Item = Message | Reservation | StageFree | Arrived
Inbox = queue.SimpleQueue[Item]


class DriverBase(ABC):
    """Takes the requests of one replica, in the first worker of its first stage.

    Attributes
    ----------
    pool : the blocks of the cache
    """

    def __init__(
        self,
        executor: Executor,
        front_end: Connection,
        others: dict[str, Connection],
        inbox: Inbox,
        pool: BlockPool,
    ) -> None:
        self._executor, self._front_end, self._others, self._inbox = executor, front_end, others, inbox
        self._replica, self.pool = executor.config.replica, pool
        self._client_request_ids: dict[str, str] = {}

    @property
    def preemptions(self) -> int:
        """Requests that were preempted since the start."""
        return 0

    @abstractmethod
    def run(self) -> Configure:
        """Run steps until the replica is to take another role, whose configuration is returned."""

    @abstractmethod
    def _dispatch(self, message: Item) -> None:
        """Do what a message says."""

    @abstractmethod
    def _cancel(self, request_id: str) -> None:
        """Forget a request, on all executors first: nothing may be written to blocks that others get."""

    @abstractmethod
    def _has(self, request_id: str) -> bool:
        """Whether the request is here."""

    def _handle(self, message: Item) -> None:
        """Handle a message; if that raises, only the request that the message is about fails."""
        try:
            self._dispatch(message)
        except Exception as error:
            request_id = getattr(message, "request_id", "")
            if not request_id or of_replica(error):
                raise
            log.exception("handling %s failed", type(message).__name__, extra=about(attempt=request_id))
            self._fail(request_id, describe(error), fault=False)

    def _refusal(self, prompt: tuple[int, ...], total: int, here: int) -> str:
        """Why a prompt can never run on this replica, or "".

        Parameters
        ----------
        total, here : tokens of the request at most, and those that this replica holds
        """
        spec = self._executor.spec
        if not prompt or not all(0 <= token < spec.vocab for token in prompt):
            return f"the prompt is empty or has tokens outside [0, {spec.vocab})"
        return self._excess(total, here)

    def _excess(self, total: int, here: int | None = None) -> str:
        """Which limit a request exceeds, or "" (see _refusal; here None: all)."""
        limit = self._executor.spec.position_limit
        if limit is not None and total > limit:
            return f"{total} tokens are over the model's limit of {limit}"
        if not self.pool.can_fit(total if here is None else here):
            return f"{total} tokens are over the replica's {self.pool.blocks} blocks of KV cache"
        return ""

    def _fail(self, request_id: str, text: str, fault: bool) -> None:
        """Fail a request; Released follows, at once if the replica holds nothing of it."""
        client_request_id = self._client_request_ids.get(request_id, "")
        log.warning("a request failed: %s", text, extra=about(client_request_id, request_id))
        self._say_failed(request_id, text, fault)
        if self._has(request_id):
            self._cancel(request_id)
        else:
            self._released([request_id])

    def _say_failed(self, request_id: str, text: str, fault: bool) -> None:
        failure = RequestFailed(request_id=request_id, replica=self._replica, text=text, fault=fault)
        self._front_end.send(failure)

    def _released(self, request_ids: Iterable[str]) -> None:
        """Report requests of which the replica holds nothing any more."""
        for request_id in request_ids:
            client_request_id = self._client_request_ids.pop(request_id, "")
            log.info("freed a request's memory", extra=about(client_request_id, request_id))
            self._say_released(request_id)

    def _say_released(self, request_id: str) -> None:
        released = Released(
            request_id=request_id,
            replica=self._replica,
            free_blocks=self.pool.free,
            preemptions=self.preemptions,
        )
        self._front_end.send(released)

    def _broadcast(self, message: ExpectKv | Step | Release | NewRole) -> None:
        for other in self._others.values():
            other.send(message)
