"""Anonymous memory of a process that others on the host can map, if they are told its handle."""

from __future__ import annotations

import os
import secrets

_NAME = "hexgen2-"


def create_memory(kind: str, size_bytes: int) -> tuple[int, str]:
    """Memory that is all zeros, and takes pages as they are written.

    Returns
    -------
    its file descriptor, and what another process passes to `open_memory`
    """
    name = f"{_NAME}{kind}-{secrets.token_hex(8)}"
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size_bytes)
    return descriptor, f"{os.getpid()}:{descriptor}:{name}"


def open_memory(handle: str, size_bytes: int, writable: bool = False) -> int:
    """Open another process's memory, or this one's once more; returns its file descriptor.

    Raises
    ------
    OSError : the memory does not exist (any more) or has another size
    ValueError : the handle is malformed
    """
    process, descriptor, name = handle.split(":")
    path = f"/proc/{int(process)}/fd/{int(descriptor)}"
    opened = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        if f"memfd:{name} " not in os.readlink(f"/proc/self/fd/{opened}") + " ":
            raise OSError(f"{path} is not the memory {name}")
        if os.fstat(opened).st_size != size_bytes:
            raise OSError(f"{path} has {os.fstat(opened).st_size} bytes, not {size_bytes}")
    except OSError:
        os.close(opened)
        raise
    return opened
