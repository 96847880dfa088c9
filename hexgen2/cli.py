"""The command line: `hexgen2 COMMAND`. Results go to stdout, progress and errors to stderr."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from cost_model.errors import HexGen2Error, InputError
from cost_model.pipeline import PIPELINE_SEMANTICS
from cost_model.registry import COST_MODELS
from hexgen2.commands.bench import bench
from hexgen2.commands.calibrate import calibrate
from hexgen2.commands.compare import compare
from hexgen2.commands.estimate import estimate
from hexgen2.commands.options import POSITIVE
from hexgen2.commands.probe import probe
from hexgen2.commands.simulate import simulate
from hexgen2.goal import OBJECTIVES, make_goal


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hexgen2")
def cli() -> None:
    """Place and serve large language models on mixed GPUs, with disaggregated prefill and decode."""


@cli.command()
@click.option("--cluster", help="A shipped cluster (`hexgen2 list clusters`) or a YAML file.")
@click.option("--model", help="A shipped model or a folder with a Hugging Face config.json.")
@click.option(
    "--workload",
    help="A shipped class, shares of several (HPLD:2,LPHD:1), or a trace (Azure CSV, Mooncake JSONL, "
    "ShareGPT JSON).",
)
@click.option("--isl", type=float, help="Mean prompt tokens, instead of --workload.")
@click.option("--osl", type=float, help="Mean output tokens, instead of --workload.")
@click.option("--strategy", default="hexgen2", show_default=True, help="See `hexgen2 list strategies`.")
@click.option(
    "--cost-model",
    type=click.Choice(list(COST_MODELS)),
    help="[default: calibrated; with --from: the placement's]",
)
@click.option(
    "--pipeline",
    type=click.Choice(PIPELINE_SEMANTICS),
    help="How pipeline stages add up. [default: pipelined; with --from: the placement's]",
)
@click.option(
    "--links",
    type=click.Choice(["shared", "pairwise"]),
    help="Traffic shares links, network cards and uplinks, or each KV route has its links to itself. "
    "[default: shared; with --from: the placement's]",
)
@click.option("--objective", type=click.Choice(OBJECTIVES), default="throughput", show_default=True)
@click.option("--request-rate", type=POSITIVE, help="Requests/s that arrive, at random.")
@click.option("--ttft", type=POSITIVE, help="Target for the time to first token, in ms.")
@click.option("--tpot", type=POSITIVE, help="Target for the time per output token, in ms.")
@click.option("--budget", type=POSITIVE, help="$ per hour that the GPUs in use may cost.")
@click.option(
    "--frontier",
    type=click.IntRange(min=2, max=1000),
    is_flag=False,
    flag_value=8,
    metavar="[N]",
    help="List the best rental for N (8) prices up to --budget.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--time-limit", type=POSITIVE, help="Seconds; the best so far is kept.")
@click.option(
    "--from", "previous", type=click.Path(path_type=Path), help="Re-plan from this placement, with moves."
)
@click.option("--lost", help="GPU ids or nodes that are out of service, with --from.")
@click.option("--added", help="GPU ids or nodes that are back or new, with --from.")
@click.option("--horizon", type=POSITIVE, help="Seconds that the new plan will serve. [default: 3600]")
@click.option(
    "--load-gbyte-s", type=POSITIVE, help="Weights that each GPU loads, GB/s. [default: 2, assumed]"
)
@click.option("--certify", is_flag=True, help="Prove how good the answer is: some seconds more.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the placement to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print the placement as one JSON object.")
def search(
    cluster: str | None,
    model: str | None,
    workload: str | None,
    isl: float | None,
    osl: float | None,
    strategy: str,
    cost_model: str | None,
    pipeline: str | None,
    links: str | None,
    objective: str,
    request_rate: float | None,
    ttft: float | None,
    tpot: float | None,
    budget: float | None,
    frontier: int | None,
    seed: int,
    time_limit: float | None,
    previous: Path | None,
    lost: str | None,
    added: str | None,
    horizon: float | None,
    load_gbyte_s: float | None,
    certify: bool,
    output: Path | None,
    as_json: bool,
) -> None:
    """Find a placement: which GPUs form which replica, how each is parallelised, how KV caches flow."""
    from hexgen2.checks import violations
    from hexgen2.report import make_console, print_placement
    from hexgen2.search.problem import make_problem
    from hexgen2.strategies.base import SearchOptions
    from hexgen2.strategies.registry import find_strategy

    run, options = find_strategy(strategy), SearchOptions(seed, time_limit, certify, _progress())
    if output is not None and not output.absolute().parent.is_dir():
        raise InputError(str(output), "", "its folder does not exist", "create it first")
    goal = make_goal(objective, request_rate, ttft, tpot, budget, frontier)
    if certify and (strategy != "hexgen2" or goal.rents or goal.objective == "latency" or previous):
        raise InputError("--certify", "", "goes with the plain search of hexgen2 alone", "leave it out here")
    changes = {"--lost": lost, "--added": added, "--horizon": horizon, "--load-gbyte-s": load_gbyte_s}
    if previous is not None:
        from hexgen2.replanning import replanned

        inputs = {"cluster": cluster, "model": model, "workload": workload, "isl": isl, "osl": osl}
        inputs |= {
            "cost_model": cost_model,
            "pipeline": pipeline,
            "links": links,
            "lost": lost,
            "added": added,
        }
        placement = replanned(previous, inputs, strategy, goal, options, horizon, load_gbyte_s)
    else:
        for option, value in changes.items():
            if value is not None:
                raise InputError(option, "", "is for re-planning", "name the placement that runs with --from")
        if cluster is None or model is None:
            option = "--cluster" if cluster is None else "--model"
            raise InputError(option, "", "is missing", "name one, or re-plan a placement with --from")
        costs = cost_model or "calibrated", pipeline or "pipelined"
        placement = run(
            make_problem(cluster, model, workload, isl, osl, *costs, goal, links or "shared"), options
        )
    wrong = violations(placement)
    if wrong:
        raise HexGen2Error(
            f"{strategy} made a wrong placement: {wrong[0][0]}: {wrong[0][1]}; please report it"
        )
    if output is not None:
        placement.save(output)
    if as_json:
        click.echo(placement.to_json(), nl=False)
    else:
        print_placement(placement, make_console())


def _progress():
    """Prints the best so far to stderr, at most once a second (each improvement on a terminal)."""
    started, last = time.monotonic(), float("-inf")
    on_terminal = sys.stderr.isatty()

    def show(state) -> None:
        nonlocal last
        now = time.monotonic()
        if state.best is None or state.best.req_s <= 0 or (not on_terminal and now - last < 1.0):
            return
        last = now
        rate = state.evaluator.evaluations / max(now - started, 1e-9)
        text = f"{now - started:6.2f} s  best {state.best.req_s:.4g} requests/s"
        if state.limit is not None:
            text += f"  bound {state.limit.req_s:.4g} (gap {1 - state.best.req_s / state.limit.req_s:.1%})"
        text += f"  {rate:.0f} evaluations/s"
        click.echo(text, err=True)

    return show


@cli.command()
@click.argument("placement", type=click.Path(path_type=Path))
@click.option("--model-path", type=click.Path(path_type=Path), help="The checkpoint's folder.")
@click.option("--engine", type=click.Choice(["torch"]), default="torch", show_default=True)
@click.option("--launcher", type=click.Choice(["local"]), default="local", show_default=True)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option("--api-key", envvar="HEXGEN2_API_KEY", help="Clients must send it as a bearer token.")
def launch(
    placement: Path,
    model_path: Path | None,
    engine: str,
    launcher: str,
    host: str,
    port: int,
    api_key: str | None,
) -> None:
    """Start a placement's replicas on this machine and serve the OpenAI API."""
    from hexgen2.placement import Placement

    loaded = Placement.load(placement)
    try:
        from runtime.serve import serve
    except ModuleNotFoundError as error:
        raise InputError(
            "hexgen2 launch", "", f"needs {error.name}", "pip install 'hexgen2[runtime]'"
        ) from error
    options = {"launcher": launcher, "engine": engine, "source": str(placement)}
    sys.exit(serve(loaded, model_path, host, port, api_key, **options))


@cli.command()
@click.argument("placement", type=click.Path(path_type=Path))
def show(placement: Path) -> None:
    """Print a placement as tables, after checking it."""
    from hexgen2.checks import verify
    from hexgen2.placement import Placement
    from hexgen2.report import make_console, print_placement

    loaded = Placement.load(placement)
    verify(loaded, str(placement))
    print_placement(loaded, make_console())


@cli.command("list")
@click.argument("what", type=click.Choice(["clusters", "gpus", "models", "workloads", "strategies"]))
def list_(what: str) -> None:
    """List what ships by name."""
    from hexgen2 import listing

    for name, description in getattr(listing, what)():
        click.echo(f"{name:28} {description}")


for command in (simulate, compare, bench, estimate, calibrate, probe):
    cli.add_command(command)


def main() -> None:
    """Entry point: one line on stderr and the exit code of the contract for every error we expect."""
    try:
        cli.main(standalone_mode=False)
    except HexGen2Error as error:
        click.echo(f"hexgen2: {error}", err=True)
        sys.exit(error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(2)
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "hexgen2"
        click.echo(f"hexgen2: {' '.join(error.format_message().split())} (see `{where} --help`)", err=True)
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        click.echo("hexgen2: interrupted before anything was found", err=True)
        sys.exit(130)
