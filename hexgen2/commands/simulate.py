"""`hexgen2 simulate`: a placement under load, on no GPU at all."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from cost_model.errors import InputError
from cost_model.files import write_text, written
from hexgen2.commands.arrivals import arrivals
from hexgen2.commands.options import POSITIVE, SEED, check_folder
from hexgen2.terminal import echo, echo_json


@click.command()
@click.argument("placement", type=click.Path(path_type=Path))
@click.option("--workload", help="As for `search`; a trace is replayed. [default: the placement's]")
@click.option("--isl", type=float, help="Mean prompt tokens, instead of --workload.")
@click.option("--osl", type=float, help="Mean output tokens, instead of --workload.")
@click.option("--request-rate", type=POSITIVE, help="Requests/s that arrive, at random.")
@click.option("--offline", is_flag=True, help="All requests arrive at once.")
@click.option("--num-requests", type=click.IntRange(1, 100_000_000), help="How many. [default: 2000]")
@click.option("--duration-s", type=POSITIVE, help="Requests that arrive within so many seconds.")
@click.option(
    "--burstiness", type=POSITIVE, default=1.0, show_default=True, help="1 is Poisson, less is burstier."
)
@click.option("--ttft", type=POSITIVE, help="Target in ms; counts requests that meet it.")
@click.option("--tpot", type=POSITIVE, help="Target in ms; likewise.")
@click.option(
    "--policy",
    type=click.Choice(["mixed", "prefill-first", "chunked"]),
    default="mixed",
    show_default=True,
    help="How colocated replicas mix the phases: as `launch` does, or as vLLM does without or with chunked "
    "prefill.",
)
@click.option("--queue-limit", type=click.IntRange(min=0), help="Requests that may wait; the others fail.")
@click.option("--fail", "failures", multiple=True, metavar="REPLICA@SECONDS", help="A replica is lost then.")
@click.option(
    "--replan", "replans", multiple=True, metavar="FILE@SECONDS", help="Change over to this placement then."
)
@click.option(
    "--recover/--no-recover",
    default=True,
    show_default=True,
    help="Requests of a lost replica go on elsewhere, as under `hexgen2 launch`, or fail.",
)
@click.option("--seed", type=SEED, default=0, show_default=True)
@click.option("--requests-out", type=click.Path(path_type=Path), help="Write a CSV line for each request.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the results to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as one JSON object.")
def simulate(
    placement: Path,
    workload: str | None,
    isl: float | None,
    osl: float | None,
    request_rate: float | None,
    offline: bool,
    num_requests: int | None,
    duration_s: float | None,
    burstiness: float,
    ttft: float | None,
    tpot: float | None,
    policy: Any,
    queue_limit: int | None,
    failures: tuple[str, ...],
    replans: tuple[str, ...],
    recover: bool,
    seed: int,
    requests_out: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Simulate a placement under load: throughput, TTFT, TPOT, queues and traffic, by the cost model."""
    from hexgen2.checks import verify
    from hexgen2.placement import Placement
    from hexgen2.simulator.options import Failure, Options, Replan
    from hexgen2.simulator.run import simulate as run
    from hexgen2.workload.arrivals import LengthSource

    loaded = Placement.load(placement)
    verify(loaded, str(placement))
    for path in (output, requests_out):
        check_folder(path)
    if workload is None and isl is None and osl is None:
        lengths = LengthSource(loaded.workload)
    else:
        lengths = LengthSource.load(workload, isl, osl)
    requests = arrivals(lengths, request_rate, offline, num_requests, duration_s, burstiness, seed)
    goal = loaded.goal.model_copy(
        update={key: value for key, value in (("ttft_ms", ttft), ("tpot_ms", tpot)) if value is not None}
    )
    loaded = loaded.model_copy(update={"goal": goal})
    lost = [Failure(at_s, name) for name, at_s in (_timed("--fail", "decode-0", text) for text in failures)]
    timed = (_timed("--replan", "next.json", text) for text in replans)
    later = [Replan(at_s, _next_placement(Path(path), loaded)) for path, at_s in timed]
    options = Options(policy, queue_limit, lost, later, recover)
    with written(requests_out) if requests_out else nullcontext() as stream:
        found = run(loaded, requests, options, stream, _progress(len(requests)))
    text = json.dumps(found.to_dict(), indent=1) + "\n"
    if output is not None:
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


def _next_placement(path: Path, placement):
    """A placement to change over to, checked, of the same model and with moves."""
    from hexgen2.checks import verify
    from hexgen2.placement import Placement

    found = Placement.load(path)
    verify(found, str(path))
    remedy = "make it with `hexgen2 search --from`"
    if found.model != placement.model:
        raise InputError(str(path), "model", f"is {found.model.name}, not {placement.model.name}", remedy)
    if not found.moves:
        raise InputError(str(path), "moves", "are missing, so nobody knows what has to load", remedy)
    return found


def _progress(total: int):
    """Prints to stderr every few seconds how far the simulation is."""
    last = time.monotonic()

    def show(simulation) -> None:
        nonlocal last
        if time.monotonic() - last < 2.0:
            return
        last = time.monotonic()
        done = simulation.ended
        echo(f"{done} of {total} requests, {simulation.now:.1f} s simulated", err=True)

    return show
