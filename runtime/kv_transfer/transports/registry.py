"""The transports by name, and which of them a sender offers. Each is imported when it is needed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from cost_model.errors import InputError
from runtime.kv_cache.pages import Pages
from runtime.kv_transfer.transports.base import Transport

if TYPE_CHECKING:
    from runtime.kv_transfer.memory import SharedPool

AUTO, EMULATED = "auto", "emulated"
_OWN = "runtime.kv_transfer.transports"
_CLASSES = {
    "shm": (f"{_OWN}.shm", "SharedMemory"),
    "cuda_ipc": (f"{_OWN}.cuda_ipc", "CudaIpc"),
    "tcp": (f"{_OWN}.tcp", "Tcp"),
    "nixl": (f"{_OWN}.nixl", "Nixl"),
    EMULATED: ("runtime.engine.emulated.wire", "ScaledTcp"),
}
_BEST_FIRST = ("shm", "cuda_ipc", "tcp")


def transport_names() -> list[str]:
    """The names of all real transports, sorted."""
    return sorted(_CLASSES.keys() - {EMULATED})


def offered(name: str) -> tuple[str, ...]:
    """The transports that a sender offers for a name or "auto", best first.

    Raises
    ------
    InputError : no transport has that name
    """
    if name == AUTO:
        return _BEST_FIRST
    if name not in _CLASSES:
        names = ", ".join([AUTO, *transport_names()])
        raise InputError("KV transfer", "transport", f"{name} is unknown", f"use one of {names}")
    return (name,)


def make_transport(name: str, cache: Pages, deadline_s: float, shared: SharedPool | None) -> Transport | None:
    """A worker's end of a transport; None for a name that only a newer peer knows."""
    if name not in _CLASSES:
        return None
    module, kind = _CLASSES[name]
    made: Transport = getattr(importlib.import_module(module), kind)(cache, deadline_s, shared)
    return made
