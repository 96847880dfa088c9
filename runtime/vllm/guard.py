"""Runs a command that ends with its parent: `python -m runtime.vllm.guard COMMAND...`.

vLLM consists of several processes, none of which ends when the process that started it is killed. The guard's
stdin is a pipe from that parent: when the pipe closes, the guard kills the command and all its processes. Its
exit code is the command's. If the guard itself is killed, the parent calls `kill_rest`; it started the guard
with `start_new_session`, so that all these processes are in one session. Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

GRACE_S = 5.0


def main(command: list[str]) -> int:
    """Run the command in its own process group until the command or this process's parent ends."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_follow_the_parent, args=(process,), daemon=True).start()
    code = process.wait()
    _kill(process.pid, signal.SIGKILL)
    return code


def kill_rest(session: int, limit_s: float = GRACE_S) -> None:
    """Kill every process of a session, if any, and wait at most `limit_s` until none is left."""
    deadline = time.monotonic() + limit_s
    while (rest := _of_session(session)) and time.monotonic() < deadline:
        for pid in rest:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _of_session(session: int) -> list[int]:
    """The process ids of a session, without zombies."""
    found = []
    for each in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, own, *_ = each.read_text().rpartition(")")[2].split()
            if int(own) == session and state not in ("Z", "X"):
                found.append(int(each.parent.name))
    return found


def _follow_the_parent(process: subprocess.Popen[bytes]) -> None:
    while sys.stdin.buffer.read(1):
        pass
    _kill(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    _kill(process.pid, signal.SIGKILL)


def _kill(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
