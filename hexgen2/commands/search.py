"""`hexgen2 search`: a placement for a cluster, a model and a workload."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Literal

import click

from cost_model.errors import HexGen2Error, InputError
from cost_model.pipeline import PIPELINE_SEMANTICS
from cost_model.registry import COST_MODELS
from hexgen2.commands.options import POSITIVE, SEED, check_folder
from hexgen2.goal import OBJECTIVES, make_goal
from hexgen2.terminal import echo, echo_json


@click.command()
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
@click.option(
    "--engine",
    type=click.Choice(["any", "vllm"]),
    default="any",
    show_default=True,
    help="vllm: only replicas that vLLM runs.",
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
@click.option("--seed", type=SEED, default=0, show_default=True)
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
    engine: Literal["any", "vllm"],
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
    from hexgen2.export.vllm_command import check_vllm
    from hexgen2.report.placement import make_console, print_placement
    from hexgen2.search.problem import make_problem
    from hexgen2.strategies.base import SearchOptions
    from hexgen2.strategies.registry import find_strategy

    run, options = find_strategy(strategy), SearchOptions(seed, time_limit, certify, _progress())
    check_folder(output)
    goal = make_goal(objective, request_rate, ttft, tpot, budget, frontier)
    if certify and (strategy != "hexgen2" or goal.rents or goal.objective == "latency" or previous):
        raise InputError("--certify", "", "goes with the plain search of hexgen2 alone", "leave it out here")
    if engine != "any" and previous is not None:
        remedy = "leave it out, or search a new placement"
        raise InputError("--engine", engine, "does not go with --from", remedy)
    changes = {"--lost": lost, "--added": added, "--horizon": horizon, "--load-gbyte-s": load_gbyte_s}
    if previous is not None:
        from hexgen2.replan.request import replanned

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
            make_problem(cluster, model, workload, isl, osl, *costs, goal, links or "shared", engine), options
        )
        if engine == "vllm":
            check_vllm(placement, f"the placement of {strategy}")
    wrong = violations(placement)
    if wrong:
        raise HexGen2Error(
            f"{strategy} made a wrong placement: {wrong[0][0]}: {wrong[0][1]}; please report it"
        )
    if output is not None:
        placement.save(output)
    if as_json:
        echo_json(placement.to_json())
    else:
        print_placement(placement, make_console())


def _progress():
    """Prints the best so far to stderr, at most once a second (each improvement on a terminal)."""
    started, last = time.monotonic(), float("-inf")
    on_terminal = sys.stderr.isatty()

    def show(state) -> None:
        nonlocal last
        now = time.monotonic()
        best, bound = state.incumbent.best, state.incumbent.bound
        if best is None or best.req_s <= 0 or (not on_terminal and now - last < 1.0):
            return
        last = now
        rate = state.evaluator.evaluations / max(now - started, 1e-9)
        text = f"{now - started:6.2f} s  best {best.req_s:.4g} requests/s"
        if bound is not None:
            text += f"  bound {bound.req_s:.4g} (gap {1 - best.req_s / bound.req_s:.1%})"
        text += f"  {rate:.0f} evaluations/s"
        echo(text, err=True)

    return show
