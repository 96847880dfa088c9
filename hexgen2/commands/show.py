"""`hexgen2 show` and `hexgen2 list`: what is there, as tables."""

from __future__ import annotations

from pathlib import Path

import click

from hexgen2.terminal import echo


@click.command()
@click.argument("placement", type=click.Path(path_type=Path))
def show(placement: Path) -> None:
    """Print a placement as tables, after checking it."""
    from hexgen2.checks import verify
    from hexgen2.placement import Placement
    from hexgen2.report.placement import make_console, print_placement

    loaded = Placement.load(placement)
    verify(loaded, str(placement))
    print_placement(loaded, make_console())


@click.command("list")
@click.argument("what", type=click.Choice(["clusters", "gpus", "models", "workloads", "strategies"]))
def list_(what: str) -> None:
    """List what ships by name."""
    from hexgen2 import listing

    for name, description in getattr(listing, what)():
        echo(f"{name:28} {description}")
