"""`hexgen2 estimate`: times, memory and largest batch of one model on some GPUs, or times of many steps or
runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import hexgen2
from cost_model.engines.model import ENGINES
from cost_model.errors import InputError
from cost_model.hardware import INTERCONNECT_CLASSES
from cost_model.registry import DEFAULT
from hexgen2.commands.options import (
    Command,
    check_folder,
    cost_model_option,
    format_options,
    json_option,
    options,
)
from hexgen2.terminal import echo, echo_json, note

if TYPE_CHECKING:
    from hexgen2.estimation.single import StepEstimate

_COUNT = click.IntRange(1, 10**7)
_asked = options("What to estimate")
_detail = options("Details")
_output = options("Output")


@click.command(
    cls=Command,
    short_help="Predict the time and memory of single steps, or the times of runs.",
    examples=(
        "hexgen2 estimate --gpu H100:8 --model llama-2-70b --tp 8 --batch 16 --isl 512 --osl 128",
        "hexgen2 estimate --csv steps.csv -o predicted.csv",
        "hexgen2 estimate --runs runs.csv -o predicted.csv",
    ),
)
@_asked("--gpu", metavar="NAME:COUNT", help="The GPUs, for example H100:8.")
@_asked("--model", metavar="NAME|DIR", help="Shipped model, or folder with a Hugging Face config.json.")
@_asked("--tp", metavar="N", type=_COUNT, help="Tensor-parallel degree.  [default: all GPUs of a stage]")
@_asked("--pp", metavar="N", type=_COUNT, default=1, show_default=True, help="Number of pipeline stages.")
@_asked(
    "--attention-dp",
    metavar="N",
    type=_COUNT,
    default=1,
    show_default=True,
    help="Groups of a stage's GPUs that run attention for requests of their own.",
)
@_asked(
    "--expert-parallel",
    metavar="N",
    type=_COUNT,
    default=1,
    show_default=True,
    help="Groups of a stage's GPUs that divide the experts among them.",
)
@_asked("--batch", metavar="N", type=_COUNT, default=1, show_default=True, help="Requests in a step.")
@_asked("--isl", metavar="N", type=_COUNT, help="Prompt tokens of each request.")
@_asked(
    "--osl",
    metavar="N",
    type=click.IntRange(0, 10**7),
    default=0,
    show_default=True,
    help="Output tokens of each.",
)
@_asked(
    "--csv",
    "table",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Estimate many steps: a CSV file with columns gpu, model, tp, phase, batch, input_len_or_context. "
    "Adds predicted_ms.",
)
@_asked(
    "--runs",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Simulate many runs of serving engines in a closed loop: a CSV file with columns backend, "
    "model_path, system, isl, osl, tp_size, concurrency and more. Adds predicted_ttft_ms, "
    "predicted_tpot_ms, why_not.",
)
@_output(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write to FILE, not to stdout."
)
@json_option("estimate")
@format_options
@_detail(
    "--interconnect",
    type=click.Choice(INTERCONNECT_CLASSES),
    help="Links between the GPUs.  [default: the usual ones of such GPUs]",
)
@_detail(
    "--engine",
    metavar="NAME",
    help=f"{', '.join(ENGINES)}; with --cost-model, one that it knows.  [default: {DEFAULT}; with "
    "--cost-model calibrated, a mean engine]",
)
@_detail("--jobs", metavar="N", type=_COUNT, help="Processes for --runs.  [default: one per processor]")
@cost_model_option("Details", f"that of --engine, or {DEFAULT}; with --runs: each engine's own")
def estimate(
    table: Path | None,
    runs: Path | None,
    jobs: int | None,
    pp: int,
    output: Path | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """Predict the time of a prefill and of a decode step, memory use and the largest batch."""
    check_folder(output)
    if jobs is not None and runs is None:
        raise InputError("--jobs", "", "goes with --runs only", "leave it out")
    if table is not None and runs is not None:
        raise InputError("--runs", "", "does not go with --csv", "leave one of them out")
    if runs is not None:
        text = _runs(runs, jobs, as_json, asked)
    else:
        text = _table(table, as_json, asked) if table is not None else _one(pp, as_json, asked)
    if output is None:
        (echo_json if as_json else echo)(text.removesuffix("\n"))
    else:
        from cost_model.files import write_text

        write_text(output, text)


def _table(path: Path, as_json: bool, asked: dict[str, Any]) -> str:
    from hexgen2.estimation.table import estimate_table

    _check_columns("--csv", ("gpu", "model", "tp", "isl", "interconnect"), as_json, asked)
    return estimate_table(path, asked["weights"], asked["kv"], asked["engine"], asked["cost_model"])


def _runs(path: Path, jobs: int | None, as_json: bool, asked: dict[str, Any]) -> str:
    from hexgen2.estimation.runs import estimate_runs

    names = ("gpu", "model", "tp", "isl", "weights", "kv", "engine", "interconnect")
    _check_columns("--runs", names, as_json, asked)
    return estimate_runs(path, jobs, _progress(), asked["cost_model"])


def _check_columns(option: str, names: tuple[str, ...], as_json: bool, asked: dict[str, Any]) -> None:
    """Refuse options whose values are those of a file's rows."""
    for name in names:
        if asked[name] is not None:
            raise InputError(f"--{name.replace('_', '-')}", "", f"is a column with {option}", "leave it out")
    for name in ("attention_dp", "expert_parallel"):
        if asked[name] > 1:
            raise InputError(
                f"--{name.replace('_', '-')}", "", f"does not go with {option}", "leave one of them out"
            )
    if as_json:
        raise InputError("--json", "", f"does not go with {option}", "leave one of them out")


def _progress() -> Callable[[int, int], None]:
    """Prints to stderr every few seconds how many runs are done."""
    last = time.monotonic()

    def show(done: int, count: int) -> None:
        nonlocal last
        if time.monotonic() - last >= 2.0:
            last = time.monotonic()
            note(f"{done} of {count} runs")

    return show


def _one(pp: int, as_json: bool, asked: dict[str, Any]) -> str:
    for name in ("gpu", "model", "isl"):
        if asked[name] is None:
            raise InputError(f"--{name}", "", "is missing", "give it, or many steps with --csv")
    found = hexgen2.estimate(pp=pp, **asked)
    return json.dumps(found.to_dict()) + "\n" if as_json else _text(found)


def _text(found: StepEstimate) -> str:
    tokens = found.isl + found.osl
    requests = "1 request" if found.batch == 1 else f"{found.batch} requests"
    error = f"+- {found.error:.0%}"
    stages = f", {found.pp} stages of tp {found.tp}" if found.pp > 1 else ""
    stages += f", {found.attention_dp} attention groups" if found.attention_dp > 1 else ""
    stages += f", experts in {found.expert_parallel} parts" if found.expert_parallel > 1 else ""
    rest = found.memory_bytes - found.kv_bytes
    largest = f"{found.largest_batch} requests of {tokens} tokens"
    if not found.largest_batch:
        largest = f"none: not one request of {tokens} tokens fits"
    origin, limit = found.cost_model, found.memory_limit_bytes
    lines = [
        f"{found.model} on {found.tp * found.pp}x{found.gpu} ({found.interconnect}{stages}), "
        f"{found.weights} weights, {found.kv} KV cache",
        f"prefill        {found.prefill_ms:.4g} ms {error}   {requests} of {found.isl} tokens",
        f"decode step    {found.decode_ms:.4g} ms {error}   {requests}, "
        f"{found.isl + found.osl / 2:g} tokens of context",
        f"memory         {found.memory_bytes / 1e9:.4g} of {limit / 1e9:.4g} GB on each GPU: "
        f"{rest / 1e9:.4g} weights, workspace and engine, {found.kv_bytes / 1e9:.4g} KV cache"
        + ("" if found.fits else ": does not fit"),
        f"largest batch  {largest}",
        f"cost model     {origin['name']}, {origin['engine'] or 'a mean engine'}: all times are predicted; "
        f"{origin['source']}",
        *(f"numbers        {line}" for line in found.numbers),
        *(f"assumed        {assumption}" for assumption in found.assumptions),
    ]
    return "\n".join(lines) + "\n"
