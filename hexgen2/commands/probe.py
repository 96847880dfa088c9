"""`hexgen2 probe`: a cluster file of this machine, from measurements."""

from __future__ import annotations

import datetime
import socket
from pathlib import Path

import click

from cost_model.errors import InputError
from hexgen2.commands.options import Command, options, output_option
from hexgen2.terminal import echo

_what = options("What to measure")


@click.command(
    cls=Command,
    short_help="Measure this machine and write a cluster file.",
    examples=("hexgen2 probe -o cluster.yaml", "hexgen2 probe --kind cpu --devices 4"),
)
@_what(
    "--kind", type=click.Choice(["cuda", "cpu"]), help="Kind of devices.  [default: cuda if there are any]"
)
@_what(
    "--devices",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Number of devices.  [default: all GPUs, or one CPU device per core]",
)
@output_option("cluster")
def probe(kind: str | None, devices: int | None, output: Path | None) -> None:
    """Measure this machine's devices and the links between them, and write a cluster file.

    Times matrix products, memory reads, transfers between pairs and all-reduces, with one process per device:
    NCCL between GPUs, gloo between CPU devices of one core each. `hexgen2 search --cluster FILE` reads the
    result.
    """
    from cost_model.files import write_text

    try:
        from hexgen2.probing.machine import probe_machine
        from hexgen2.probing.spec import cluster_yaml

        findings = probe_machine(kind, devices)
    except ModuleNotFoundError as error:
        raise InputError(
            "hexgen2 probe", "", f"needs {error.name}", "pip install 'hexgen2[runtime]'"
        ) from error
    text = cluster_yaml(findings, socket.gethostname(), datetime.date.today().isoformat())
    if output is None:
        echo(text, nl=False)
    else:
        write_text(output, text)
