"""Which transports there are, by name, and which of them a worker tries. Each is loaded when it is needed."""

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
    "gloo": (f"{_OWN}.group", "Gloo"),
    "nccl": (f"{_OWN}.group", "Nccl"),
    "nixl": (f"{_OWN}.nixl", "Nixl"),
    EMULATED: ("runtime.engine.emulated.wire", "ScaledTcp"),
}
_BEST_FIRST = ("shm", "cuda_ipc", "tcp")


def transport_names() -> list[str]:
    """All names of real ones, sorted; "auto" aside."""
    return sorted(_CLASSES.keys() - {EMULATED})


def offered(name: str) -> tuple[str, ...]:
    """The transports to offer for a name, best first.

    Raises
    ------
    InputError : unknown
    """
    if name == AUTO:
        return _BEST_FIRST
    if name not in _CLASSES:
        names = ", ".join([AUTO, *transport_names()])
        raise InputError("KV transfer", "transport", f"{name} is unknown", f"use one of {names}")
    return (name,)


def make_transport(name: str, cache: Pages, deadline_s: float, shared: SharedPool | None) -> Transport | None:
    """A worker's end of a transport; None for a name that a newer peer may know."""
    if name not in _CLASSES:
        return None
    module, kind = _CLASSES[name]
    made: Transport = getattr(importlib.import_module(module), kind)(cache, deadline_s, shared)
    return made
