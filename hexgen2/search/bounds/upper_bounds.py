"""Upper bounds on the throughput of any placement, each with what it assumes.

The bound by rates: every GPU works alone at its best, and nothing is ever sent. Let p_d and q_d be the
requests/s that GPU d can prefill and decode, at the batch that suits it best. A stage of n GPUs is never
faster than n times its slowest GPU alone, and all layers pass every request; so the throughput F of any
placement satisfies

    F <= sum_d x_d p_d   and   F <= sum_d (1 - x_d) q_d   for some 0 <= x_d <= 1.

The largest such F is a fractional knapsack: GPUs prefill in the order of p_d / q_d.

A GPU of a colocated replica may mix both phases in its steps, which lets prompts ride on the weights that
decodes read anyway: then it serves r_d requests/s, more than dividing its time would give. With GPUs that
divide their time between all three, the dual of the linear program is F = min over l in [0, 1] of
sum_d max(l p_d, (1 - l) q_d, r_d).

The bounds by programs (configuration_lp.py) know what replicas really do, and where KV caches have to go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cost_model.base import TensorGroup
from cost_model.hardware import NO_LINK, Accelerator
from cost_model.pipeline import CHUNKS, mixed_decodes, mixed_request_s
from hexgen2.placement import BoundRecord
from hexgen2.region import Region
from hexgen2.search.knapsack import most_served
from hexgen2.search.problem import Problem
from hexgen2.search.ties import greatest_first

BATCH_SHARES = (1.0, 0.75, 0.5, 0.25, 0.1)
"""Shares of the largest batch at which mixed steps of a single GPU are looked at."""
SOLVERS_TOLERANCE = 2e-5
"""Relative, of values of linear and integer programs: up to 1e-6 for each row."""
ROUNDING = 1e-9
"""A gap below this is that of floating point."""
Found = TypeVar("Found")


@dataclass(frozen=True)
class UpperBound:
    """Requests/s that no placement exceeds, under the assumptions.

    Attributes
    ----------
    method : how it was found (see BoundRecord)
    kv_free_req_s : what the linear program gives if KV transfers take no time; None if it was not solved
    """

    req_s: float
    method: str
    assumptions: tuple[str, ...]
    kv_free_req_s: float | None = None

    def record(self, req_s: float) -> BoundRecord:
        """The `bound` of a placement that carries so many requests/s. Solvers may put a bound below what is
        carried by their tolerance; by more, it is wrong, and the placement's checkers say so."""
        gap = 1 - req_s / self.req_s if self.req_s > 0 else 0.0
        return BoundRecord(
            req_s=req_s if -SOLVERS_TOLERANCE < gap < 0 else self.req_s,
            gap=gap if gap > ROUNDING else 0.0,
            method=self.method,  # type: ignore[arg-type]
            kv_free_req_s=self.kv_free_req_s,
            assumptions=list(self.assumptions),
        )


def rates_bound(problem: Problem, colocated: bool | None = None) -> UpperBound:
    """The bound by rates (see above), of placements that may have colocated replicas, or do not; by default
    as the problem says."""
    if colocated is None:
        colocated = "colocated" in problem.roles
    batch = decode_batch_limit(problem)
    assumptions = (
        "KV transfers take no time",
        "no communication or idle time inside a replica, and no LM head",
        "each GPU, or its time, can be divided between prefill and decode",
        f"every decode step runs {batch} requests (the batch cap, or what all memory together holds)",
    )
    rates, sizes = node_rates(problem), [len(gpus) for gpus in problem.node_gpus]
    if batch < 1:
        req_s = 0.0
    elif problem.mixes:
        regions = [region.times(n) for region, n in zip(node_regions(problem), sizes, strict=True) if n]
        req_s = most_served(0.0, 0.0, regions)[0]
    elif colocated:
        mixed = zip(rates, mixed_rates(problem), sizes, strict=True)
        req_s = best_mixture([(p * n, q * n, r * n) for (p, q), r, n in mixed if n])
    else:
        req_s = best_split((p * n, q * n) for (p, q), n in zip(rates, sizes, strict=True) if n)
    return UpperBound(req_s, "rates", assumptions)


def node_rates(problem: Problem) -> list[tuple[float, float]]:
    """For each node, requests/s that one of its GPUs can prefill, and decode, if it worked alone at its best.
    The capacity of a group never exceeds the sum over its GPUs."""
    costs, layers = problem.costs, problem.model.layers
    most_prompts, most_decodes = costs.prefill_batch(), max(1, decode_batch_limit(problem))

    def rates(accelerator: Accelerator) -> tuple[float, float]:
        alone = TensorGroup(accelerator, 1, NO_LINK)
        prefill_batch = costs.fastest_batch("prefill", alone, most_prompts)
        decode_batch = costs.fastest_batch("decode", alone, most_decodes)
        prefill = prefill_batch / costs.layer_s("prefill", alone, prefill_batch)
        decode = decode_batch / (costs.layer_s("decode", alone, decode_batch) * costs.osl)
        return prefill / layers, decode / layers

    return _of_each(problem, rates)


def mixed_rates(problem: Problem) -> list[float]:
    """For each node, requests/s that one of its GPUs serves in both phases, if it worked alone at its best:
    in mixed steps, or in turns where the pipeline semantics has no mixed steps."""
    costs, layers, osl = problem.costs, problem.model.layers, problem.costs.osl
    if problem.pipeline != "pipelined":
        return [p * q / (p + q) for p, q in node_rates(problem)]
    most = max(1, decode_batch_limit(problem))

    def rate(accelerator: Accelerator) -> float:
        alone = TensorGroup(accelerator, 1, NO_LINK)
        least_s = math.inf
        for chunk in (*(tokens / costs.isl for tokens in CHUNKS), 1.0):
            decodes = mixed_decodes(most, 1, chunk, osl)
            # Where prompts fill every step, the first tokens come with them (see mixed_steps).
            beside = decodes - chunk if decodes >= osl * chunk else decodes
            both = costs.layer_work_s(alone, costs.mixed_work(chunk, max(0.0, beside)))
            own = costs.layer_s("decode", alone, decodes)
            least_s = min(least_s, mixed_request_s(both, own, chunk, decodes, osl))
        return 1 / (least_s * layers)

    return _of_each(problem, rate)


def node_regions(problem: Problem) -> list[Region]:
    """For each node, what one of its GPUs can do of both phases if it worked alone at its best."""
    costs, layers, osl = problem.costs, problem.model.layers, problem.costs.osl
    most = max(1, decode_batch_limit(problem))
    both_rates = zip(node_rates(problem), mixed_rates(problem), strict=True)
    rates = dict(zip(problem.node_accelerator, both_rates, strict=True))

    def region(accelerator: Accelerator) -> Region:
        (prefill, decode), both = rates[accelerator]
        alone = TensorGroup(accelerator, 1, NO_LINK)
        points = [(prefill, 0.0), (0.0, decode), (both, both)]
        for chunk in (*(tokens / costs.isl for tokens in CHUNKS), 1.0):
            for share in BATCH_SHARES:
                decodes = max(1.0, most * share)
                step_s = costs.layer_work_s(alone, costs.mixed_work(chunk, decodes)) * layers
                points.append((chunk / step_s, decodes / (osl * step_s)))
        return Region.around(points)

    return _of_each(problem, region)


def _of_each(problem: Problem, of: Callable[[Accelerator], Found]) -> list[Found]:
    """What a function finds for the type of GPU of each node."""
    found = {accelerator: of(accelerator) for accelerator in dict.fromkeys(problem.node_accelerator)}
    return [found[accelerator] for accelerator in problem.node_accelerator]


def decode_batch_limit(problem: Problem) -> int:
    """The most requests that any decode replica holds: the batch cap, or what fits in all GPUs together."""
    costs, layers = problem.costs, problem.model.layers
    # A stage with all layers has the mean layer's bytes, which no other division of the layers falls below.
    room, per_request = 0.0, float("inf")
    for node, gpus in enumerate(problem.node_gpus):
        alone = TensorGroup(problem.node_accelerator[node], 1, NO_LINK)
        memory = costs.stage_memory("decode", alone, first=True, last=True)
        room += len(gpus) * memory.limit
        weights = memory.per_layer * layers
        per_request = min(per_request, memory.per_layer_request * layers)
    return int(max(0.0, min(costs.batch_cap, (room - weights) // per_request)))


def best_mixture(
    rates: Sequence[tuple[float, float, float]], prefill: float = 0.0, decode: float = 0.0
) -> float:
    """min over l in [0, 1] of sum max(l p, (1 - l) q, r) for GPUs of rates (p, q, r) in requests/s: convex
    and piecewise linear in l, so the least is where two of the three are equal, or at an end. `prefill` and
    `decode` are what others carry already, in requests/s."""
    ends = [0.0, 1.0]
    for p, q, r in rates:
        ends += [q / (p + q), *(end for end in (r / p, 1 - r / q) if 0 < end < 1)]
    return min(
        math.fsum([at * prefill, (1 - at) * decode, *(max(at * p, (1 - at) * q, r) for p, q, r in rates)])
        for at in ends
    )


def best_split(rates: Iterable[tuple[float, float]], prefill: float = 0.0, decode: float = 0.0) -> float:
    """max over x in [0, 1]^n of min(prefill + sum x p, decode + sum (1 - x) q), in requests/s.

    A fractional knapsack (Dantzig, 1957): at most one GPU is divided.

    Parameters
    ----------
    rates : (p, q) of each GPU, in requests/s
    prefill, decode : what others carry already, in requests/s
    """
    order = greatest_first(rates, lambda rate: rate[0] / rate[1])
    before, after = prefill, decode + math.fsum(q for _, q in order)
    best = min(before, after)
    for p, q in order:
        # This one is divided: before + x p = after - x q.
        x = min(1.0, max(0.0, (after - before) / (p + q)))
        best = max(best, min(before + x * p, after - x * q))
        before, after = before + p, after - q
    return best
