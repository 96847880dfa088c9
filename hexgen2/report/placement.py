"""Prints a placement as text and tables."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cost_model.calibrated import Calibrated
from cost_model.engines.model import ENGINES
from cost_model.printable import printable
from hexgen2.goal import Goal
from hexgen2.placement import (
    OPTIMAL,
    BoundRecord,
    FrontierPoint,
    Goodput,
    Placement,
    Rented,
    Replica,
    Route,
)
from hexgen2.report.moves import print_moves
from hexgen2.report.robustness import print_robustness

PIPED_WIDTH = 110


class PlainConsole(Console):
    """A console that is safe for untrusted text: markup and emoji codes are printed as they are, and control
    characters as escapes. Every string passes through `render_str`, table cells included."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def make_console() -> Console:
    """A console on standard output, as wide as the terminal, or PIPED_WIDTH columns if there is none."""
    console = PlainConsole(soft_wrap=True)
    return console if console.is_terminal else PlainConsole(soft_wrap=True, width=PIPED_WIDTH)


def print_placement(placement: Placement, console: Console) -> None:
    """Print what runs where, its throughput and latency, how close it is to the bound, and what is
    assumed."""
    model, workload, costs = placement.model, placement.workload, placement.cost_model
    console.print(
        f"{model.name} on {placement.cluster.name} for "
        f"{workload.name} ({workload.isl:.0f} tokens in, {workload.osl:.0f} out), "
        f"strategy {placement.strategy}, ${placement.price_per_hour:.2f}/h",
        style="bold",
    )
    console.print(_replica_table(placement))
    if placement.routes:
        console.print(_route_table(placement))
    error = "" if costs.error is None else f" +- {costs.error:.0%}"
    console.print(
        f"throughput  {placement.throughput.req_s:.4g}{error} requests/s, "
        f"{placement.throughput.output_tok_s:.5g} output tokens/s{_total_text(placement)}"
    )
    if placement.search.alternatives:
        console.print(_alternatives_text(placement))
    if caution := _ranking_caution(placement):
        console.print(caution)
    if placement.rented:
        _print_rental(placement, console)
    console.print(_bound_text(placement.bound))
    for assumption in placement.bound.assumptions:
        console.print(f"              {assumption}", style="dim")
    console.print(
        f"service     TTFT {placement.latency.ttft_ms:.4g} ms, TPOT {placement.latency.tpot_ms:.4g} ms, "
        "without queueing"
    )
    if placement.goodput:
        _print_goodput(placement.goodput, placement.goal, console)
    if placement.robustness:
        print_robustness(placement.robustness, console)
    if placement.migration:
        print_moves(placement.moves, placement.migration, compact, console)
    if placement.lost:
        console.print(f"lost        {compact(placement.lost)}")
    for bottleneck in placement.bottlenecks:
        console.print(f"bottleneck  {bottleneck}")
    console.print(
        f"cost model  {costs.name} ({costs.calibration}), pipeline stages {costs.pipeline}, "
        f"links {costs.links}: all times are predicted"
    )
    if placement.search.cut:
        console.print(f"search cut  {placement.search.cut}: a longer search may find a better placement")
    for assumption in _unmeasured(placement):
        console.print(f"assumed     {assumption}", style="dim")
    for assumption in placement.cluster.assumptions:
        console.print(f"assumed     {assumption}", style="dim")


def _total_text(placement: Placement) -> str:
    """Tokens/s of prompts and answers, where the placement states them, and what they are at most."""
    total, most = placement.throughput.total_tok_s, placement.bound.total_tok_s
    if total is None:
        return ""
    text = f", {total:.6g} tokens/s with prompts" + ("" if most is None else f" of at most {most:.6g}")
    ranges, req_s = placement.layer_ranges, placement.throughput.req_s
    if ranges is None or ranges.kept_up_req_s is None or not req_s:
        return text
    return f"{text} ({total * ranges.kept_up_req_s / req_s:.4g} once KV caches are full)"


def _alternatives_text(placement: Placement) -> str:
    """What the same cluster would serve if all replicas did one phase, or both, by formulas, and how this one
    differs."""
    others = placement.search.alternatives
    figures = [
        f"{'' if each.phases == 'flexible' else 'all '}{each.phases} {each.req_s:.4g}" for each in others
    ]
    moved = sum(route.flow_req_s for route in placement.routes if route.from_ != route.to)
    stay = 1 - moved / placement.throughput.req_s if placement.throughput.req_s else 1.0
    text = f"phases      {', '.join(figures)} requests/s by formulas"
    if stay > 0.995:
        text += ": every request ends where it began"
    else:
        text += f": {1 - stay:.0%} of the requests move to another replica for their answers"
    if any(each.phases == "disaggregated" and each.kv_limited for each in others):
        size = placement.costs().kv_bytes_per_layer * placement.model.layers
        text += f"; if all did, KV caches of {size / 1e9:.2g} GB per request would fill the links"
    return text


def _unmeasured(placement: Placement) -> list[str]:
    """What stands in for measurements of the placement's GPUs, a line for each kind."""
    costs, cards = placement.cost_model, " or ".join(placement.cost_model.unmeasured)
    if not cards:
        return []
    if costs.name in ENGINES:
        return [
            f"No server with {cards} was measured: hosts of another card of its generation, or usual ones, "
            "stand in, and where operators were not measured, those of another card."
        ]
    if costs.name == Calibrated.name:
        return [f"No step of {cards} was measured: general coefficients stand in."]
    return []


def _ranking_caution(placement: Placement) -> str | None:
    """A warning if a placement with other numbers of replicas was worse by less than the prediction error."""
    if placement.goal.rents or placement.goal.objective == "latency":
        return None
    error, best = placement.cost_model.error, placement.throughput.req_s
    kinds = ("prefill", "decode", "colocated")
    roles = [replica.role_of_group for replica in placement.replicas]
    chosen = tuple(roles.count(kind) for kind in kinds)
    rivals: dict[tuple[int, ...], float] = {}
    for step in placement.search.trace:
        makeup = tuple(step.get(f"{kind}_replicas", 0) for kind in kinds)
        if makeup != chosen and step.get("req_s", 0.0) * (1 + (error or 0.0)) >= best:
            rivals[makeup] = max(step["req_s"], rivals.get(makeup, 0.0))
    if not rivals or error is None:
        return None
    makeup = max(rivals, key=lambda other: rivals[other])
    counts = " and ".join(f"{n} {kind}" for n, kind in zip(makeup, kinds, strict=True) if n)
    return (
        f"caution     {counts} replicas reach {rivals[makeup]:.4g} requests/s, a difference within the "
        "error: measure both if it matters"
    )


def _bound_text(bound: BoundRecord) -> str:
    """The proven bound on the throughput of any placement."""
    if bound.gap <= OPTIMAL:
        return f"bound       optimal, by {bound.method}: no placement is better, given that"
    text = f"within      {bound.gap * 100:.2g} % of the best possible, at most {bound.req_s:.4g} requests/s"
    if bound.kv_free_req_s is not None and bound.kv_free_req_s > bound.req_s * (1 + OPTIMAL):
        text += f" ({bound.kv_free_req_s:.4g} if KV transfers took no time)"
    return text + f" by {bound.method}, given that"


def _print_rental(placement: Placement, console: Console) -> None:
    """Print what to rent, the cost per token, the headroom over the load, and the frontier if there is
    one."""
    price, goal = placement.price_per_hour, placement.goal
    million = price / (placement.throughput.output_tok_s * 3600 / 1e6)
    console.print(
        f"rent        {rented_text(placement.rented)}: ${price:.2f}/h, "
        f"${million:.3g} per million output tokens"
    )
    if goal.objective == "cost" and goal.request_rate is not None:
        headroom = placement.throughput.req_s / goal.request_rate - 1
        console.print(f"load        {goal.request_rate:g} requests/s, so the headroom is {headroom:.1%}")
    least = placement.bound.price_per_hour
    if least is not None:
        proven = least >= price * (1 - 1e-9)
        limit = (
            f"${least:.2f}/h is the least for this load, so nothing saves more than ${price - least:.2f}/h"
        )
        console.print(f"cheapest    {'nothing cheaper carries the load' if proven else limit}")
    if placement.frontier:
        console.print(_frontier_table(placement.frontier))


def rented_text(rented: list[Rented]) -> str:
    """For example "6 H100 + 3 A100-80GB"."""
    return " + ".join(f"{part.count} {part.accelerators}" for part in rented)


def _frontier_table(points: list[FrontierPoint]) -> Table:
    table = Table(
        "budget $/h", "price $/h", "requests/s", "output tokens/s", "$ per million", "rent", box=None
    )
    for point in points:
        table.add_row(
            f"{point.budget_per_hour:.2f}",
            f"{point.price_per_hour:.2f}",
            f"{point.req_s:.4g}",
            f"{point.output_tok_s:.5g}",
            f"{point.usd_per_million_output_tokens:.3g}",
            rented_text(point.rented),
        )
    return table


def _print_goodput(goodput: Goodput, goal: Goal, console: Console) -> None:
    """Print the goodput within the targets, and the latencies under load."""
    if goodput.goodput_req_s is not None and goodput.attainment is not None:
        asked = (("TTFT", goal.ttft_ms), ("TPOT", goal.tpot_ms))
        targets = " and ".join(f"{name} within {value:g} ms" for name, value in asked if value)
        capped = ", all that arrive" if goodput.goodput_req_s == goal.request_rate else ""
        console.print(
            f"goodput     {goodput.goodput_req_s:.4g} requests/s{capped}: {goal.attainment:.0%} of them with "
            f"{targets}; {goodput.attainment:.1%} at {goodput.request_rate:.4g} requests/s"
        )
    under = f"under load  at {goodput.request_rate:.4g} requests/s, queueing included: "
    if goodput.mean_ttft_ms is None:
        console.print(under + "queues grow without limit")
    else:
        console.print(
            f"{under}TTFT {goodput.mean_ttft_ms:.4g} ms (p90 {goodput.p90_ttft_ms:.4g}), TPOT "
            f"{goodput.mean_tpot_ms:.4g} ms, {(goodput.mean_e2el_ms or 0) / 1e3:.3g} s to the last token"
        )
    for assumption in goodput.assumptions:
        console.print(f"              {assumption}", style="dim")


def _replica_table(placement: Placement) -> Table:
    accelerators = {node.name: node.accelerators.split(":")[0] for node in placement.cluster.nodes}
    table = Table("replica", "stages (GPUs: layers)", "batch", "requests/s", "used", box=None)
    for replica in placement.replicas:
        table.add_row(
            replica.id,
            stages_text(replica, accelerators) + _workers_text(placement, replica, accelerators),
            str(replica.max_batch),
            f"{replica.capacity_req_s:.4g}",
            f"{replica.utilisation:.0%}",
        )
    return table


def stages_text(replica: Replica, accelerators: dict[str, str]) -> str:
    """For example "2xH100 pod-a/0-1: 0-53 | 1xA100 pod-b/3: 54-79"."""
    return " | ".join(
        f"{len(stage.gpus)}x{accelerators[stage.gpus[0].split('/')[0]]} {compact(stage.gpus)}"
        f"{'' if stage.shape == f'tp{len(stage.gpus)}' else f' {stage.shape}'}: "
        f"{stage.layers[0]}-{stage.layers[1] - 1}"
        for stage in replica.stages
    )


def _workers_text(placement: Placement, replica: Replica, accelerators: dict[str, str]) -> str:
    """For example " + attention on 2xP100 pod-c/0-1"; empty without attention workers."""
    workers = [worker.gpu for worker in placement.workers_of(replica.id)]
    types = groupby(workers, key=lambda gpu: accelerators[gpu.split("/")[0]])
    parts = [(name, list(gpus)) for name, gpus in types]
    text = ", ".join(f"{len(gpus)}x{name} {compact(gpus)}" for name, gpus in parts)
    return f" + attention on {text}" if text else ""


def compact(gpus: list[str]) -> str:
    """GPU ids with each node named once: ["a/0", "a/1"] becomes "a/0-1"."""
    parts = []
    for node, members in groupby(gpus, key=lambda gpu: gpu.rsplit("/", 1)[0]):
        numbers = [int(re.sub(r".*/", "", gpu)) for gpu in members]
        run = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        text = f"{numbers[0]}-{numbers[-1]}" if run and len(numbers) > 1 else ",".join(map(str, numbers))
        parts.append(f"{node}/{text}")
    return " ".join(parts)


def _prompts_of(route: Route) -> str:
    """Which prompts take the route, if not all."""
    return f" (prompts from {route.min_prompt_tokens} tokens)" if route.min_prompt_tokens else ""


def _route_table(placement: Placement) -> Table:
    carried = "KV" if placement.layer_ranges is None else "activations"
    table = Table(f"{carried} route", "requests/s", "of at most", f"{carried} per request", box=None)
    for route in placement.routes:
        table.add_row(
            f"{route.from_} -> {route.to}" + _prompts_of(route),
            f"{route.flow_req_s:.4g}",
            f"{route.capacity_req_s:.4g}",
            f"{route.kv_bytes_per_req / 1e6:.4g} MB",
        )
    return table
