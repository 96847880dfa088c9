"""`hexgen2 calibrate`: coefficients from measured times, of a file or of a running engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cost_model.errors import InputError
from hexgen2.commands.options import SEED
from hexgen2.terminal import echo, echo_json

if TYPE_CHECKING:
    from cost_model.measurements import Row

_RUNNING = ("http://", "https://")


@click.command()
@click.argument("measured", metavar="CSV|URL")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the coefficients to this file.")
@click.option("--name", help="What the set is called. [default: the CSV file's name, or the URL]")
@click.option("--seed", type=SEED, default=0, show_default=True)
@click.option("--gpu", help="With a URL: the card that its engine runs on.")
@click.option("--model", help="With a URL: the model, a shipped name or a folder with a config.json.")
@click.option("--tp", type=click.IntRange(min=1), default=1, show_default=True, help="With a URL.")
@click.option("--api-key", envvar="HEXGEN2_API_KEY", help="With a URL: sent as a bearer token.")
@click.option("--rows", type=click.Path(path_type=Path), help="With a URL: write what was measured there.")
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

    CSV has columns gpu, model, tp, phase, batch, input_len_or_context and measured_ms (and engine,
    interconnect, has_attention where they matter). URL is an engine with OpenAI's API, one replica on --tp
    cards, whose prefills and decode steps are timed first.

    The fit starts from the coefficients that ship, so that a few rows of one GPU are worth something; but
    from priors where the file has an engine that those have seen, so that its errors stay honest.
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
        echo(f"{', '.join(seen)}: known to the coefficients that ship, so starting from priors", err=True)
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
    echo(f"{len(steps)} steps; mean error where left out of the fit: {errors}", err=True)


def _profiled(url: str, gpu: str | None, model: str | None, tp: int, api_key: str | None) -> list[Row]:
    """Steps of a running engine, as rows of a file would be."""
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
        echo(f"{step.phase} of {step.batch} at {step.tokens} tokens: {1e3 * step.seconds:.4g} ms", err=True)
        rows.append(Row(url, line, cells))
    return rows
