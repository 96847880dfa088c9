"""`hexgen2 export`: a placement as files for Kubernetes, plain vLLM or Ray."""

from __future__ import annotations

from pathlib import Path

import click

from hexgen2.terminal import echo

FORMATS = ("vllm", "kubernetes", "ray")


@click.command()
@click.argument("placement", type=click.Path(path_type=Path))
@click.option("--format", "name", type=click.Choice(FORMATS), required=True)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="The folder; default: the format's name."
)
@click.option("--force", is_flag=True, help="Take the place of a folder that is not empty.")
@click.option("--model-path", help="The checkpoint on the machines; default: the model's name.")
@click.option("--image", help="kubernetes: the container image with hexgen2 in it.")
@click.option("--accelerator-label", help="kubernetes: the label that says what GPUs a node has.")
def export(
    placement: Path,
    name: str,
    output: Path | None,
    force: bool,
    model_path: str | None,
    image: str | None,
    accelerator_label: str | None,
) -> None:
    """Write a placement as files that other systems run."""
    from cost_model.errors import InputError
    from hexgen2.checks import verify
    from hexgen2.commands.options import check_folder
    from hexgen2.export.folder import write_folder
    from hexgen2.placement import Placement

    folder = output or Path(name)
    check_folder(folder)
    for option, value in (("--image", image), ("--accelerator-label", accelerator_label)):
        if value is not None and name != "kubernetes":
            raise InputError(option, value, f"is not for --format {name}", "leave it out")
    loaded = Placement.load(placement)
    source = str(placement)
    verify(loaded, source)
    if name == "vllm":
        from hexgen2.export.vllm import vllm_files

        files = vllm_files(loaded, model_path or loaded.model.name, source)
    elif name == "ray":
        from hexgen2.export.ray import ray_files

        files = ray_files(loaded, model_path, source)
    else:
        from hexgen2.export.kubernetes import kubernetes_files

        files = kubernetes_files(loaded, model_path, source, image, accelerator_label)
    write_folder(folder, files, force)
    for file in files:
        echo(folder / file)
