"""Run `hexgen2` commands in this process, which is quick, or installed, in a separate process."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

from hexgen2.cli import run

HEXGEN2 = str(Path(sys.executable).with_name("hexgen2"))
"""The installed command line."""


def hexgen2(*arguments: object) -> CompletedProcess[str]:
    """Run `hexgen2 ARGUMENTS` in this process, with the error handling that users get. A numpy warning fails
    the test, because users would see it."""
    words = ["hexgen2", *map(str, arguments)]
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True)
    code = 0
    with warnings.catch_warnings(), redirect_stdout(out), redirect_stderr(err), _as_it_was():
        warnings.simplefilter("error", RuntimeWarning)
        with mock.patch.object(sys, "argv", words):
            try:
                run()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return CompletedProcess(words, code, *(stream.buffer.getvalue().decode() for stream in (out, err)))


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Restore what a command changes in this process: environment variables and logging."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with mock.patch.dict(os.environ):
        try:
            yield
        finally:
            root.handlers[:], root.level = handlers, level


def installed(*arguments: object) -> CompletedProcess[str]:
    """Run the installed script in a separate process, as a user does."""
    command = [HEXGEN2, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def refused(done: CompletedProcess[str], code: int = 2) -> str:
    """The one-line error of a command that printed nothing on stdout and no traceback."""
    assert done.returncode == code and done.stdout == "", done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("hexgen2: ")
    return line
