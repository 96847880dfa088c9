"""A search's answer with the promise that goes with it: what the simulator shows of what formulas plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from hexgen2.checks import traffic_of
from hexgen2.cluster import Cluster
from hexgen2.placement import Goodput, Placement
from hexgen2.promise.finalists import Effort, choose, residents
from hexgen2.promise.full_load import TOLERATED, formulas_do, simulated_factor
from hexgen2.promise.goodput import Found
from hexgen2.promise.trial import OutOfTimeError, Trial, Trials
from hexgen2.search.background import Ahead
from hexgen2.search.finalists import SIMPLER_UNSEEN
from hexgen2.search.ties import exceeds

DEFAULT_EFFORT = Effort()
NEARLY_FULL = 0.9
"""KV caches wait for a link that is busy for this share of the time, which formulas do not know."""
BETTER_YET = 1.03
"""So many times what is planned a placement may serve: one that would still be behind is not simulated."""
SIMPLER = 1.002
"""What a request/s is worth of a placement in which no replica works for others."""
CORRECTED = "queues by formulas, {:+.1%} as simulated"
AT_FULL_LOAD = "full load by formulas, {:+.1%} as simulated"


def with_promise(
    placements: Sequence[Placement],
    cluster: Cluster,
    seed: int,
    stop: Callable[[], bool],
    effort: Effort = DEFAULT_EFFORT,
) -> Placement:
    """The best of the finalists by simulation, with what it is promised to do.

    Without targets and request_rate, it is the one of the greatest requests/s at full load.

    Parameters
    ----------
    placements : best first by formulas, all made for the same goal
    stop : whether to end with what is known
    """
    goal = placements[0].goal
    if goal.objective == "latency":
        placements = [_quickest(placements, cluster, seed, stop, effort)]
    if goal.ttft_ms is None and goal.tpot_ms is None:
        if goal.request_rate is not None:
            return _at_rate(placements[0], cluster, seed, effort, stop)
        if stop():
            return placements[0]
        return _best_at_full_load(placements, cluster, seed, stop)
    compared = placements if goal.objective == "goodput" else placements[:1]
    chosen = choose(compared, cluster, goal, seed, stop, effort)
    if chosen is None:
        return placements[0]
    best, found = chosen.placement, chosen.goodput
    if goal.objective == "goodput" and found.req_s > 0 and found.req_s != goal.request_rate:
        # No run shows for long what links cannot carry.
        most = found.req_s if goal.request_rate is None else min(found.req_s, goal.request_rate)
        carried = min(most, best.throughput.req_s / _fullest(best, cluster))
        found = replace(found, req_s=carried, low_req_s=min(carried, found.low_req_s))
        best = scaled(best, carried / best.throughput.req_s)
    at_rate = None
    if goal.request_rate is not None:
        try:
            at_rate = _run_at(goal.request_rate, best, found, cluster, seed, effort, stop)
        except OutOfTimeError:
            at_rate = None
    return best.model_copy(update={"goodput": _record(best, found, at_rate)})


def _best_at_full_load(
    placements: Sequence[Placement], cluster: Cluster, seed: int, stop: Callable[[], bool]
) -> Placement:
    """The placement that serves most in the simulator, with the requests/s from there if formulas are off."""
    planned = [placement.throughput.req_s for placement in placements]
    best, most_req_s, seen = placements[0], 0.0, False
    with Ahead(
        [partial(simulated_factor, each, cluster, seed, stop) for each in placements], stop
    ) as factors:
        for k, (placement, req_s) in enumerate(zip(placements, planned, strict=True)):
            if most_req_s and req_s * BETTER_YET <= most_req_s:
                continue
            fullest = _fullest(placement, cluster)
            known = formulas_do(placement) and fullest < NEARLY_FULL
            if known and not most_req_s and all(other * BETTER_YET <= req_s for other in planned[1:]):
                return placement
            factor = factors.result(k)
            seen = seen or factor is not None
            if factor is None and seen:
                continue
            better = SIMPLER if factor is not None else 1 / SIMPLER_UNSEEN
            factor = 1.0 if factor is None else factor
            if factor > 1:  # No route may carry more than its links do.
                factor = max(1.0, min(factor, 1 / fullest))
            simpler = all(replica.role != "mixed" for replica in placement.replicas)
            served_req_s = req_s * factor * (better if simpler else 1.0)
            if exceeds(served_req_s, most_req_s):
                close = known or abs(factor - 1) <= TOLERATED
                best = placement if close else scaled(placement, factor, AT_FULL_LOAD)
                most_req_s = served_req_s
    return best


def _run_at(
    rate: float,
    placement: Placement,
    found: Found,
    cluster: Cluster,
    seed: int,
    effort: Effort,
    stop: Callable[[], bool],
) -> Trial:
    """A run at that rate: one of those that the goodput rests on, or one more (OutOfTimeError: there is no
    time for it)."""
    carried = rate <= placement.throughput.req_s  # Then a run that was ended early says too little.
    runs = (trial for trial in reversed(found.trials) if trial.rate == rate and (trial.whole or not carried))
    known = next(runs, None)
    trials = Trials(placement, cluster, placement.goal, 2 * seed + 1, stop=stop)
    return known or trials.run(rate, effort.final, 0, to_its_end=carried)


def _quickest(
    placements: Sequence[Placement], cluster: Cluster, seed: int, stop: Callable[[], bool], effort: Effort
) -> Placement:
    """The placement whose requests take the least time on average at the goal's request_rate, of those that
    keep the goal's targets if any do. All serve the same requests."""
    rate, best = placements[0].goal.request_rate, placements[0]
    assert rate is not None
    count = max(effort.first, int(min(effort.most, effort.first_residents * residents(best, rate))))
    least: tuple[bool, float] | None = None
    for placement in placements:
        if stop():
            break
        try:
            trial = Trials(placement, cluster, placement.goal, seed, stop=stop).run(rate, count, 0)
        except OutOfTimeError:
            break
        found = trial.share < placement.goal.attainment, trial.mean_e2el_s
        if least is None or found < least:
            best, least = placement, found
    return best


def _fullest(placement: Placement, cluster: Cluster) -> float:
    """The largest share of the time for which the placement's flows occupy a link, card, uplink or port;
    very little where routes do not share links."""
    if placement.cost_model.links != "shared":
        return 1e-9
    traffic = traffic_of(cluster, placement.costs(), placement.replicas, placement.routes)
    return max([1e-9, *traffic.shares.values()])


def _at_rate(
    placement: Placement, cluster: Cluster, seed: int, effort: Effort, stop: Callable[[], bool]
) -> Placement:
    """The placement with the latencies at the goal's request_rate; without them if there is no time."""
    rate = placement.goal.request_rate
    assert rate is not None
    carried, trial = rate < placement.throughput.req_s, None
    if carried:
        try:
            trial = Trials(placement, cluster, placement.goal, seed, stop=stop).run(rate, effort.final, 0)
        except OutOfTimeError:
            return placement
    record = Goodput(
        request_rate=rate,
        goodput_req_s=None,
        attainment=None,
        **_latencies(trial),
        assumptions=_assumptions(effort.final if carried else 0),
    )
    return placement.model_copy(update={"goodput": record})


def _record(placement: Placement, found: Found, at_rate: Trial | None) -> Goodput:
    """What is promised; the latencies are those of the run at the goal's rate, or next to the goodput where
    there was none."""
    goal = placement.goal
    rate = found.req_s if at_rate is None else at_rate.rate
    shown = at_rate or min(found.trials, key=lambda trial: abs(trial.rate - rate), default=None)
    attained = goal.attainment if found.req_s > 0 else 0.0
    return Goodput(
        request_rate=rate,
        goodput_req_s=found.req_s,
        attainment=attained if at_rate is None else at_rate.share,
        **_latencies(shown if shown and shown.whole and shown.kept_up else None),
        interval_req_s=(found.low_req_s, found.high_req_s),
        assumptions=_assumptions(sum(len(trial.in_time) for trial in found.trials)),
    )


def _latencies(trial: Trial | None) -> dict[str, Any]:
    """Latencies of a run in ms, by the names of Goodput; None where there is no run."""
    names = ("mean_ttft_ms", "p90_ttft_ms", "mean_tpot_ms", "mean_e2el_ms")
    if trial is None:
        return dict.fromkeys(names)
    p90_s = float(np.sort(trial.ttft_s)[math.ceil(0.9 * len(trial.ttft_s)) - 1])
    ttft_s, tpot_s, e2el_s = (
        math.fsum(v.tolist()) / len(v) for v in (trial.ttft_s, trial.tpot_s, trial.e2el_s)
    )
    return {n: 1e3 * s for n, s in zip(names, (ttft_s, p90_s, tpot_s, e2el_s), strict=True)}


def _assumptions(requests: int) -> list[str]:
    if not requests:
        return ["more requests arrive than the placement carries"]
    return [
        f"{requests} requests were simulated, which arrive at random (Poisson) at an idle fleet",
        "the times of steps and transfers are those of the cost model, without its error",
    ]


def scaled(placement: Placement, factor: float, why: str = CORRECTED) -> Placement:
    """The placement with all its requests/s times a factor that a simulation has found. A bound that rests on
    the same formulas is raised with them, not lowered."""
    routes = [
        route.model_copy(
            update={
                "flow_req_s": route.flow_req_s * factor,
                "capacity_req_s": route.capacity_req_s * factor,
            }
        )
        for route in placement.routes
    ]
    replicas = [
        r.model_copy(
            update={
                "capacity_req_s": r.capacity_req_s * factor,
                "region": r.region and [(p * factor, d * factor) for p, d in r.region],
            }
        )
        for r in placement.replicas
    ]
    throughput, bound = placement.throughput, placement.bound
    req_s, most = throughput.req_s * factor, bound.req_s * max(1.0, factor)
    corrected = [why.format(factor - 1)] if factor > 1 else []
    gap = 1 - req_s / most if most > 0 else 0.0
    return placement.model_copy(
        update={
            "replicas": replicas,
            "routes": routes,
            "throughput": throughput.model_copy(
                update={"req_s": req_s, "output_tok_s": throughput.output_tok_s * factor}
            ),
            "bound": bound.model_copy(
                update={
                    "req_s": most,
                    "gap": gap if gap > 1e-9 else 0.0,
                    "assumptions": [*bound.assumptions, *corrected],
                }
            ),
        }
    )
