"""Predicted latencies of a placement under random arrivals, from its queues and flows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from cost_model.queueing import DecodeQueue, PrefillQueue, largest
from hexgen2.search.evaluation import Evaluation
from hexgen2.search.planning.plan import Planner
from hexgen2.search.planning.targets import Targets

ASSUMPTIONS = [
    "requests arrive at random (Poisson) and follow the routes in the proportions of their flows",
    "a prompt waits as in an M/G/1 queue, with an exponential tail",
    "a request that finds no place in the decode batch, or too many others in it, is late",
    "both phases are independent; a KV transfer delays the second token and counts end to end only",
]


@dataclass(frozen=True)
class LoadedPlacement:
    """The queues of an evaluated solution, and the share of all requests on each route, [P, D]; transfer_s
    [P, D] is what a request's KV cache takes. The last rows and columns are those of colocated replicas, each
    with a route to itself."""

    prefill: list[PrefillQueue]
    decode: list[DecodeQueue]
    routes: np.ndarray
    transfer_s: np.ndarray
    targets: Targets
    limit_req_s: float

    @classmethod
    def of(cls, planner: Planner, evaluation: Evaluation, carried: np.ndarray) -> LoadedPlacement:
        """The planner's solution under the flows between senders and receivers, in requests/s, that it is to
        carry."""
        targets = Targets.of(planner.problem.goal, planner.problem.costs)
        prefill = [planner.prefill_queue(r.plan) for r in evaluation.prefill]
        decode = [planner.decode_queue(r.plan) for r in evaluation.decode]
        rows, columns = len(prefill), len(decode)
        row = {r.index: rows + k for k, r in enumerate(evaluation.colocated)}
        column = {r.index: columns + k for k, r in enumerate(evaluation.colocated)}
        row |= {r.index: k for k, r in enumerate(evaluation.prefill)}
        column |= {r.index: k for k, r in enumerate(evaluation.decode)}
        routes = np.zeros((rows + len(evaluation.colocated), columns + len(evaluation.colocated)))
        transfer_s = np.zeros_like(routes)
        between = np.ix_(
            [row[r.index] for r in evaluation.senders], [column[r.index] for r in evaluation.receivers]
        )
        most = evaluation.network.routes
        routes[between] = carried
        transfer_s[between] = np.divide(1.0, most, out=np.zeros_like(most), where=most > 0)
        for k, alone in enumerate(evaluation.alone):
            routes[rows + k, columns + k], transfer_s[rows + k, columns + k] = alone, 0.0
        routes /= routes.sum()
        first, rest = routes.sum(axis=1), routes.sum(axis=0)
        ends = [*zip((q.capacity_req_s for q in prefill), first[:rows], strict=True)]
        ends += zip((q.capacity_req_s for q in decode), rest[:columns], strict=True)
        for replica in evaluation.colocated:
            prompts, answers = first[row[replica.index]], rest[column[replica.index]]
            queues = planner.colocated_queues(replica.plan)
            region = evaluation.region_of(replica)
            able = queues[0].capacity_req_s / max(prompts, answers, 1e-12)
            if region and prompts + answers > 0:  # What its work for others leaves of each phase.
                able = 1 / region.busy(prompts, answers)
            # A queue is as busy as the replica.
            prefill.append(replace(queues[0], capacity_req_s=able * prompts or queues[0].capacity_req_s))
            decode.append(queues[1].at_capacity(able * answers or queues[1].capacity_req_s))
            ends.append((able, 1.0))
        links = zip((1 / transfer_s[transfer_s > 0]).tolist(), routes[transfer_s > 0], strict=True)
        limit = min(capacity / share for capacity, share in (*ends, *links) if share > 0)
        return cls(prefill, decode, routes, transfer_s, targets, float(limit))

    def attained(self, rate: float) -> float:
        """Share of the requests that meet the targets."""
        if rate >= self.limit_req_s:
            return 0.0
        target, shares = self.targets, (self.routes.sum(axis=1), self.routes.sum(axis=0))
        first = np.array(
            [
                1.0 if target.ttft_s is None else queue.attained(rate * share, target.ttft_s)
                for queue, share in zip(self.prefill, shares[0], strict=True)
            ]
        )
        rest = np.array(
            [q.attained(rate * w, target.tpot_s) for q, w in zip(self.decode, shares[1], strict=True)]
        )
        return float((first[:, None] * self.routes * rest).sum())

    def goodput_req_s(self) -> float:
        """The largest rate at which the attainment asked for is reached; 0 if it never is."""
        return largest(lambda rate: self.attained(rate) >= self.targets.attainment, self.limit_req_s)

    def mean_ttft_s(self, rate: float) -> float:
        """Seconds to the first token, waiting included."""
        shares = self.routes.sum(axis=1)
        return math.fsum(
            float(w) * (q.mean_wait_s(rate * w) + q.latency_s)
            for q, w in zip(self.prefill, shares, strict=True)
        )

    def ttft_quantile_s(self, rate: float, share: float) -> float:
        """Seconds within which that share of the first tokens comes."""
        weights = self.routes.sum(axis=1)

        def too_short(ttft_s: float) -> bool:
            within = (w * q.attained(rate * w, ttft_s) for q, w in zip(self.prefill, weights, strict=True))
            return math.fsum(within) < share

        longest = 1.0
        while too_short(longest):
            longest *= 2
        return largest(too_short, longest)

    def mean_tpot_s(self, rate: float) -> float:
        """Seconds per output token."""
        shares = self.routes.sum(axis=0)
        return math.fsum(
            float(w) * q.mean_tpot_s(q.under_way(rate * w)) for q, w in zip(self.decode, shares, strict=True)
        )

    def mean_e2el_s(self, rate: float) -> float:
        """Seconds from arrival to the last token, by the mean number of outputs."""
        transfer = float((self.routes * self.transfer_s)[self.routes > 0].sum())
        return self.mean_ttft_s(rate) + transfer + (self.targets.osl - 1) * self.mean_tpot_s(rate)
