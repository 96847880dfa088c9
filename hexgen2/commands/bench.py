"""`hexgen2 bench`: an OpenAI endpoint under load, measured from outside."""

from __future__ import annotations

import json
from pathlib import Path

import click

from cost_model.errors import InputError
from cost_model.files import write_text
from hexgen2.commands.arrivals import arrivals
from hexgen2.commands.options import POSITIVE, SEED, check_folder
from hexgen2.terminal import echo, echo_json

PROMPTS = 1000


@click.command()
@click.argument("url")
@click.option("--workload", help="As for `search`; a trace is replayed.")
@click.option("--isl", type=float, help="Mean prompt tokens, instead of --workload.")
@click.option("--osl", type=float, help="Mean output tokens, instead of --workload.")
@click.option(
    "--request-rate", type=POSITIVE, help="Requests/s that arrive, at random. [default: all at once]"
)
@click.option("--num-prompts", type=click.IntRange(1, 10_000_000), help="How many. [default: 1000]")
@click.option("--duration-s", type=POSITIVE, help="Requests that arrive within so many seconds.")
@click.option(
    "--burstiness", type=POSITIVE, default=1.0, show_default=True, help="1 is Poisson, less is burstier."
)
@click.option("--max-concurrency", type=click.IntRange(min=1), help="Requests under way at most.")
@click.option("--ttft", type=POSITIVE, help="Target in ms; counts requests that meet it.")
@click.option("--tpot", type=POSITIVE, help="Target in ms; likewise.")
@click.option("--model", help="As the server names it. [default: its first]")
@click.option("--api-key", envvar="HEXGEN2_API_KEY", help="Sent as a bearer token.")
@click.option("--seed", type=SEED, default=0, show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the results to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as one JSON object.")
def bench(
    url: str,
    workload: str | None,
    isl: float | None,
    osl: float | None,
    request_rate: float | None,
    num_prompts: int | None,
    duration_s: float | None,
    burstiness: float,
    max_concurrency: int | None,
    ttft: float | None,
    tpot: float | None,
    model: str | None,
    api_key: str | None,
    seed: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Measure the OpenAI endpoint at URL under load, one streamed completion per request: throughput, TTFT,
    TPOT, ITL and E2EL, as `simulate` predicts them."""
    from hexgen2.bench.run import Load
    from hexgen2.bench.run import bench as run
    from hexgen2.workload.arrivals import LengthSource

    check_folder(output)
    lengths = LengthSource.load(workload, isl, osl)
    at_once = request_rate is None and not lengths.timed
    if at_once and duration_s is not None:
        raise InputError("--duration-s", "", "needs times of arrival", "give --request-rate, too")
    requests = arrivals(lengths, request_rate, at_once, num_prompts, duration_s, burstiness, seed, PROMPTS)
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
    echo(f"{seen.ended} of {len(seen.requests)} requests, {len(seen.failed)} failed", err=True)
