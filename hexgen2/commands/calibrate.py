"""`hexgen2 calibrate`: coefficients from measured times, of a file or of a running engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cost_model.errors import InputError
from hexgen2.commands.options import PATH, SEED, Command, options, output_option
from hexgen2.terminal import echo_json, note

if TYPE_CHECKING:
    from cost_model.measurements import Row

_RUNNING = ("http://", "https://")
_fit, _engine = options("Fit"), options("Running engine (with a URL)")


@click.command(
    cls=Command,
    short_help="Fit the cost model to measured times.",
    examples=(
        "hexgen2 calibrate measured.csv -o mine.json",
        "hexgen2 calibrate http://127.0.0.1:8000 --gpu A100-80GB --model llama-3-8b -o mine.json",
    ),
)
@click.argument("measured", metavar="CSV|URL")
@_fit("--name", metavar="NAME", help="Name of the coefficients.  [default: the CSV file's name, or the URL]")
@_fit(
    "--seed",
    type=SEED,
    default=0,
    show_default=True,
    metavar="N",
    help="Seed for the choice of held-out rows.",
)
@output_option("coefficients")
@_engine("--gpu", metavar="NAME", help="The GPUs that the engine runs on.")
@_engine("--model", metavar="NAME|DIR", help="Its model: shipped name, or folder with a config.json.")
@_engine(
    "--tp",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Its tensor-parallel degree.",
)
@_engine("--api-key", envvar="HEXGEN2_API_KEY", metavar="KEY", help="Sent as a bearer token.")
@_engine("--rows", type=PATH, metavar="FILE", help="Write the measured steps to this CSV file.")
def calibrate(
    measured: str,
    output: Path | None,
    name: str | None,
    seed: int,
    gpu: str | None,
    model: str | None,
    tp: int,
    api_key: str | None,
    rows: Path | None,
) -> None:
    """Fit the cost model to measured step times.

    CSV is a file with columns gpu, model, tp, phase, batch, input_len_or_context and measured_ms (and engine,
    interconnect and has_attention where they matter). URL is a running engine with OpenAI's API, one replica
    on --tp GPUs; its prefills and decode steps are timed first.

    The fit starts from the coefficients that ship, so that even a few rows of one GPU help. If these have
    seen an engine of the file before, it starts from priors instead, so that its stated errors are honest.
    `hexgen2 estimate --cost-model FILE` uses the result.
    """
    from cost_model.coefficients import PRIORS, fitted
    from cost_model.fields import checked_name
    from cost_model.files import write_text
    from cost_model.held_out import calibrate as fit
    from cost_model.measurements import COLUMNS, measurements, read_rows

    running = measured.startswith(_RUNNING)
    if running:
        lines = _profiled(measured, gpu, model, tp, api_key)
        if rows is not None:
            text = "\n".join(",".join(line.cells[c] for c in line.cells) for line in lines)
            write_text(rows, f"{','.join((*COLUMNS, 'measured_ms'))}\n{text}\n")
    else:
        lines = read_rows(Path(measured), (*COLUMNS, "measured_ms"))[1]
    steps = list(measurements(lines))
    if len(steps) < 2:
        raise InputError(measured, "", f"has {len(steps)} measured steps", "give at least 2")
    seen = sorted({row.step.engine for row in steps} & set(fitted().engines))
    if seen:
        note(f"{', '.join(seen)}: known to the coefficients that ship, so the fit starts from priors")
    source = checked_name(measured if running else Path(measured).name, measured)
    called = checked_name(
        name or (measured if running else Path(measured).stem), measured, "name", "give another --name"
    )
    found = fit(steps, PRIORS if seen else fitted(), called, f"{len(steps)} measured steps of {source}", seed)
    if output is None:
        echo_json(found.to_json())
    else:
        write_text(output, found.to_json())
    held_out = found.held_out
    kinds = {
        "rows": held_out.rows,
        "GPUs": held_out.gpu,
        "models": held_out.model,
        "engines": held_out.engine,
    }
    errors = ", ".join(f"{error:.1%} on {kind}" for kind, error in kinds.items() if error is not None)
    note(f"{len(steps)} steps; mean error where left out of the fit: {errors}")


def _profiled(url: str, gpu: str | None, model: str | None, tp: int, api_key: str | None) -> list[Row]:
    """Time the steps of a running engine; returns them like the rows of a file."""
    from cost_model.measurements import COLUMNS, Row
    from cost_model.models import find_model
    from hexgen2.probing.engine import EngineClient

    for option, value in (("--gpu", gpu), ("--model", model)):
        if value is None:
            raise InputError(option, "", "is missing", "say what the engine at the URL runs")
    assert gpu is not None and model is not None
    client = EngineClient(url, api_key, find_model(model).vocab)
    rows = []
    for line, step in enumerate(client.steps(), 1):
        figures = (gpu, model, str(tp), step.phase, str(step.batch), str(step.tokens))
        cells = dict(zip(COLUMNS, figures, strict=True)) | {"measured_ms": f"{1e3 * step.seconds:.6g}"}
        note(f"{step.phase} of {step.batch} at {step.tokens} tokens: {1e3 * step.seconds:.4g} ms")
        rows.append(Row(url, line, cells))
    return rows
