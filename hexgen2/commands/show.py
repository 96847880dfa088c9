"""`hexgen2 show` and `hexgen2 list`: a placement, or what ships, as tables."""

from __future__ import annotations

from pathlib import Path

import click

import hexgen2
from hexgen2.commands.options import PATH, Command
from hexgen2.terminal import echo


@click.command(
    cls=Command, examples=("hexgen2 show placement.json", "hexgen2 show placement.json | grep bottleneck")
)
@click.argument("placement", type=PATH)
def show(placement: Path) -> None:
    """Check a placement and print it as tables."""
    from hexgen2.report.placement import make_console, print_placement

    print_placement(hexgen2.load_placement(placement), make_console())


@click.command("list", cls=Command, examples=("hexgen2 list clusters", "hexgen2 list models"))
@click.argument("what", type=click.Choice(["clusters", "gpus", "models", "workloads", "strategies"]))
def list_(what: str) -> None:
    """List what ships by name."""
    from hexgen2 import listing

    for name, description in getattr(listing, what)():
        echo(f"{name:28} {description}")
