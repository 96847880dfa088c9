"""The operator's terminal: printing lines, and SIGINT and SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable

from cost_model.printable import printable

KILLED = 130
_quiet = False


def be_quiet() -> None:
    """Report nothing from now on."""
    global _quiet
    _quiet = True


def report(line: str) -> None:
    """Print a line on stderr at once, unless quiet, with control characters escaped."""
    if not _quiet:
        print(printable(line), file=sys.stderr, flush=True)


def stop_signals(kill: Callable[[], None]) -> asyncio.Event:
    """An event that the first SIGINT or SIGTERM sets; the second calls `kill` and ends this process."""
    stopping = asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            kill()
            os._exit(KILLED)
        report("stopping; once more to kill")
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stopping
