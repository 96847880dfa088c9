"""`hexgen2 probe`: a cluster file of this machine, from measurements."""

from __future__ import annotations

import datetime
import socket
from pathlib import Path

import click

from cost_model.errors import InputError
from hexgen2.terminal import echo


@click.command()
@click.option("--kind", type=click.Choice(["cuda", "cpu"]), help="[default: cuda if there are such devices]")
@click.option("--devices", type=click.IntRange(1, 64), help="[default: all GPUs, or a CPU device per core]")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the cluster to this file.")
def probe(kind: str | None, devices: int | None, output: Path | None) -> None:
    """Measure this machine's devices and the links between them, and write a cluster file of it.

    Matrix products, memory reads, pairs and all-reduces, with one process for each device: NCCL between GPUs,
    gloo between CPU devices of one core each. `hexgen2 search --cluster FILE` reads the result.
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
