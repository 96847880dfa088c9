"""`hexgen2 compare`: strategies side by side, planned and simulated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

import hexgen2
from cost_model.errors import InputError
from cost_model.pipeline import PIPELINE_SEMANTICS
from cost_model.registry import DEFAULT
from hexgen2.api import STRATEGIES
from hexgen2.commands.options import (
    PATH,
    POSITIVE,
    SEED,
    Command,
    Number,
    cost_model_option,
    format_options,
    json_option,
    options,
)
from hexgen2.terminal import echo_json, note, silence_libraries


class Targets(click.ParamType):
    """Targets in ms, separated by commas."""

    name = "targets"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[float, ...]:
        if not isinstance(value, str):
            return value
        words = [word for word in value.split(",") if word.strip()]
        if not words:
            self.fail("no target is given.", param, ctx)
        return tuple(POSITIVE.convert(word, param, ctx) for word in words)


TARGETS = Targets()

_what = options("What to compare")
_how = options("How to measure")
_output = options("Output")
_detail = options("Modelling details")


@click.command(
    cls=Command,
    short_help="Plan with several strategies and simulate them all.",
    examples=(
        "hexgen2 compare --cluster hexgen2-setting-1 --model llama-2-70b --workload HPLD,LPHD -o comparison",
        "hexgen2 compare --cluster hexgen2-setting-1 --model opt-30b --workload online \\\n"
        "      --strategies hexgen2,vllm@hexgen2-homogeneous",
        "hexgen2 compare --cluster hexgen2-case-study --model llama-2-13b --workload online \\\n"
        "      --strategies hexgen2 --ttft 2000 --tpot 20,40,80",
    ),
)
@_what("--cluster", required=True, metavar="NAME|FILE", help="Shipped cluster, or YAML file.")
@_what("--model", required=True, metavar="NAME|DIR", help="Shipped model, or folder with a config.json.")
@_what(
    "--workload",
    required=True,
    metavar="NAME|FILE,...",
    help="Shipped classes or traces, separated by commas; each is compared on its own.",
)
@_what(
    "--strategies",
    default=STRATEGIES,
    show_default=True,
    metavar="NAME,...",
    help="NAME@CLUSTER gives a strategy its own cluster (of equal price, say), NAME:POLICY its own batching "
    "policy (see `simulate --policy`), hexgen2:PHASES its choice of phases (see `search --phases`).",
)
@_how(
    "--share",
    type=Number(0.01, 0.99),
    default=0.75,
    show_default=True,
    metavar="SHARE",
    help="Online load, as a share of the peak throughput.",
)
@_how(
    "--seconds", type=POSITIVE, default=300.0, show_default=True, metavar="S", help="Load in each simulation."
)
@_how(
    "--tpot",
    "tpots_ms",
    type=TARGETS,
    default=(),
    metavar="MS,...",
    help="Also list the goodput of replicas that do one phase, both, or whatever serves most, within each of "
    "these targets per output token: from which on splitting pays.",
)
@_how("--ttft", "ttft_ms", type=POSITIVE, metavar="MS", help="Target for the first token in that list.")
@_how("--time-limit", "time_limit_s", type=POSITIVE, metavar="S", help="Time limit for each search.")
@_how(
    "--seed", type=SEED, default=0, show_default=True, metavar="N", help="Seed for searches and simulations."
)
@_output(
    "-o",
    "--output",
    type=PATH,
    metavar="DIR",
    help="Write tables (CSV), placements and results (JSON) and plots to DIR.",
)
@json_option("comparison")
@format_options
@cost_model_option("Modelling details", DEFAULT)
@_detail(
    "--pipeline",
    type=click.Choice(PIPELINE_SEMANTICS),
    default="pipelined",
    show_default=True,
    help="How the times of pipeline stages add up.",
)
@_detail(
    "--links",
    type=click.Choice(["shared", "pairwise"]),
    default="shared",
    show_default=True,
    help="Whether KV routes share links, or each has its links to itself.",
)
def compare(output: Path | None, as_json: bool, **asked: Any) -> None:
    """Compare strategies: plan by each one's own rules, simulate all under the same requests."""
    from hexgen2.comparison.report import print_comparison, write_comparison
    from hexgen2.report.placement import make_console

    if output is not None and output.exists() and not output.is_dir():
        raise InputError(str(output), "", "is a file", "name a folder")
    given = {name: value for name, value in asked.items() if value is not None}
    silence_libraries()
    found = hexgen2.compare(**given, progress=note)
    if output is not None:
        for path in write_comparison(found, output):
            note(f"wrote {path}")
    if as_json:
        echo_json(json.dumps(found.rows(), indent=1))
    else:
        print_comparison(found, make_console())
