"""Which transports there are, by name, and which of them a worker tries."""

from __future__ import annotations

from cost_model.errors import InputError
from runtime.engine.cache import PagedCache
from runtime.engine.kv.base import Transport
from runtime.engine.kv.pool import SharedPool
from runtime.engine.kv.shm import SharedMemory
from runtime.engine.kv.tcp import Tcp

AUTO = "auto"
_TRANSPORTS: dict[str, type[Transport]] = {kind.name: kind for kind in (SharedMemory, Tcp)}
_BEST_FIRST = ("shm", "tcp")


def transport_names() -> list[str]:
    """All names, sorted; "auto" aside."""
    return sorted(_TRANSPORTS)


def offered(name: str) -> tuple[str, ...]:
    """The transports to offer for a name, best first.

    Raises
    ------
    InputError : unknown
    """
    if name == AUTO:
        return _BEST_FIRST
    if name not in _TRANSPORTS:
        names = ", ".join([AUTO, *transport_names()])
        raise InputError("KV transfer", "transport", f"{name} is unknown", f"use one of {names}")
    return (name,)


def make_transport(
    name: str, cache: PagedCache, deadline_s: float, shared: SharedPool | None
) -> Transport | None:
    """A worker's end of a transport; None for a name that a newer peer may know."""
    kind = _TRANSPORTS.get(name)
    return kind(cache, deadline_s, shared) if kind else None
