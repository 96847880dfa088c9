"""What a worker process is to the system: its name in `ps` and `top`, and that it ends with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
from multiprocessing import forkserver

_SET_DEATH_SIGNAL, _SET_NAME, _NAME_BYTES = 1, 15, 15  # of prctl(2)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends: the fork server, which ends with the front end.

    A closed socket does not end a process that is stopped: it would stay forever, and so would the fork
    server, which waits for all processes that hold its descriptor. There is no public call to close that; the
    private names used here were tried on Python 3.11.
    """
    server = getattr(forkserver, "_forkserver", None)
    descriptor = getattr(server, "_forkserver_alive_fd", None)
    if descriptor is not None:
        os.close(descriptor)
        server._forkserver_alive_fd = None  # type: ignore[union-attr]
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def show_as(name: str) -> None:
    """The name of this process, of which Linux shows 15 bytes: the last ones, where the number is."""
    ctypes.CDLL(None).prctl(_SET_NAME, name.encode()[-_NAME_BYTES:], 0, 0, 0)
