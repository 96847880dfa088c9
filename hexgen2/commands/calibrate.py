"""`hexgen2 calibrate`: cost models from measured times: of steps, of a running engine, or of operators."""

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
    short_help="Fit a cost model to measured times.",
    examples=(
        "hexgen2 calibrate measured.csv -o mine.json",
        "hexgen2 calibrate --operators tables -o mine.json",
        "hexgen2 calibrate --runs runs.csv -o mine.json",
        "hexgen2 calibrate http://127.0.0.1:8000 --gpu A100-80GB --model llama-3-8b -o mine.json",
    ),
)
@click.argument("measured", metavar="[CSV|URL]", required=False)
@_fit(
    "--operators",
    type=PATH,
    metavar="DIR",
    help="Instead of steps, fit single operators to the tables GPU_OPERATOR.csv (or .csv.gz) in this folder.",
)
@_fit(
    "--runs",
    type=PATH,
    metavar="FILE",
    help="Instead of steps, fit engines to runs of whole servers: a CSV file as for `hexgen2 estimate "
    "--runs`, with measured_ttft_ms and measured_tpot_ms.",
)
@_fit(
    "--name",
    metavar="NAME",
    help="Name of the result.  [default: that of the CSV file or folder, or the URL]",
)
@_fit(
    "--seed",
    type=SEED,
    default=0,
    show_default=True,
    metavar="N",
    help="Seed for the choice of held-out rows.",
)
@output_option("result")
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
    measured: str | None,
    operators: Path | None,
    runs: Path | None,
    output: Path | None,
    name: str | None,
    seed: int,
    gpu: str | None,
    model: str | None,
    tp: int,
    api_key: str | None,
    rows: Path | None,
) -> None:
    """Fit a cost model to measured times.

    CSV is a file with columns gpu, model, tp, phase, batch, input_len_or_context and measured_ms (and engine,
    interconnect and has_attention where they matter). URL is a running engine with OpenAI's API, one replica
    on --tp GPUs; its prefills and decode steps are timed first.

    The fit starts from the coefficients that ship, so that even a few rows of one GPU help. If these have
    seen an engine of the file before, it starts from priors instead, so that its stated errors are honest.

    With --operators, the result is numbers of matrix products, attention, experts and all-reduces on the GPUs
    of the tables, whose columns are in docs/simulate.md. The error on a held-back third is printed for each
    operator, GPU and format: by the numbers that ship, and by those fitted to the rest.

    With --runs, the result is the numbers of engines, from the mean TTFT and TPOT of servers under so many
    clients. The error on a held-back third is printed for each engine and GPU, before and after.

    `hexgen2 search`, `compare` and `estimate` use the result: --cost-model FILE.
    """
    from cost_model.files import write_text

    given = [source for source in (measured, operators, runs) if source is not None]
    if len(given) != 1:
        problem = "does not go with --operators and --runs" if given else "is missing"
        remedy = "give one of a file or URL of steps, --operators DIR or --runs FILE"
        raise InputError("CSV|URL", "", problem, remedy)
    if runs is not None:
        text = _of_runs(runs, name, seed)
    elif operators is not None:
        text = _of_operators(operators, name, seed)
    else:
        assert measured is not None
        text = _of_steps(measured, name, seed, gpu, model, tp, api_key, rows)
    if output is None:
        echo_json(text)
    else:
        write_text(output, text)


def _of_runs(path: Path, name: str | None, seed: int) -> str:
    """A file of engines, fitted to runs of servers."""
    from cost_model.engines.numbers import shipped
    from cost_model.fields import checked_name
    from hexgen2.calibration.runs import calibrate_runs

    def show(done: int, total: int) -> None:
        if done % 50 == 0 or done == total:
            note(f"{done} of {total} runs simulated")

    own = checked_name(path.name.partition(".")[0] or "runs", str(path))
    called = checked_name(name or own, str(path), "name", "give another --name")
    found, improved = calibrate_runs(path, shipped(), called, seed, progress=show)
    for kind in improved:
        (ttft, tpot), (ttft_after, tpot_after) = kind.before, kind.after
        note(
            f"{kind.engine} on {kind.gpu}: mean error of {kind.runs} held-back runs: TPOT {tpot:.1%} before, "
            f"{tpot_after:.1%} after; TTFT {ttft:.1%} before, {ttft_after:.1%} after"
        )
    return found.to_json()


def _of_operators(folder: Path, name: str | None, seed: int) -> str:
    """A file of engines that only brings numbers of operators."""
    from cost_model.engines.numbers import EngineFits
    from cost_model.fields import checked_name
    from hexgen2.calibration.operators import Outcome, fit_operators

    def show(found: Outcome) -> None:
        note(
            f"{found.operator} {found.gpu} {found.form}: {found.rows} rows; mean error of {found.held} held "
            f"back {found.before:.1%} ({found.origin}), fitted to the others {found.after:.1%}"
        )

    own = checked_name(folder.absolute().name, str(folder))
    called = checked_name(name or own, str(folder), "name", "give another --name")
    source = f"operator times in {own}"
    found, others = fit_operators(folder, source, seed, show)
    if others:
        note(f"left out, since no operator's name ends theirs: {', '.join(others)}")
    return EngineFits(name=called, source=source, engines={}, operators=found).to_json()


def _of_steps(
    measured: str,
    name: str | None,
    seed: int,
    gpu: str | None,
    model: str | None,
    tp: int,
    api_key: str | None,
    rows: Path | None,
) -> str:
    """Coefficients, from step times in a CSV file or of a running engine."""
    from cost_model.coefficients import PRIORS, fitted
    from cost_model.fields import checked_name
    from cost_model.files import write_text
    from cost_model.held_out import calibrate as fit
    from cost_model.measurements import COLUMNS, check_repeats, measurements, read_rows

    running = measured.startswith(_RUNNING)
    if running:
        lines = _profiled(measured, gpu, model, tp, api_key)
        if rows is not None:
            text = "\n".join(",".join(line.cells[c] for c in line.cells) for line in lines)
            write_text(rows, f"{','.join((*COLUMNS, 'measured_ms'))}\n{text}\n")
    else:
        lines = read_rows(Path(measured), (*COLUMNS, "measured_ms"))[1]
    steps = list(measurements(lines))
    check_repeats(lines, steps)
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
    held_out = found.held_out
    kinds = {
        "rows": held_out.rows,
        "GPUs": held_out.gpu,
        "models": held_out.model,
        "engines": held_out.engine,
    }
    errors = ", ".join(f"{error:.1%} on {kind}" for kind, error in kinds.items() if error is not None)
    note(f"{len(steps)} steps; mean error where left out of the fit: {errors}")
    return found.to_json()


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
