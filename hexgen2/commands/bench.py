"""`hexgen2 bench`: an OpenAI endpoint under load, measured from outside."""

from __future__ import annotations

import json
from pathlib import Path

import click

from cost_model.files import write_text
from hexgen2.commands.options import (
    POSITIVE,
    Command,
    arrival_options,
    check_folder,
    json_option,
    options,
    output_option,
)
from hexgen2.terminal import echo_json, note

PROMPTS = 1000
_server = options("Server")
_load = options("Load")
_goal = options("Targets")


@click.command(
    cls=Command,
    short_help="Measure an OpenAI endpoint under load.",
    examples=(
        "hexgen2 bench http://127.0.0.1:8000 --workload HPLD --request-rate 4 --num-prompts 500",
        "hexgen2 bench http://127.0.0.1:8000 --isl 512 --osl 64 --max-concurrency 16 -o results.json",
    ),
)
@click.argument("url")
@_load("--workload", metavar="NAME|FILE", help="As for `search`; a trace with arrival times is replayed.")
@_load(
    "--request-rate",
    type=POSITIVE,
    metavar="RATE",
    help="Mean requests/s, sent at random (Poisson).  [default: all at once]",
)
@arrival_options(PROMPTS, 10_000_000)
@_goal("--ttft", type=POSITIVE, metavar="MS", help="Target for the time to first token.")
@_goal("--tpot", type=POSITIVE, metavar="MS", help="Target for the time per output token.")
@_server("--model", metavar="NAME", help="The model, as the server names it.  [default: the server's first]")
@_server("--api-key", envvar="HEXGEN2_API_KEY", metavar="KEY", help="Sent as a bearer token.")
@output_option("results")
@json_option("results")
def bench(
    url: str,
    workload: str | None,
    isl: float | None,
    osl: float | None,
    length_range: float,
    request_rate: float | None,
    max_concurrency: int | None,
    num_requests: int | None,
    duration_s: float | None,
    burstiness: float,
    ttft: float | None,
    tpot: float | None,
    model: str | None,
    api_key: str | None,
    seed: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Measure the OpenAI endpoint at URL under load: throughput, TTFT, TPOT, ITL and E2EL, as `simulate`
    predicts them. Each request is a streamed completion. Ctrl-C ends the run and keeps what was measured."""
    from hexgen2.bench.run import Load
    from hexgen2.bench.run import bench as run
    from hexgen2.workload.arrivals import LengthSource, arrivals

    check_folder(output)
    lengths = LengthSource.load(workload, isl, osl, length_range)
    at_once = request_rate is None and not lengths.timed
    times = request_rate, at_once, num_requests, duration_s, burstiness, seed, PROMPTS, max_concurrency
    requests = arrivals(lengths, *times)
    targets = {name: value for name, value in (("ttft", ttft), ("tpot", tpot)) if value is not None}
    load = Load(url, api_key, model, max_concurrency, seed)
    found = run(load, requests, targets, _progress)
    text = json.dumps(found.to_dict(), indent=1) + "\n"
    if output is not None:
        write_text(output, text)
    if as_json:
        echo_json(text)
    else:
        from hexgen2.report.placement import make_console
        from hexgen2.report.results import print_results

        print_results(f"{found.model} at {found.endpoint}", found, make_console())


def _progress(seen) -> None:
    """Prints to stderr how far the run is."""
    note(f"{seen.ended} of {len(seen.requests)} requests, {len(seen.failed)} failed")
