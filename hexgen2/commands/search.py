"""`hexgen2 search`: finds a placement for a cluster, a model and a workload."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

import hexgen2
from cost_model.errors import InputError
from cost_model.pipeline import PIPELINE_SEMANTICS
from cost_model.registry import DEFAULT
from hexgen2.commands.options import (
    PATH,
    POSITIVE,
    SEED,
    Command,
    check_folder,
    cost_model_option,
    format_options,
    json_option,
    options,
    output_option,
)
from hexgen2.goal import OBJECTIVES, SMALLEST, Goal, make_goal
from hexgen2.terminal import BEGAN_S, NOTHING_LEFT, echo_json, note, silence_libraries

_what = options("What to place")
_goal = options("What to optimise")
_how = options("How to search")
_again = options("Re-planning a running placement")
_detail = options("Modelling details")


@click.command(
    cls=Command,
    short_help="Find a placement.",
    examples=(
        "hexgen2 search --cluster hexgen2-setting-1 --model llama-2-70b --workload HPLD -o placement.json",
        "hexgen2 search --cluster hexgen2-offers --model opt-30b --workload online --budget 12",
        "hexgen2 search --from placement.json --lost h100-1/0 -o next.json",
    ),
)
@_what("--cluster", metavar="NAME|FILE", help="Shipped cluster (`hexgen2 list clusters`), or YAML file.")
@_what("--model", metavar="NAME|DIR", help="Shipped model, or folder with a Hugging Face config.json.")
@_what(
    "--workload",
    metavar="NAME|FILE",
    help="Shipped class, shares of several (HPLD:2,LPHD:1), or trace file (Azure CSV, Mooncake JSONL, "
    "ShareGPT JSON).",
)
@_what(
    "--case",
    metavar="FILE#NAME",
    help="Measured tables of tokens/s instead of --cluster and --model, for --strategy helix, petals, swarm "
    "and separate-pipelines (docs/strategies.md).",
)
@_what("--isl", type=float, metavar="TOKENS", help="Mean prompt length, instead of --workload.")
@_what("--osl", type=float, metavar="TOKENS", help="Mean output length, instead of --workload.")
@_goal(
    "--objective",
    type=click.Choice(OBJECTIVES),
    default="throughput",
    show_default=True,
    help="goodput needs --ttft or --tpot; cost and latency need --request-rate.",
)
@_goal("--request-rate", type=POSITIVE, metavar="RATE", help="Requests/s that arrive, at random.")
@_goal("--ttft", "ttft_ms", type=POSITIVE, metavar="MS", help="Target for the time to first token.")
@_goal("--tpot", "tpot_ms", type=POSITIVE, metavar="MS", help="Target for the time per output token.")
@_goal(
    "--budget",
    "budget_per_hour",
    type=POSITIVE,
    metavar="DOLLARS",
    help="Choose what to rent from the cluster's nodes and offers, for at most this price per hour.",
)
@_goal(
    "--frontier",
    type=click.IntRange(min=2, max=1000),
    is_flag=False,
    flag_value=8,
    metavar="[N]",
    help="Also list the best rental at N prices up to --budget; 8 if N is not given.",
)
@_how(
    "--strategy", default="hexgen2", show_default=True, metavar="NAME", help="See `hexgen2 list strategies`."
)
@_how(
    "--time-limit",
    "time_limit_s",
    type=POSITIVE,
    metavar="S",
    help="Stop after S seconds with the best placement found. Ctrl-C does the same at any time.",
)
@_how(
    "--seed",
    type=SEED,
    default=0,
    show_default=True,
    metavar="N",
    help="Random seed; the same seed gives the same placement.",
)
@_how(
    "--certify",
    is_flag=True,
    help="Spend some extra seconds on proving how close to optimal the placement is.",
)
@_how(
    "--robust",
    is_flag=True,
    help="Of the best placements found, take the one that fares best where predicted times and bandwidths "
    "are off by as much as they may be. Takes up to a few minutes more.",
)
@output_option("placement")
@json_option("placement")
@_again(
    "--from",
    "previous",
    type=PATH,
    metavar="FILE",
    help="The running placement. Options that are not given keep its values.",
)
@_again("--lost", metavar="GPU,...", help="GPUs or nodes that are out of service.")
@_again("--added", metavar="GPU,...", help="GPUs or nodes that are back, or new.")
@_again(
    "--horizon",
    "horizon_s",
    type=POSITIVE,
    metavar="S",
    help="How long the new plan will serve.  [default: 3600]",
)
@_again(
    "--load-gbyte-s",
    type=POSITIVE,
    metavar="GB/S",
    help="Speed at which each GPU loads weights.  [default: 2, assumed]",
)
@format_options
@cost_model_option("Modelling details", f"{DEFAULT}; with --from: the placement's")
@_detail(
    "--pipeline",
    type=click.Choice(PIPELINE_SEMANTICS),
    help="How the times of pipeline stages add up.  [default: pipelined; with --from: the placement's]",
)
@_detail(
    "--links",
    type=click.Choice(["shared", "pairwise"]),
    help="Whether KV routes share links, network cards and uplinks, or each has its links to itself.  "
    "[default: shared; with --from: the placement's]",
)
@_detail(
    "--engine",
    type=click.Choice(["any", "vllm"]),
    default="any",
    show_default=True,
    help="vllm: use only replicas that vLLM can run.",
)
@_detail(
    "--phases",
    type=click.Choice(["flexible", "disaggregated", "colocated"]),
    help="Replicas prefill or decode (disaggregated); do both, each for its own requests (colocated); or "
    "whatever serves most, also for one another (flexible).  [default: flexible; the strategy's own for all "
    "but hexgen2 and exact]",
)
@_detail(
    "--partial-inference",
    type=click.Choice(["on", "off"]),
    help="With ranges of layers: whether requests may skip layers of a node that they have passed.  "
    "[default: on]",
)
@_detail(
    "--latency-aware",
    is_flag=True,
    help="With --strategy helix: maximise what is kept up once KV caches are full, in place of the flow.",
)
def search(output: Path | None, as_json: bool, previous: Path | None, **asked: Any) -> str:
    """Find a placement: which GPUs form which replica, how each is parallelised, how KV caches flow."""
    from hexgen2.search.stopping import ctrl_c_ends_searches
    from hexgen2.strategies.registry import find_strategy

    find_strategy(asked["strategy"])
    check_folder(output)
    silence_libraries()
    asked["progress"] = _progress()
    if asked["time_limit_s"] is not None:  # It counts from the start of the command.
        asked["time_limit_s"] = max(SMALLEST, asked["time_limit_s"] - (time.monotonic() - BEGAN_S))
    with ctrl_c_ends_searches():
        placement = _new(**asked) if previous is None else _next(previous, **asked)
    if output is not None:
        placement.save(output)
    if as_json:
        echo_json(placement.to_json())
    else:
        from hexgen2.report.placement import make_console, print_placement

        print_placement(placement, make_console())
    return NOTHING_LEFT


def _new(lost: str, added: str, horizon_s: float, load_gbyte_s: float, **asked: Any):
    """A placement from scratch."""
    changes = {"--lost": lost, "--added": added, "--horizon": horizon_s, "--load-gbyte-s": load_gbyte_s}
    for option, value in changes.items():
        if value is not None:
            raise InputError(option, "", "is for re-planning", "name the running placement with --from")
    if asked["partial_inference"] is not None:
        asked["partial_inference"] = asked["partial_inference"] == "on"
    for name in ("cluster", "model"):
        if asked[name] is None and asked["case"] is None:
            raise InputError(f"--{name}", "", "is missing", "name one, or re-plan a placement with --from")
    return hexgen2.search(**_given(asked))


def _next(
    previous: Path,
    strategy: str,
    certify: bool,
    robust: bool,
    engine: str,
    phases: str | None,
    case: str | None,
    partial_inference: str | None,
    latency_aware: bool,
    **asked: Any,
):
    """A placement to switch to from a running one."""
    from hexgen2.replan.search import NAME

    if certify:
        raise InputError("--certify", "", "only works with a plain search by hexgen2", "leave it out here")
    if robust:
        raise InputError("--robust", "", "does not go with --from", "leave it out, or search a new placement")
    for option, value in (("--case", case), ("--partial-inference", partial_inference)):
        if value is not None:
            raise InputError(
                option, value, "does not go with --from", "leave it out, or search a new placement"
            )
    if latency_aware:
        remedy = "leave it out, or search a new placement"
        raise InputError("--latency-aware", "", "does not go with --from", remedy)
    if engine != "any":
        remedy = "leave it out, or search a new placement"
        raise InputError("--engine", engine, "does not go with --from", remedy)
    if phases is not None:
        remedy = "leave it out, or search a new placement"
        raise InputError("--phases", phases, "does not go with --from", remedy)
    if strategy != NAME:
        raise InputError("--strategy", strategy, "cannot re-plan", f"leave it out: {NAME} does")
    goal = ("objective", "request_rate", "ttft_ms", "tpot_ms", "budget_per_hour", "frontier")
    if make_goal(**{name: asked.pop(name) for name in goal}) != Goal():
        problem, remedy = "re-planning can only optimise throughput", "leave the goal out"
        raise InputError("--objective", "", problem, f"{remedy}, or run a new search without --from")
    return hexgen2.replan(previous, **_given(asked))


def _given(asked: dict[str, Any]) -> dict[str, Any]:
    """The options that were given; the functions have defaults for the others."""
    return {name: value for name, value in asked.items() if value is not None}


def _progress():
    """Print the best result so far to stderr, at most once a second (each improvement on a terminal)."""
    started, last = time.monotonic(), float("-inf")
    on_terminal = sys.stderr.isatty()

    def show(state) -> None:
        nonlocal last
        now = time.monotonic()
        best_req_s, bound_req_s = state.best_req_s, state.bound_req_s
        if best_req_s <= 0 or (not on_terminal and now - last < 1.0):
            return
        last = now
        rate = state.evaluations / max(now - started, 1e-9)
        text = f"{now - started:6.2f} s  best {best_req_s:.4g} requests/s"
        if bound_req_s is not None:
            text += f"  bound {bound_req_s:.4g} (gap {1 - best_req_s / bound_req_s:.1%})"
        text += f"  {rate:.0f} evaluations/s"
        note(text)

    return show
