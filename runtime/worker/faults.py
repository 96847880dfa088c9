"""Faults of single requests, kept from the others of their replica."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from runtime.logs import about

log = logging.getLogger(__name__)

_OF_DEVICES = frozenset({"AcceleratorError", "OutOfMemoryError", "DistBackendError"})
"""torch's, by name: this module is read by engines without it."""


class Faults:
    """What went wrong with requests whose replica goes on without them, by request."""

    def __init__(self) -> None:
        self._why: dict[str, str] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._why

    @contextmanager
    def kept(self, request_id: str) -> Iterator[None]:
        """Do something for one request; what it raises is noted, unless it is the replica's own fault."""
        try:
            yield
        except Exception as error:
            if of_replica(error):
                raise
            self.note(request_id, error)

    def note(self, request_id: str, error: Exception) -> None:
        """A request has failed."""
        log.error("a request failed by itself", exc_info=error, extra=about(attempt=request_id))
        self._why[request_id] = describe(error)

    def take(self, request_ids: Iterable[str]) -> tuple[tuple[str, str], ...]:
        """Those of some requests that have failed, each with the reason."""
        return tuple((each, self._why[each]) for each in request_ids if each in self._why)

    def forget(self, request_id: str) -> None:
        """The request is gone."""
        self._why.pop(request_id, None)


def of_replica(error: Exception) -> bool:
    """Whether an exception is about the process, its memory, its device or its streams, and no request's."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, OSError | MemoryError) or bool(kinds & _OF_DEVICES)


def describe(error: Exception) -> str:
    """An exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
