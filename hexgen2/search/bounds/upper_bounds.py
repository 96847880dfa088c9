"""Upper bounds on the throughput of any placement, each with what it assumes.

The bound by rates: every GPU works alone at its best, and nothing is ever sent. Let p_d and q_d be the
requests/s that GPU d can prefill and decode, at the batch that suits it best. A stage of n GPUs is never
faster than n times its slowest GPU alone, and all layers pass every request; so the throughput F of any
placement satisfies

    F <= sum_d x_d p_d   and   F <= sum_d (1 - x_d) q_d   for some 0 <= x_d <= 1.

The largest such F is a fractional knapsack: GPUs prefill in the order of p_d / q_d. A colocated replica
divides the time of its GPUs between the phases instead: the same x_d.

The bounds by programs (configuration_lp.py) know what replicas really do, and where KV caches have to go.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cost_model.base import TensorGroup
from cost_model.hardware import NO_LINK
from hexgen2.placement import BoundRecord
from hexgen2.search.problem import Problem
from hexgen2.search.ties import greatest_first

ROUNDING = 1e-9
"""A gap below this is that of floating point."""


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
        """The `bound` of a placement that carries so many requests/s."""
        gap = 1 - req_s / self.req_s if self.req_s > 0 else 0.0
        return BoundRecord(
            req_s=self.req_s,
            gap=gap if gap > ROUNDING else 0.0,
            method=self.method,  # type: ignore[arg-type]
            kv_free_req_s=self.kv_free_req_s,
            assumptions=list(self.assumptions),
        )


def rates_bound(problem: Problem) -> UpperBound:
    """The bound by rates (see above), which holds for replicas of every kind."""
    batch = decode_batch_limit(problem)
    assumptions = (
        "KV transfers take no time",
        "no communication or idle time inside a replica, and no LM head",
        "each GPU, or its time, can be divided between prefill and decode",
        f"every decode step runs {batch} requests (the batch cap, or what all memory together holds)",
    )
    rates = zip(node_rates(problem), problem.node_gpus, strict=True)
    req_s = best_split((p * len(g), q * len(g)) for (p, q), g in rates if g) if batch >= 1 else 0.0
    return UpperBound(req_s, "rates", assumptions)


def node_rates(problem: Problem) -> list[tuple[float, float]]:
    """For each node, requests/s that one of its GPUs can prefill, and decode, if it worked alone at its best.
    The capacity of a group never exceeds the sum over its GPUs."""
    costs, layers = problem.costs, problem.model.layers
    most_prompts, most_decodes = costs.prefill_batch(), max(1, decode_batch_limit(problem))
    rates = []
    for accelerator in problem.node_accelerator:
        alone = TensorGroup(accelerator, 1, NO_LINK)
        prefill_batch = costs.fastest_batch("prefill", alone, most_prompts)
        decode_batch = costs.fastest_batch("decode", alone, most_decodes)
        prefill = prefill_batch / costs.layer_s("prefill", alone, prefill_batch)
        decode = decode_batch / (costs.layer_s("decode", alone, decode_batch) * costs.osl)
        rates.append((prefill / layers, decode / layers))
    return rates


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
