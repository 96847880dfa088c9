"""A placement whose remote prefill takes the long prompts, beside replicas that prefill the short ones alone.

A short prompt gains little from being computed elsewhere and sent; a long one disturbs the requests that
decode. So where a mixed replica has a route to itself and others lead to it, the others get as many prompt
tokens as planned, but of long prompts: fewer requests. Formulas do not know what that is worth; a simulation
shows it.
"""

from __future__ import annotations

import math
from collections import defaultdict

from hexgen2.checks import TOLERANCE, factors_of, violations
from hexgen2.placement import Placement, Replica, Route
from hexgen2.workload.lengths import Workload
from hexgen2.workload.prompt_limits import Pair, divided, long_prompts


def split_by_length(placement: Placement) -> Placement | None:
    """The placement with limits for the prompts of remote routes; None where there is nothing to split, or
    where its replicas cannot carry that."""
    limits = _limits(placement)
    if not limits:
        return None
    flows = {(r.from_, r.to): r.flow_req_s for r in placement.routes}
    flows, kept = divided(placement.workload.lengths, flows, limits)
    if not kept:
        return None
    found = _with_flows(placement, flows, kept)
    return None if violations(found) else found


def _limits(placement: Placement) -> dict[Pair, int]:
    """The fewest prompt tokens of each route that should have only long ones."""
    found: dict[Pair, int] = {}
    for replica in placement.replicas:
        local = [r for r in placement.routes if r.from_ == r.to == replica.id and r.flow_req_s > 0]
        remote = [r for r in placement.routes if r.to == replica.id and r.from_ != r.to and r.flow_req_s > 0]
        if replica.role != "mixed" or not local or not remote:
            continue
        far = math.fsum(route.flow_req_s for route in remote)
        least = _threshold(placement.workload, far / (far + local[0].flow_req_s))
        if least is not None:
            found |= {(route.from_, route.to): least for route in remote}
    return found


def _threshold(workload: Workload, share: float) -> int | None:
    """The largest length such that prompts at least that long have this share of all prompt tokens; None if
    only the shortest is."""
    lengths = sorted({int(c.isl) for c in workload.classes})
    for least in reversed(lengths[1:]):
        part, factor = long_prompts(workload.lengths, least)
        if part * factor >= share:
            return least
    return None


def _with_flows(placement: Placement, flows: dict[Pair, float], limits: dict[Pair, int]) -> Placement:
    """The placement with these flows, all by so much less that no replica is too busy."""
    routes = [_limited(r, flows[r.from_, r.to], limits.get((r.from_, r.to), 0)) for r in placement.routes]
    busiest = max([1.0, *_busy(placement, routes).values()])
    if busiest > 1 + TOLERANCE / 2:
        routes = [_limited(r, r.flow_req_s / busiest, r.min_prompt_tokens) for r in routes]
    busy = _busy(placement, routes)
    replicas = [
        r if r.role == "colocated" else r.model_copy(update={"utilisation": busy[r.id]})
        for r in placement.replicas
    ]
    carried = math.fsum(route.flow_req_s for route in routes)
    carried += math.fsum(r.utilisation * r.capacity_req_s for r in replicas if r.role == "colocated")
    throughput, bound = placement.throughput, placement.bound
    return placement.model_copy(
        update={
            "replicas": replicas,
            "routes": routes,
            "throughput": throughput.model_copy(
                update={
                    "req_s": carried,
                    "output_tok_s": throughput.output_tok_s * carried / throughput.req_s,
                }
            ),
            "bound": bound.model_copy(update={"gap": max(0.0, 1 - carried / bound.req_s)}),
        }
    )


def _limited(route: Route, flow_req_s: float, least: int) -> Route:
    """The route with that flow; one of a mixed replica to itself carries what the replica does."""
    update: dict[str, float | int] = {"flow_req_s": flow_req_s, "min_prompt_tokens": least}
    if route.from_ == route.to:
        update["capacity_req_s"] = max(route.capacity_req_s, flow_req_s)
    return route.model_copy(update=update)


def _busy(placement: Placement, routes: list[Route]) -> dict[str, float]:
    """The utilisation of each replica that is not colocated."""
    prompts: dict[str, float] = defaultdict(float)
    answers: dict[str, float] = defaultdict(float)
    factors = factors_of(placement.workload.lengths, placement.replicas, routes)
    for route, factor in zip(routes, factors, strict=True):
        prompts[route.from_] += route.flow_req_s * factor
        answers[route.to] += route.flow_req_s

    def busy(replica: Replica) -> float:
        if replica.role == "mixed":
            return replica.busy(prompts[replica.id], answers[replica.id])
        return (prompts[replica.id] + answers[replica.id]) / replica.capacity_req_s

    return {r.id: busy(r) for r in placement.replicas if r.role != "colocated"}
