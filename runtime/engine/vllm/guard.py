"""Runs a command that ends with its parent: `python -m runtime.engine.vllm.guard COMMAND...`.

vLLM is several processes, and none of them ends when the one that started it is killed. This one holds the
pipe from it as stdin, and kills them all at its end; the exit code is the command's. It imports nothing but
the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

GRACE_S = 5.0


def main(command: list[str]) -> int:
    """Run the command in a process group of its own until it or this process's parent ends."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_follow_the_parent, args=(process,), daemon=True).start()
    code = process.wait()
    _kill(process.pid, signal.SIGKILL)
    return code


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
