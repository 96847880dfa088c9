"""Prints lines to the terminal safely.

Everything that commands print passes through here or through `make_console` of hexgen2/report, so that
control characters in a name or a path cannot affect the terminal.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import click

from cost_model.printable import one_line, printable, printable_json

BEGAN_S = time.monotonic()
"""When the command began, up to the start of Python."""
NOTHING_LEFT = "nothing left"
"""What a command returns that has printed all, and has nothing to close."""
QUIET = f"{__name__}.quiet"
"""Where a click context notes that --quiet was given."""


def leave() -> None:
    """End the process now. To free what a search remembers, object by object, takes Python up to a second."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # Nobody reads any more.
            os._exit(1)
    os._exit(0)


def silence_libraries() -> None:
    """From now on, what solvers print by themselves, past Python, does not reach stdout, where it would be in
    the midst of JSON. What Python prints does."""
    try:
        at = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # A test, or a notebook.
        return
    if at != 1:
        return
    sys.stdout.flush()
    ours = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    sys.stdout = os.fdopen(ours, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)


def quiet() -> bool:
    """Whether the command that runs was given --quiet."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(QUIET))


def note(text: Any) -> None:
    """Print a line of progress to stderr, unless --quiet was given."""
    if not quiet():
        echo(text, err=True)


def echo(text: Any, *, err: bool = False, nl: bool = True) -> None:
    """Print text with control characters escaped."""
    click.echo(printable(str(text)), err=err, nl=nl)


def echo_json(text: str) -> None:
    """Print JSON; control characters become JSON escapes, which leaves its meaning unchanged."""
    click.echo(printable_json(text.removesuffix("\n")))


def fail(text: str) -> None:
    """Print a one-line error message to stderr."""
    click.echo(f"hexgen2: {one_line(text)}", err=True)
