"""Lines for the terminal. All that commands print passes here or through `make_console` of hexgen2/report,
so that nothing that a name or a path holds can steer the terminal."""

from __future__ import annotations

from typing import Any

import click

from cost_model.printable import one_line, printable, printable_json


def echo(text: Any, *, err: bool = False, nl: bool = True) -> None:
    """Print text, control characters as escapes."""
    click.echo(printable(str(text)), err=err, nl=nl)


def echo_json(text: str) -> None:
    """Print JSON as it is: control characters become JSON's own escapes, which mean the same."""
    click.echo(printable_json(text.removesuffix("\n")))


def fail(text: str) -> None:
    """The one line on stderr that says what is wrong."""
    click.echo(f"hexgen2: {one_line(text)}", err=True)
