"""The cost of moving from the running placement to another: GPUs, weights to load, requests missed.

The GPUs of a node are equal but hold different weights, so a re-plan assigns them individually. Replicas that
continue unchanged keep their GPUs; the others get those that are ready soonest, usually those that already
hold the weights they need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from ortools.graph.python import linear_sum_assignment

from hexgen2.moves import Action, Cost
from hexgen2.replan.previous import OldReplica, Previous
from hexgen2.search.evaluation import Evaluation, PlannedReplica
from hexgen2.search.planning.plan import GroupPlan
from hexgen2.search.planning.shards import Shard, shard_bytes, shards_of, shared_bytes
from hexgen2.search.problem import Problem

LONG_S = 1e6
"""Longer waits are not distinguished."""

RESTART_S = 10.0
"""Seconds from loaded weights until a replica serves (assumed)."""

TURN_S = 0.5
"""Seconds until an empty replica serves in another role: its workers make a new KV cache (assumed)."""

ASSUMPTIONS = [
    "each GPU loads {load:g} GB/s of weights, all at once, and a replica restarts in {restart:g} s (assumed)",
    "a GPU keeps the weights that its new replica needs too; a runtime that starts workers anew loads all",
    "with the same stages, a replica turns to another role in {turn:g} s once it is empty (assumed)",
    "all moves begin at once; a replica empties linearly over the mean time that a request stays",
    "the others take over up to their capacity, KV links left aside",
]


@dataclass(frozen=True)
class Terms:
    """What a move costs and for how long its gain counts.

    Attributes
    ----------
    horizon_s : seconds over which throughput is weighed against missed requests
    load_bytes_s : weights that one GPU loads per second
    restart_s : seconds from loaded weights until a replica serves
    turn_s : seconds until an empty replica serves in another role, with the same stages
    """

    horizon_s: float = 3600.0
    load_bytes_s: float = 2e9
    restart_s: float = RESTART_S
    turn_s: float = TURN_S

    @property
    def assumptions(self) -> list[str]:
        """The assumptions behind the figures of a migration."""
        load = self.load_bytes_s / 1e9
        return [text.format(load=load, restart=self.restart_s, turn=self.turn_s) for text in ASSUMPTIONS]


@dataclass(frozen=True)
class Successor:
    """A replica of the new plan, and what must happen before it serves.

    Attributes
    ----------
    gpus : indices of its GPUs, by stage
    old : the running replica that it continues, if any
    load_bytes : weights that its GPUs load together
    drain_s : seconds until its GPUs have finished their current requests
    load_s : seconds to load and restart, or to turn, after that
    """

    replica: PlannedReplica
    gpus: tuple[tuple[int, ...], ...]
    old: OldReplica | None
    action: Action
    load_bytes: float
    drain_s: float
    load_s: float

    @property
    def absent_s(self) -> float:
        """Seconds of work lost: draining counts half, since the old replicas empty gradually."""
        return self.drain_s / 2 + self.load_s


class Migrator:
    """Computes the moves from a running placement to solutions of a problem."""

    def __init__(self, problem: Problem, previous: Previous, terms: Terms) -> None:
        self.problem, self.previous, self.terms = problem, previous, terms

    @cached_property
    def _by_stages(self) -> dict[tuple, list[OldReplica]]:
        found: dict[tuple, list[OldReplica]] = {}
        for old in self.previous.intact:
            found.setdefault(old.stages or (), []).append(old)
        return found

    def successors(
        self, replicas: Sequence[PlannedReplica], role_of: Callable[[PlannedReplica], str] | None = None
    ) -> list[Successor]:
        """The replicas with their GPUs and moves, in the given order.

        Parameters
        ----------
        role_of : the roles that they have in a placement, once it is known which are mixed; None: a replica
            that does both phases stays what it is
        """
        continued = self._continued(replicas)
        taken = {gpu for old in continued.values() for stage in old.gpus for gpu in stage}
        slots: dict[int, list[tuple[int, int, Shard]]] = {}
        for k, replica in enumerate(replicas):
            if k in continued:
                continue
            shards = shards_of([stage[1:] for stage in replica.stages])
            for s, stage in enumerate(replica.stages):
                slots.setdefault(stage.node, []).extend((k, s, shard) for shard in shards[s])
        named: dict[tuple[int, int], list[int]] = {}
        loads: dict[int, list[float]] = {}
        for node, wanted in slots.items():
            free = [gpu for gpu in self.problem.node_gpus[node] if gpu not in taken]
            for (k, s, shard), gpu in zip(wanted, self._assign(wanted, free), strict=True):
                named.setdefault((k, s), []).append(gpu)
                loads.setdefault(k, []).append(self._load_bytes(shard, gpu))
        return [
            self._unmoved(replica, continued[k], role_of(replica) if role_of else None)
            if k in continued
            else self._moved(replica, tuple(tuple(named[k, s]) for s in range(len(replica.stages))), loads[k])
            for k, replica in enumerate(replicas)
        ]

    def _continued(self, replicas: Sequence[PlannedReplica]) -> dict[int, OldReplica]:
        """Index of a new replica -> the old replica whose stages it continues unchanged; matches with the
        same role and batch size come first."""
        found: dict[int, OldReplica] = {}
        used: set[str] = set()
        for exact in (True, False):
            for k, replica in enumerate(replicas):
                if k in found:
                    continue
                for old in self._by_stages.get(replica.stages, ()):
                    if old.id not in used and (
                        not exact or same_service(replica.group.role, replica.plan, old)
                    ):
                        found[k] = old
                        used.add(old.id)
                        break
        return found

    def _assign(self, wanted: list[tuple[int, int, Shard]], free: list[int]) -> list[int]:
        """GPUs of one node for these shards, chosen to minimise the sum of the waits for draining and loading
        (an assignment problem, in whole microseconds)."""
        held, drain_s = self.previous.held, self.previous.drain_s
        if len(free) == 1 or not any(gpu in held for gpu in free):
            return free[: len(wanted)]
        size = len(free)
        cost = np.zeros((size, size), dtype=np.int64)
        for row, (_, _, shard) in enumerate(wanted):
            for column, gpu in enumerate(free):
                wait_s = drain_s.get(gpu, 0.0) / 2 + self._load_bytes(shard, gpu) / self.terms.load_bytes_s
                cost[row, column] = round(min(wait_s, LONG_S) * 1e6)
        solver = linear_sum_assignment.SimpleLinearSumAssignment()
        rows, columns = np.divmod(np.arange(size * size), size)
        solver.add_arcs_with_cost(rows, columns, cost.ravel())
        if solver.solve() != solver.OPTIMAL:
            raise RuntimeError("the assignment of GPUs failed")
        return [free[solver.right_mate(row)] for row in range(len(wanted))]

    def _load_bytes(self, shard: Shard, gpu: int) -> float:
        held = self.previous.held.get(gpu)
        reused = shared_bytes(self.problem.model, shard, held) if held else 0.0
        return shard_bytes(self.problem.model, shard) - reused

    def _unmoved(self, replica: PlannedReplica, old: OldReplica, role: str | None) -> Successor:
        gpus = tuple(tuple(gpu for gpu in stage if gpu is not None) for stage in old.gpus)
        if same_service(replica.group.role, replica.plan, old) and role in (None, old.placed_role):
            return Successor(replica, gpus, old, "keep", 0.0, 0.0, 0.0)
        return Successor(replica, gpus, old, "turn", 0.0, old.drain_s, self.terms.turn_s)

    def _moved(
        self, replica: PlannedReplica, gpus: tuple[tuple[int, ...], ...], loads: list[float]
    ) -> Successor:
        drain = max(self.previous.drain_s.get(gpu, 0.0) for stage in gpus for gpu in stage)
        load_s = self.terms.restart_s + max(loads) / self.terms.load_bytes_s
        return Successor(replica, gpus, None, "start", math.fsum(loads), drain, load_s)

    def missed_requests(self, successors: Sequence[Successor], req_s: float) -> float:
        """Requests missed within the horizon while replicas of the new plan, whose throughput is req_s, are
        not ready: the integral of req_s less the capacity of the replicas that are."""
        horizon = self.terms.horizon_s
        times = sorted({min(s.absent_s, horizon) for s in successors})
        missed, since = 0.0, 0.0
        for until in times:
            ready = {"prefill": 0.0, "decode": 0.0, "colocated": 0.0}
            for s in successors:
                if s.absent_s <= since:
                    ready[s.replica.group.role] += s.replica.capacity_req_s
            served = min(ready["prefill"], ready["decode"]) + ready["colocated"]
            missed += max(0.0, req_s - served) * (until - since)
            since = until
        return missed

    def cost(self, evaluation: Evaluation) -> Cost:
        """The cost of moving from the running placement to this solution."""
        found = self.successors(evaluation.replicas, evaluation.role_of)
        return Cost(
            req_s=evaluation.req_s,
            load_bytes=math.fsum(s.load_bytes for s in found),
            missed_requests=self.missed_requests(found, evaluation.req_s),
        )


def same_service(role: str, plan: GroupPlan, old: OldReplica) -> bool:
    """Whether a replica of that role and plan serves as the old one did. The batch of a prefill replica is a
    mean over its prompts."""
    return role == old.role and plan.engine == old.engine and (role == "prefill" or plan.batch == old.batch)
