"""`hexgen2 simulate`: a placement under load, without any GPU."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

import hexgen2
from cost_model.errors import InputError
from hexgen2.commands.options import (
    PATH,
    POSITIVE,
    Command,
    arrival_options,
    check_folder,
    json_option,
    options,
    output_option,
)
from hexgen2.schedulers import (
    BUCKETS,
    FLOW,
    LENGTHS_HELP,
    OUTPUT_LENGTHS,
    PATH_SCHEDULERS,
    PATHS_HELP,
    SCHEDULER_HELP,
    SCHEDULERS,
)
from hexgen2.simulator.batching import POLICIES
from hexgen2.terminal import echo_json, note

_load = options("Load")
_goal = options("Targets")
_batching = options("Batching")
_scheduling = options("Scheduling")
_fleet = options("What happens to the fleet")


@click.command(
    cls=Command,
    short_help="Run requests through a placement, without GPUs.",
    examples=(
        "hexgen2 simulate placement.json --request-rate 4 --num-requests 2000 -o results.json",
        "hexgen2 simulate placement.json --workload trace.csv --ttft 900 --tpot 90",
        "hexgen2 simulate placement.json --isl 1024 --osl 1024 --max-concurrency 64 --num-prompts 640",
        "hexgen2 simulate placement.json --offline --scheduler workload-aware",
    ),
)
@click.argument("placement", type=PATH)
@_load(
    "--workload",
    metavar="NAME|FILE",
    help="As for `search`; a trace with arrival times is replayed.  [default: the placement's]",
)
@_load("--request-rate", type=POSITIVE, metavar="RATE", help="Mean requests/s, arriving at random (Poisson).")
@_load("--offline", is_flag=True, help="Let all requests arrive at once.")
@arrival_options("10 for each that the placement decodes at a time, but 2000 to 20000", 100_000_000)
@_goal("--ttft", "ttft_ms", type=POSITIVE, metavar="MS", help="Target for the time to first token.")
@_goal("--tpot", "tpot_ms", type=POSITIVE, metavar="MS", help="Target for the time per output token.")
@output_option("results")
@json_option("results")
@options("Output")(
    "--requests-out", type=PATH, metavar="FILE", help="Write a CSV line for each request to FILE."
)
@_batching(
    "--policy",
    type=click.Choice(POLICIES),
    default="mixed",
    show_default=True,
    help="How colocated replicas mix the phases: mixed as `launch` does, chunked as vLLM, "
    "chunked-prefill-first as SGLang, inflight as TensorRT-LLM, prefill-first as vLLM before chunked "
    "prefill.",
)
@_batching(
    "--step-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Most tokens in a step with prompts (vLLM's max_num_batched_tokens).  [default: the placement's]",
)
@_batching(
    "--max-batch",
    type=click.IntRange(min=1),
    metavar="N",
    help="Most requests that a replica decodes at a time (vLLM's max_num_seqs).  [default: the placement's]",
)
@_fleet(
    "--queue-limit",
    type=click.IntRange(min=0),
    metavar="N",
    help="Requests that may wait; more are rejected.",
)
@_fleet(
    "--shift-load/--no-shift-load",
    default=True,
    show_default=True,
    help="Move shares of routes when requests wait and are longer or shorter than planned, as"
    " `hexgen2 launch` does.",
)
@_scheduling(
    "--scheduler",
    type=click.Choice(list(SCHEDULERS | PATH_SCHEDULERS)),
    default=FLOW,
    show_default=True,
    help=f"{SCHEDULER_HELP} {PATHS_HELP}",
)
@_scheduling(
    "--output-lengths",
    type=click.Choice(list(OUTPUT_LENGTHS)),
    default=BUCKETS,
    show_default=True,
    help=LENGTHS_HELP,
)
@_fleet("--fail", "failures", multiple=True, metavar="REPLICA@S", help="Lose this replica after S seconds.")
@_fleet(
    "--replan",
    "replans",
    multiple=True,
    metavar="FILE@S",
    help="Switch to this placement after S seconds.",
)
@_fleet(
    "--recover/--no-recover",
    default=True,
    show_default=True,
    help="Continue the requests of a lost replica elsewhere, as `hexgen2 launch` does, or fail them.",
)
def simulate(
    placement: Path,
    failures: tuple[str, ...],
    replans: tuple[str, ...],
    requests_out: Path | None,
    output: Path | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """Simulate a placement under load: throughput, TTFT, TPOT, queues and traffic, by the cost model."""
    for path in (output, requests_out):
        check_folder(path)
    found = hexgen2.simulate(
        placement,
        failures=[_timed("--fail", "decode-0", text) for text in failures],
        replans=[_timed("--replan", "next.json", text) for text in replans],
        requests_out=requests_out,
        progress=_progress(),
        **asked,
    )
    text = json.dumps(found.to_dict(), indent=1) + "\n"
    if output is not None:
        from cost_model.files import write_text

        write_text(output, text)
    if as_json:
        echo_json(text)
    else:
        from hexgen2.report.placement import make_console
        from hexgen2.report.results import print_results

        head = f"{found.model} on {found.cluster}, strategy {found.placement}"
        print_results(head, found, make_console())


def _timed(option: str, example: str, text: str) -> tuple[str, float]:
    """What comes before the @, and the seconds after it."""
    what, _, seconds = text.rpartition("@")
    try:
        when = float(seconds)
    except ValueError:
        when = -1.0
    if not what or not 0 <= when < float("inf"):
        raise InputError(option, text[:100], "has no time", f"write {example}@60")
    return what, when


def _progress():
    """Prints to stderr every few seconds how far the simulation is."""
    last = time.monotonic()

    def show(simulation) -> None:
        nonlocal last
        if time.monotonic() - last < 2.0:
            return
        last = time.monotonic()
        total = len(simulation.records.requests)
        note(f"{simulation.ended} of {total} requests, {simulation.now:.1f} s simulated")

    return show
