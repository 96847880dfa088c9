"""The cost of a migration, computed independently: weights part by part, and every assignment of GPU
names."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from problems import set_partitions

from cost_model.architecture import ModelArchitecture
from hexgen2.placement import Placement, Stage
from hexgen2.replan.migration import Terms
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.problem import Group, Problem, Solution, counts_of

PARTS = 24
"""Every tensor-parallel degree in the tests divides a layer into a whole number of these."""


@dataclass(frozen=True)
class Weights:
    """What a GPU holds: these parts of these layers and of these matrices (parameters by name)."""

    layers: range
    matrices: dict[str, int]
    parts: range

    def missing_bytes(self, model: ModelArchitecture, held: Weights | None) -> float:
        """Bytes of these weights that are not held, part by part."""
        unit = model.weight_bytes / PARTS
        total = 0.0
        for part in self.parts:
            have = held if held and part in held.parts else None
            same = (
                range(max(self.layers[0], have.layers[0]), min(self.layers[-1], have.layers[-1]) + 1)
                if have
                else ()
            )
            total += (len(self.layers) - len(same)) * model.layer_params * unit
            total += sum(
                n * unit for name, n in self.matrices.items() if not have or name not in have.matrices
            )
        return total


def weights_of(model: ModelArchitecture, stages: list[Stage]) -> dict[str, Weights]:
    """What each GPU of a replica holds."""
    found = {}
    for s, stage in enumerate(stages):
        matrices = {}
        if s == 0:
            table = model.vocab * model.hidden
            matrices |= {"table": table, "positions": model.embedding_params - table}
        if s == len(stages) - 1:
            head = "table" if model.tied_embeddings else "head"
            matrices |= {head: model.head_params, "norm": model.norm_params}
        width = PARTS // len(stage.gpus)
        for rank, gpu in enumerate(stage.gpus):
            found[gpu] = Weights(range(*stage.layers), matrices, range(rank * width, (rank + 1) * width))
    return found


def loads_of(previous: Placement, placement: Placement, stages: list[Stage]) -> list[float]:
    """Bytes that each GPU of a replica has to load; a GPU that was lost or replaced holds nothing."""
    model = placement.model
    cards = [{n.name: n.accelerators.split(":")[0] for n in p.cluster.nodes} for p in (previous, placement)]
    held = {
        gpu: weights
        for replica in previous.replicas
        for gpu, weights in weights_of(model, replica.stages).items()
        if cards[0][gpu.split("/")[0]] == cards[1].get(gpu.split("/")[0])
    }
    return [wanted.missing_bytes(model, held.get(gpu)) for gpu, wanted in weights_of(model, stages).items()]


def brute_force(problem: Problem, previous: Placement, terms: Terms) -> float:
    """The best net value over every partition of named GPUs into groups with roles, and every order of
    ranks."""
    evaluator, best = Evaluator(problem), 0.0
    node_of, ids = problem.cluster.node_of, problem.cluster.gpu_ids
    drain = {}
    for replica in previous.replicas:
        if not set(replica.gpus) & problem.lost:
            busy = ("prefill", "pipelined"), ("decode", "paper_optimistic")
            batches = len(replica.stages) if (replica.role, problem.pipeline) in busy else 1
            drain |= dict.fromkeys(replica.gpus, replica.max_batch * batches / replica.capacity_req_s)
    running = [(r.role, r.stages, r.max_batch) for r in previous.replicas]

    def absent_s(group: Group, part: list[int]) -> float:
        plan = evaluator.planner.plan(group.role, group.counts)
        least = float("inf")
        for order in itertools.permutations(part) if plan else ():
            stages, spare, first = [], list(order), 0
            for stage in plan.stages:
                mine = [g for g in spare if node_of[g] == stage.node][: stage.degree]
                spare = [g for g in spare if g not in mine]
                stages.append(Stage(gpus=[ids[g] for g in mine], layers=(first, first + stage.layers)))
                first += stage.layers
            if (group.role, stages, plan.batch) in running:
                return 0.0
            load = max(loads_of(previous, previous, stages))
            waits = max(drain.get(ids[g], 0.0) for g in part) / 2
            least = min(least, waits + terms.restart_s + load / terms.load_bytes_s)
        return least

    memo: dict[tuple, float] = {}
    for groups, parts in _solutions(problem):
        found = evaluator.evaluate(Solution(tuple(groups)))
        if found.req_s <= best:
            continue
        times = []
        for group, part in zip(groups, parts, strict=True):
            key = (group.role, tuple(part))
            if key not in memo:
                memo[key] = absent_s(group, part)
            times.append(memo[key])
        best = max(best, found.req_s - _missed(evaluator, groups, times, found.req_s, terms))
    return best


def _solutions(problem: Problem):
    """Groups with roles, and the GPUs of each."""
    usable, node_of = problem.usable.tolist(), problem.cluster.node_of
    for size in range(2, len(usable) + 1):
        for used in itertools.combinations(usable, size):
            for parts in set_partitions(list(used)):
                for roles in itertools.product(("prefill", "decode"), repeat=len(parts)):
                    groups = []
                    for role, part in zip(roles, parts, strict=True):
                        nodes = [int(node_of[g]) for g in part]
                        groups.append(Group(role, counts_of({n: nodes.count(n) for n in nodes})))
                    yield groups, parts


def _missed(evaluator: Evaluator, groups, times, req_s: float, terms: Terms) -> float:
    """Mean requests/s missed."""
    total = 0.0
    for start, end in itertools.pairwise(sorted({0.0, *(min(t, terms.horizon_s) for t in times)})):
        capacity = {"prefill": 0.0, "decode": 0.0}
        for group, absent in zip(groups, times, strict=True):
            plan = evaluator.planner.plan(group.role, group.counts)
            if plan and absent <= start:
                capacity[group.role] += plan.capacity_req_s
        total += max(0.0, req_s - min(capacity.values())) * (end - start)
    return total / terms.horizon_s
