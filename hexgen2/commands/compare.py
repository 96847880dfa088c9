"""`hexgen2 compare`: strategies side by side, planned and simulated."""

from __future__ import annotations

import json
from pathlib import Path

import click

from cost_model.errors import InputError
from cost_model.pipeline import PIPELINE_SEMANTICS
from cost_model.registry import COST_MODELS
from hexgen2.commands.options import POSITIVE, SEED, Number
from hexgen2.terminal import echo, echo_json

STRATEGIES = "hexgen2,hexgen,splitwise,vllm"


@click.command()
@click.option("--cluster", required=True, help="A shipped cluster or a YAML file.")
@click.option("--model", required=True, help="A shipped model or a folder with a config.json.")
@click.option(
    "--workload", required=True, help="Shipped classes or traces, separated by commas: each is one row."
)
@click.option(
    "--strategies",
    default=STRATEGIES,
    show_default=True,
    help="Separated by commas; NAME@CLUSTER gives one a cluster of its own (of equal price, say), "
    "NAME:POLICY another engine (see `simulate --policy`).",
)
@click.option(
    "--share", type=Number(0.01, 0.99), default=0.75, show_default=True, help="Of the peak, online."
)
@click.option("--seconds", type=POSITIVE, default=300.0, show_default=True, help="Of load in a simulation.")
@click.option("--cost-model", type=click.Choice(list(COST_MODELS)), default="calibrated", show_default=True)
@click.option("--pipeline", type=click.Choice(PIPELINE_SEMANTICS), default="pipelined", show_default=True)
@click.option("--links", type=click.Choice(["shared", "pairwise"]), default="shared", show_default=True)
@click.option("--time-limit", type=POSITIVE, help="Seconds of each search.")
@click.option("--seed", type=SEED, default=0, show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder for CSV, JSON and plots.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def compare(
    cluster: str,
    model: str,
    workload: str,
    strategies: str,
    share: float,
    seconds: float,
    cost_model: str,
    pipeline: str,
    links: str,
    time_limit: float | None,
    seed: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Compare strategies: plan each by its own rules, simulate all under the same requests."""
    from hexgen2.comparison.contenders import parse_contenders
    from hexgen2.comparison.report import print_comparison, rows, write_comparison
    from hexgen2.comparison.run import Settings
    from hexgen2.comparison.run import compare as run
    from hexgen2.report.placement import make_console

    if output is not None and output.exists() and not output.is_dir():
        raise InputError(str(output), "", "is a file", "name a folder")
    settings = Settings(model, seed, share, seconds, cost_model, pipeline, links, time_limit)
    workloads = [name.strip() for name in workload.split(",") if name.strip()]
    contenders = parse_contenders(strategies, cluster)
    entries = run(contenders, workloads, settings, lambda text: echo(text, err=True))
    if output is not None:
        for path in write_comparison(entries, settings, output):
            echo(f"wrote {path}", err=True)
    if as_json:
        echo_json(json.dumps(rows(entries), indent=1))
    else:
        print_comparison(entries, settings, make_console())
