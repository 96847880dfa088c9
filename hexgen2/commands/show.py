"""`hexgen2 show` and `hexgen2 list`: a placement, or what ships, as tables."""

from __future__ import annotations

import json
from pathlib import Path

import click

import hexgen2
from hexgen2.commands.options import PATH, Command, check_folder, options
from hexgen2.terminal import echo, echo_json

_output = options("Output")


@click.command(
    cls=Command,
    short_help="Check a placement; print it or draw it.",
    examples=("hexgen2 show placement.json", "hexgen2 show placement.json --svg placement.svg"),
)
@click.argument("placement", type=PATH)
@_output("--svg", type=PATH, metavar="FILE", help="Draw the placement: replicas, GPUs, KV routes.")
@_output("--html", type=PATH, metavar="FILE", help="Write a page with the picture and the tables.")
def show(placement: Path, svg: Path | None, html: Path | None) -> None:
    """Check a placement, and print it as tables, or write it as a picture or a page."""
    from cost_model.files import write_text
    from hexgen2.report import picture
    from hexgen2.report.placement import make_console, print_placement

    for path in (svg, html):
        check_folder(path)
    loaded = hexgen2.load_placement(placement)
    if svg is not None:
        write_text(svg, picture.svg(loaded))
    if html is not None:
        write_text(html, picture.html(loaded))
    if svg is None and html is None:
        print_placement(loaded, make_console())


@click.command(
    "list",
    cls=Command,
    short_help="List shipped clusters, GPUs, models and more.",
    examples=("hexgen2 list clusters", "hexgen2 list gpus --json"),
)
@click.argument("what", type=click.Choice(["clusters", "gpus", "models", "workloads", "strategies"]))
@_output("--json", "as_json", is_flag=True, help="Print a JSON array; of GPUs, with all figures and sources.")
def list_(what: str, as_json: bool) -> None:
    """List the shipped clusters, GPUs, models, workloads or strategies."""
    from hexgen2 import listing

    if as_json:
        echo_json(json.dumps(listing.records(what), indent=1))
        return
    for name, description in getattr(listing, what)():
        echo(f"{name:28} {description}")
