"""`hexgen2 calibrate`: coefficients from measured times."""

from __future__ import annotations

from pathlib import Path

import click

from cost_model.errors import InputError


@click.command()
@click.argument("measured", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the coefficients to this file.")
@click.option("--name", help="What the set is called. [default: the CSV file's name]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
def calibrate(measured: Path, output: Path | None, name: str | None, seed: int) -> None:
    """Fit the cost model to MEASURED, a CSV file with columns gpu, model, tp, phase, batch,
    input_len_or_context and measured_ms (and engine, interconnect, has_attention where they matter).

    The fit starts from the coefficients that ship, so that a few rows of one GPU are worth something; but
    from priors where the file has an engine that those have seen, so that its errors stay honest.
    `hexgen2 estimate --cost-model FILE` uses the result.
    """
    from cost_model.coefficients import PRIORS, fitted
    from cost_model.files import write_text
    from cost_model.held_out import calibrate as fit
    from cost_model.measurements import COLUMNS, measurements, read_rows

    rows = list(measurements(read_rows(measured, (*COLUMNS, "measured_ms"))[1]))
    if len(rows) < 2:
        raise InputError(str(measured), "", f"has {len(rows)} measured steps", "give at least 2")
    seen = sorted({row.step.engine for row in rows} & set(fitted().engines))
    if seen:
        click.echo(
            f"{', '.join(seen)}: known to the coefficients that ship, so starting from priors", err=True
        )
    start = PRIORS if seen else fitted()
    found = fit(rows, start, name or measured.stem, f"{len(rows)} measured steps of {measured.name}", seed)
    text = found.to_json()
    if output is None:
        click.echo(text, nl=False)
    else:
        write_text(output, text)
    held_out = found.held_out
    kinds = {
        "rows": held_out.rows,
        "GPUs": held_out.gpu,
        "models": held_out.model,
        "engines": held_out.engine,
    }
    errors = ", ".join(f"{error:.1%} on {kind}" for kind, error in kinds.items() if error is not None)
    click.echo(f"{len(rows)} steps; mean error where left out of the fit: {errors}", err=True)
