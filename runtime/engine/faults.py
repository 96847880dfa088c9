"""Faults of single requests, isolated from the other requests of their replica."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from runtime.logs import about

log = logging.getLogger(__name__)

_OF_DEVICES = frozenset({"AcceleratorError", "OutOfMemoryError", "DistBackendError"})
"""Exceptions of torch, by name, because this module is also used where torch is not imported."""


class Faults:
    """The faults of requests whose replica carries on without them, by request."""

    def __init__(self) -> None:
        self._why: dict[str, str] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._why

    @contextmanager
    def kept(self, request_id: str) -> Iterator[None]:
        """Note what the block raises as the request's fault, unless it is the replica's (`of_replica`)."""
        try:
            yield
        except Exception as error:
            if of_replica(error):
                raise
            self.note(request_id, error)

    def note(self, request_id: str, error: Exception) -> None:
        """Note that a request has failed."""
        log.error("a request failed", exc_info=error, extra=about(attempt=request_id))
        self._why[request_id] = describe(error)

    def take(self, request_ids: Iterable[str]) -> tuple[tuple[str, str], ...]:
        """Which of these requests have failed, each with the reason."""
        return tuple((each, self._why[each]) for each in request_ids if each in self._why)

    def forget(self, request_id: str) -> None:
        """Drop a request that has ended."""
        self._why.pop(request_id, None)


def of_replica(error: Exception) -> bool:
    """Whether an exception concerns the process, its memory, device or connections, not a request."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, OSError | MemoryError) or bool(kinds & _OF_DEVICES)


def describe(error: Exception) -> str:
    """An exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
