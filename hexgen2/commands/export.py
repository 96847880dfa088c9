"""`hexgen2 export`: a placement as files for Kubernetes, plain vLLM or Ray."""

from __future__ import annotations

from pathlib import Path

import click

from hexgen2.commands.options import PATH, Command, check_folder, options
from hexgen2.terminal import echo

FORMATS = ("vllm", "kubernetes", "ray")
_what, _output, _kubernetes = options("What to export"), options("Output"), options("Kubernetes")


@click.command(
    cls=Command,
    short_help="Write files for Kubernetes, vLLM or Ray.",
    examples=(
        "hexgen2 export placement.json --format vllm -o scripts",
        "hexgen2 export placement.json --format kubernetes --image registry.example.org/hexgen2:1 --force",
    ),
)
@click.argument("placement", type=PATH)
@_what("--format", "name", type=click.Choice(FORMATS), required=True, help="System that runs the files.")
@_what("--model-path", metavar="DIR", help="Checkpoint on the machines.  [default: the model's name]")
@_output("-o", "--output", type=PATH, metavar="DIR", help="Folder to write.  [default: the format's name]")
@_output("--force", is_flag=True, help="Replace a folder that is not empty.")
@_kubernetes("--image", metavar="NAME", help="Container image that has hexgen2 in it.")
@_kubernetes("--accelerator-label", metavar="NAME", help="Node label that names a node's GPUs.")
def export(
    placement: Path,
    name: str,
    output: Path | None,
    force: bool,
    model_path: str | None,
    image: str | None,
    accelerator_label: str | None,
) -> None:
    """Write a placement as files for Kubernetes, plain vLLM or Ray."""
    import hexgen2
    from cost_model.errors import InputError
    from hexgen2.export.folder import write_folder
    from hexgen2.layer_ranges import whole_models_only

    folder = output or Path(name)
    check_folder(folder)
    for option, value in (("--image", image), ("--accelerator-label", accelerator_label)):
        if value is not None and name != "kubernetes":
            raise InputError(option, value, f"is not for --format {name}", "leave it out")
    loaded, source = hexgen2.load_placement(placement), str(placement)
    whole_models_only(loaded, source, "an export")
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
