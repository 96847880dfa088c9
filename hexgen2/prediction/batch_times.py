"""How long a replica takes for batches of requests, by eight constants that are fitted to a light profile.

'High-throughput LLM inference on heterogeneous clusters', sections 3.1.2 and 4.1. A batch is static: its
requests begin together and are as long as the longest. The strategy `huawei` compares tensor-parallel degrees
with these times, and the scheduler `workload-aware` says with them how much work a request is for a replica.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from cost_model.base import CostModel, Work
from cost_model.lengths import attended_tokens, context_tokens
from hexgen2.cluster import Cluster
from hexgen2.placement import Placement, Replica
from hexgen2.prediction.kv_capacity import kv_capacity_tokens
from hexgen2.prediction.step_times import StepTimes

LENGTHS = 6
"""Most lengths of prompts, and of contexts, in a profile."""
STRETCHED = (0.5, 1.0, 2.0)
"""A profile has each length of the workload times these, so that a workload of one length is enough."""

Row = tuple[float, float, float]
"""Batch, tokens of each request, seconds."""
Constants = tuple[float, float, float, float]
"""Of t = a * batch * tokens + b * batch + c * tokens + d."""


def fit(rows: Sequence[Row]) -> Constants:
    """The constants of least squares. The normal equations are solved in exact fractions, so that the result
    is the same on every machine; constants that the rows do not determine are 0.

    Examples
    --------
    >>> fit([(b, s, 2 * b * s + 3 * b + 5 * s + 7) for b in (1, 2, 4) for s in (1, 10, 100)])
    (2.0, 3.0, 5.0, 7.0)
    """
    known = [(*map(Fraction, (batch * tokens, batch, tokens, 1.0)), Fraction(s)) for batch, tokens, s in rows]
    size = 4
    table = [[sum((row[i] * row[j] for row in known), Fraction(0)) for j in range(5)] for i in range(size)]
    pivots: list[tuple[int, int]] = []
    for column in range(size):
        taken = {at for at, _ in pivots}
        pivot = next((i for i in range(size) if i not in taken and table[i][column]), None)
        if pivot is None:
            continue
        pivots.append((pivot, column))
        for i in range(size):
            if i != pivot and table[i][column]:
                part = table[i][column] / table[pivot][column]
                table[i] = [own - part * other for own, other in zip(table[i], table[pivot], strict=True)]
    found = [0.0] * size
    for i, column in pivots:
        found[column] = float(table[i][size] / table[i][column])
    return found[0], found[1], found[2], found[3]


@dataclass(frozen=True)
class BatchTimes:
    """Times of the batches of one replica, and how many requests it holds.

    Attributes
    ----------
    prefill : p1 to p4: seconds of the prefill of b prompts of s tokens, p1 b s + p2 b + p3 s + p4
        (equation 3)
    decode : p5 to p8: seconds until each of b requests with c cached tokens has its next token,
        p5 b c + p6 b + p7 c + p8 (equation 4)
    kv_tokens : KV cache that the replica has room for
    places : most requests that it decodes at a time
    """

    prefill: Constants
    decode: Constants
    kv_tokens: float
    places: int

    def prefill_s(self, batch: float, isl: float) -> float:
        """Seconds of the prefill of so many prompts of so many tokens."""
        return max(0.0, _affine(self.prefill, batch, isl))

    def decode_s(self, batch: float, isl: float, osl: float) -> float:
        """Seconds from the first to the last token of so many requests: the sum of equation 4 over the tokens
        after the first one."""
        steps = osl - 1
        return max(0.0, steps * _affine(self.decode, batch, isl + osl / 2))

    def largest_batch(self, isl: float, osl: float) -> int:
        """The most copies of a request that the KV cache holds to their ends, at least one."""
        return max(1, min(self.places, int(self.kv_tokens / max(1.0, isl + osl))))

    def prompt_s(self, isl: float, osl: float) -> float:
        """Seconds of prefill per request, in the largest batch of copies of it."""
        batch = self.largest_batch(isl, osl)
        return self.prefill_s(batch, isl) / batch

    def answer_s(self, isl: float, osl: float) -> float:
        """Seconds of decode per request, in the largest batch of copies of it."""
        batch = self.largest_batch(isl, osl)
        return self.decode_s(batch, isl, osl) / batch

    def request_s(self, isl: float, osl: float) -> float:
        """Seconds per request, in the largest batch of copies of it (equations 5 and 6)."""
        return self.prompt_s(isl, osl) + self.answer_s(isl, osl)


def profile(replica: Replica, times: StepTimes, kv_tokens: float, places: int) -> BatchTimes:
    """The batch times of a replica, fitted to the step times of batches of 1, 2, 4, ... requests.

    Parameters
    ----------
    kv_tokens, places : what the replica holds
    """
    classes = times.costs.lengths.classes
    lengths = _some([isl * factor for isl, _, _ in classes for factor in STRETCHED])
    contexts = _some([isl + part * osl for isl, osl, _ in classes for part in (0.0, 0.5, 1.0)])
    batches = list(_batches(places))
    prompts = (
        [(b, s, _prefill_s(times, b, s)) for b, s in itertools.product(batches, lengths)]
        if replica.role != "decode"
        else []
    )
    steps = (
        [(b, c, _decode_s(times, b, c)) for b, c in itertools.product(batches, contexts)]
        if replica.decodes
        else []
    )
    return BatchTimes(fit(prompts), fit(steps), kv_tokens, places)


def profiles(placement: Placement, cluster: Cluster, costs: CostModel | None = None) -> dict[str, BatchTimes]:
    """The batch times of every replica of a placement, by its id; equal replicas are profiled once.

    Parameters
    ----------
    costs : the cost model; None: the one that the placement was planned with
    """
    costs = costs or placement.costs()
    known: dict[tuple, BatchTimes] = {}
    found = {}
    for replica in placement.replicas:
        times = StepTimes(replica, cluster, costs, placement.cost_model.pipeline)  # type: ignore[arg-type]
        room = kv_capacity_tokens(replica, cluster, costs)
        key = (
            *(replica.role, replica.max_batch, replica.engine, room),
            *(tuple(times.groups), tuple(times.layers), tuple(times.hops)),
        )
        if key not in known:
            known[key] = profile(replica, times, room, replica.max_batch)
        found[replica.id] = known[key]
    return found


def _affine(constants: Constants, batch: float, tokens: float) -> float:
    a, b, c, d = constants
    return (a * batch + c) * tokens + b * batch + d


def _some(values: Sequence[float]) -> list[float]:
    """At most LENGTHS of the values, rising, from the least to the greatest."""
    found = sorted({max(1.0, value) for value in values})
    if len(found) <= LENGTHS:
        return found
    return [found[round(k * (len(found) - 1) / (LENGTHS - 1))] for k in range(LENGTHS)]


def _batches(most: int) -> Iterator[int]:
    """1, 2, 4, ... and `most`."""
    batch = 1
    while batch < most:
        yield batch
        batch *= 2
    yield most


def _prefill_s(times: StepTimes, batch: int, isl: float) -> float:
    """Seconds of the prefill of a batch, in as many steps as may be under way."""
    steps = min(times.in_flight, batch)
    prompts = batch / steps
    attended = attended_tokens(isl, times.costs.model.window)
    return times.turn_s([Work(prompts * isl, prompts * attended, 0.0, 0.0, prompts)] * steps)


def _decode_s(times: StepTimes, batch: int, context: float) -> float:
    """Seconds until each request of a batch has one more token."""
    total = batch * context_tokens(context, times.costs.model.window)
    return max(math.fsum((start, slope * total)) for start, slope in times.decode_turn(batch))
