"""`hexgen2 estimate`: times, memory and largest batch of one model on some GPUs, or times of many steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cost_model.dtypes import KV_BYTES, WEIGHT_BYTES
from cost_model.errors import InputError
from cost_model.hardware import INTERCONNECT_CLASSES
from hexgen2.terminal import echo, echo_json

if TYPE_CHECKING:
    from cost_model.coefficients import CoefficientSet
    from cost_model.estimate import Estimate, Shape

_COUNT = click.IntRange(1, 10**7)


@click.command()
@click.option("--gpu", metavar="NAME:COUNT", help="For example H100:8.")
@click.option("--model", help="A shipped model or a folder with a Hugging Face config.json.")
@click.option("--tp", type=_COUNT, help="Tensor-parallel degree. [default: all GPUs of a stage]")
@click.option("--pp", type=_COUNT, default=1, show_default=True, help="Pipeline stages.")
@click.option("--batch", type=_COUNT, default=1, show_default=True, help="Requests in a step.")
@click.option("--isl", type=_COUNT, help="Prompt tokens of each request.")
@click.option("--osl", type=click.IntRange(0, 10**7), default=0, help="Output tokens. [default: 0]")
@click.option("--weights", type=click.Choice(list(WEIGHT_BYTES)), help="[default: the model's own]")
@click.option("--kv", type=click.Choice(list(KV_BYTES)), help="KV cache values. [default: the model's own]")
@click.option(
    "--interconnect", type=click.Choice(INTERCONNECT_CLASSES), help="[default: what such cards usually have]"
)
@click.option("--engine", help="An engine that the coefficients know. [default: a mean one]")
@click.option(
    "--cost-model",
    metavar="FILE|zero-fit",
    help="Coefficients that `hexgen2 calibrate` wrote, or none fitted. [default: those that ship]",
)
@click.option(
    "--csv",
    "table",
    type=click.Path(path_type=Path),
    help="Many steps: columns gpu, model, tp, phase, batch, input_len_or_context; predicted_ms is added.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write there instead of to stdout.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def estimate(
    gpu: str | None,
    model: str | None,
    tp: int | None,
    pp: int,
    batch: int,
    isl: int | None,
    osl: int,
    weights: str | None,
    kv: str | None,
    interconnect: str | None,
    engine: str | None,
    cost_model: str | None,
    table: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Predict the time of a prefill and of a decode step, memory and the largest batch."""
    coefficients = coefficients_by_name(cost_model)
    if engine is not None and engine not in coefficients.engines:
        known = ", ".join(coefficients.engines) or "none"
        raise InputError("--engine", "", f"{engine[:60]!r} is not in the coefficients", f"known: {known}")
    if table is not None:
        alone = {"--gpu": gpu, "--model": model, "--tp": tp, "--isl": isl, "--interconnect": interconnect}
        for option, value in alone.items():
            if value is not None:
                raise InputError(option, "", "is a column with --csv", "leave it out")
        if as_json:
            raise InputError("--json", "", "does not go with --csv", "leave one of them out")
        text = _table(table, coefficients, engine, weights, kv)
    else:
        needed = {"--gpu": gpu, "--model": model, "--isl": isl}
        for option, value in needed.items():
            if value is None:
                raise InputError(option, "", "is missing", "give it, or many steps with --csv")
        assert gpu is not None and model is not None and isl is not None
        text = _one(
            gpu, model, tp, pp, batch, isl, osl, weights, kv, interconnect, engine, coefficients, as_json
        )
    if output is None:
        (echo_json if as_json else echo)(text.removesuffix("\n"))
    else:
        from cost_model.files import write_text

        write_text(output, text)


def coefficients_by_name(name: str | None) -> CoefficientSet:
    """The coefficients that ship (None), the priors ("zero-fit"), or those of a file."""
    from cost_model.coefficients import ZERO_FIT, fitted, load_coefficients

    if name is None:
        return fitted()
    return ZERO_FIT if name == ZERO_FIT.name else load_coefficients(Path(name))


def _table(
    path: Path, coefficients: CoefficientSet, engine: str | None, weights: str | None, kv: str | None
) -> str:
    """The rows with predicted_ms; a row's engine (or source) counts where the coefficients know it."""
    import csv
    import io
    from dataclasses import replace

    from cost_model.dtypes import in_formats
    from cost_model.measurements import read_rows, step_of

    header, rows = read_rows(path)
    written = io.StringIO()
    columns = [*header, *(["predicted_ms"] if "predicted_ms" not in header else [])]
    writer = csv.DictWriter(written, columns, lineterminator="\n", restval="")
    writer.writeheader()
    for row in rows:
        step = step_of(row)
        step = replace(step, model=in_formats(step.model, weights, kv))  # type: ignore[arg-type]
        known = step.engine if step.engine in coefficients.engines else None
        milliseconds = 1e3 * step.seconds_by(coefficients, engine or known)
        writer.writerow({**row.cells, "predicted_ms": f"{milliseconds:.6g}"})
    return written.getvalue()


def _one(
    gpu: str,
    model: str,
    tp: int | None,
    pp: int,
    batch: int,
    isl: int,
    osl: int,
    weights: str | None,
    kv: str | None,
    interconnect: str | None,
    engine: str | None,
    coefficients: CoefficientSet,
    as_json: bool,
) -> str:
    """One estimate as text or JSON."""
    from cluster_specs.loader import parse_accelerators
    from cost_model.dtypes import in_formats
    from cost_model.estimate import Shape, estimate
    from cost_model.hardware import find_accelerator, interconnect_link, usual_interconnect
    from cost_model.lengths import RequestLengths
    from cost_model.models import find_model

    name, count = parse_accelerators(gpu, "--gpu", "")
    accelerator = find_accelerator(name, source="--gpu")
    architecture = in_formats(find_model(model), weights, kv)  # type: ignore[arg-type]
    joined = interconnect or usual_interconnect(accelerator)
    link, assumption = interconnect_link(joined, accelerator)
    shape = Shape(accelerator, link, tp or max(1, count // pp), pp)
    if shape.tp * pp > count:
        problem = f"{shape.tp} x {pp} stages are more than {count} GPUs"
        raise InputError("--tp", "", problem, f"give --gpu {name}:{shape.tp * pp} or smaller degrees")
    if shape.tp not in architecture.tensor_degrees(shape.tp):
        problem = f"{shape.tp} does not split the {architecture.heads} heads of {architecture.name} evenly"
        raise InputError("--tp", "", problem, f"use one of {architecture.tensor_degrees(count)}")
    if pp > architecture.layers:
        raise InputError("--pp", "", f"{pp} stages for {architecture.layers} layers", "use fewer stages")
    found = estimate(architecture, shape, RequestLengths.fixed(isl, osl), batch, coefficients, engine)
    assumptions = [] if assumption is None or shape.tp * pp == 1 else [assumption]
    if accelerator.name not in coefficients.gpus:
        taken = "the priors" if accelerator.kind == "cpu" or not coefficients.gpus else "those of a mean GPU"
        assumptions.append(f"no step of {accelerator.name} was measured: its coefficients are {taken}")
    what = {
        "model": architecture.name,
        "weights": architecture.weight_type,
        "kv": kv or architecture.weight_type,
        "gpu": accelerator.name,
        "interconnect": joined,
        "tp": shape.tp,
        "pp": pp,
        "batch": batch,
        "isl": isl,
        "osl": osl,
    }
    origin = {"name": coefficients.name, "engine": engine, "source": coefficients.source}
    if as_json:
        return (
            json.dumps({**what, **_figures(found), "cost_model": origin, "assumptions": assumptions}) + "\n"
        )
    return _text(what, shape, found, origin, assumptions)


def _figures(found: Estimate) -> dict[str, float | int | bool]:
    return {
        "prefill_ms": 1e3 * found.prefill_s,
        "decode_ms": 1e3 * found.decode_s,
        "error": found.error,
        "memory_bytes": found.memory_bytes,
        "kv_bytes": found.kv_bytes,
        "memory_limit_bytes": found.limit_bytes,
        "fits": found.fits,
        "largest_batch": found.largest_batch,
    }


def _text(what: dict, shape: Shape, found: Estimate, origin: dict, assumptions: list[str]) -> str:
    batch, isl, osl = what["batch"], what["isl"], what["osl"]
    requests = "1 request" if batch == 1 else f"{batch} requests"
    error = f"+- {found.error:.0%}"
    stages = f", {what['pp']} stages of tp {what['tp']}" if shape.pp > 1 else ""
    rest = found.memory_bytes - found.kv_bytes
    largest = f"{found.largest_batch} requests of {isl + osl} tokens"
    if not found.largest_batch:
        largest = f"none: not one request of {isl + osl} tokens fits"
    context = f"{isl + osl / 2:g} tokens of context"
    lines = [
        f"{what['model']} on {shape.tp * shape.pp}x{what['gpu']} ({what['interconnect']}{stages}), "
        f"{what['weights']} weights, {what['kv']} KV cache",
        f"prefill        {1e3 * found.prefill_s:.4g} ms {error}   {requests} of {isl} tokens",
        f"decode step    {1e3 * found.decode_s:.4g} ms {error}   {requests}, {context}",
        f"memory         {found.memory_bytes / 1e9:.4g} of {found.limit_bytes / 1e9:.4g} GB on each GPU: "
        f"{rest / 1e9:.4g} weights, workspace and engine, {found.kv_bytes / 1e9:.4g} KV cache"
        + ("" if found.fits else ": does not fit"),
        f"largest batch  {largest}",
        f"cost model     {origin['name']}, {origin['engine'] or 'a mean engine'}: all times are predicted; "
        f"{origin['source']}",
        *(f"assumed        {assumption}" for assumption in assumptions),
    ]
    return "\n".join(lines) + "\n"
