"""Workload-aware deployment: the tensor-parallel degree of each machine, by exhaustive search.

'High-throughput LLM inference on heterogeneous clusters' (Huawei), section 3. Every machine is divided into
like instances without pipelines. A degree is valid if it divides the machine and an instance holds one
request of the largest input and output (equations 1 and 2). Algorithm 1 estimates what an instance serves:
sampled requests, in the largest batches that fit, take the times of the paper's eight-constant fit. The
throughput of a configuration is the sum over all instances, so each machine's best degree is in the best
configuration. Its requests are meant to be scheduled by `--scheduler workload-aware`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hexgen2.placement import Placement
from hexgen2.prediction.batch_times import BatchTimes, profile
from hexgen2.prediction.kv_capacity import kv_capacity_tokens
from hexgen2.prediction.step_times import StepTimes
from hexgen2.replica import Replica, Stage
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.params import Params
from hexgen2.search.planning.plan import GroupPlan, Planner
from hexgen2.search.planning.shapes import Shapes
from hexgen2.search.problem import Group, Problem, Solution
from hexgen2.search.state import SearchState
from hexgen2.search.ties import greatest
from hexgen2.strategies.base import SearchOptions, run_search
from hexgen2.strategies.baselines.paper import require_found
from hexgen2.workload.arrivals import LengthSource

NAME = "huawei"
ROLE = "colocated"
SAMPLES = 200
"""Requests that Algorithm 1 is run on, as in section 5.1."""

Lengths = Sequence[tuple[float, float]]
"""Prompt and output tokens of requests."""


@dataclass(frozen=True)
class Choice:
    """One degree of one machine: `count` instances of `degree` GPUs that serve so much together."""

    node: int
    degree: int
    count: int
    req_s: float


def search(problem: Problem, options: SearchOptions) -> Placement:
    """The best degree for each machine, by enumeration. The seed draws the sampled requests."""

    def explore(state: SearchState) -> None:
        groups: tuple[Group, ...] = ()
        steps = []
        for choices in by_machine(problem, state.evaluator.planner, sampled(problem, options.seed)):
            if not choices or state.stopping.out_of_time():
                continue
            best = greatest(choices, lambda choice: choice.req_s)[0]
            groups += (Group(ROLE, ((best.node, best.degree),)),) * best.count
            others = ", ".join(f"tp{each.degree} {each.req_s:.3g}" for each in choices)
            name = problem.cluster.node_names[best.node]
            steps.append(f"{name}: tp{best.degree} ({others} requests/s in static batches)")
        if groups:
            state.offer(state.evaluator.evaluate(Solution(groups)), "; ".join(steps))
        require_found(
            state, f"no machine alone, in like instances without pipelines as {NAME} wants them,", "hexgen"
        )

    return run_search(
        NAME,
        problem,
        options,
        explore,
        fewest_gpus=1,
        objectives=("throughput",),
        evaluator=OneStagePlanner.evaluator,
    )


def sampled(problem: Problem, seed: int, count: int = SAMPLES) -> Lengths:
    """Requests of the workload, to run Algorithm 1 on."""
    isl, osl = LengthSource(problem.workload).sample(np.random.default_rng(seed), count)
    return list(zip(isl.tolist(), osl.tolist(), strict=True))


def by_machine(problem: Problem, planner: Planner, requests: Lengths) -> Iterator[list[Choice]]:
    """The valid degrees of each machine that has GPUs left, smallest first."""
    largest = max(isl + osl for isl, osl in requests)
    known: dict[tuple[int, int], float] = {}
    for node, gpus in enumerate(problem.node_gpus):
        choices = []
        for degree in problem.model.tensor_degrees(max(1, len(gpus))):
            if not gpus or len(gpus) % degree:
                continue
            alike = problem.node_kind[node], degree
            if alike not in known:
                times = instance(problem, planner, node, degree)
                valid = times is not None and times.kv_tokens >= largest
                known[alike] = throughput_req_s(times, requests) if times and valid else 0.0
            if known[alike] > 0:
                count = len(gpus) // degree
                choices.append(Choice(node, degree, count, known[alike] * count))
        if gpus:
            yield choices


def instance(problem: Problem, planner: Planner, node: int, degree: int) -> BatchTimes | None:
    """The batch times of an instance on so many GPUs of a node; None if the model does not fit."""
    plan = planner.plan(ROLE, ((node, degree),))
    if plan is None:
        return None
    replica = _replica(problem, plan, node)
    times = StepTimes(replica, problem.cluster, problem.costs, problem.pipeline)
    room = kv_capacity_tokens(replica, problem.cluster, problem.costs)
    return profile(replica, times, room, problem.costs.batch_cap)


def throughput_req_s(times: BatchTimes, requests: Lengths) -> float:
    """Requests/s of one instance (Algorithm 1): in their order, as many requests at a time as fit, each with
    the longest prompt and the longest answer of its batch."""
    seconds, batch, isl, osl = 0.0, 0, 0.0, 0.0
    for prompt, answer in requests:
        longest = max(isl, prompt), max(osl, answer)
        if batch and (batch == times.places or (batch + 1) * sum(longest) > times.kv_tokens):
            seconds += times.prefill_s(batch, isl) + times.decode_s(batch, isl, osl)
            batch, longest = 0, (prompt, answer)
        batch, (isl, osl) = batch + 1, longest
    seconds += times.prefill_s(batch, isl) + times.decode_s(batch, isl, osl)
    return len(requests) / seconds if seconds > 0 else 0.0


def _replica(problem: Problem, plan: GroupPlan, node: int) -> Replica:
    """An instance on the first GPUs of a node, to be timed."""
    names, layer, stages = problem.cluster.gpu_ids, 0, []
    for stage in plan.stages:
        stages.append(
            Stage(
                gpus=[names[gpu] for gpu in problem.node_gpus[node][: stage.degree]],
                layers=(layer, layer + stage.layers),
                attention_data_parallel=stage.attention_dp,
                expert_parallel=stage.expert_parallel,
            )
        )
        layer += stage.layers
    return Replica(
        id="instance",
        role="colocated",
        stages=stages,
        max_batch=1,
        capacity_req_s=plan.capacity_req_s,
        engine=plan.engine,
    )


class OneStagePlanner(Planner):
    """Plans without pipelines: one stage, all of whose GPUs are in one node."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem, shapes=_OneStage(problem))

    @classmethod
    def evaluator(cls, problem: Problem, params: Params) -> Evaluator:
        """An evaluator whose groups have such plans."""
        return Evaluator(problem, params, cls(problem))


class _OneStage(Shapes):
    def combinations(self, counts: Sequence[int], kinds: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
        if len(counts) == 1 and counts[0] in self.degrees:
            yield [(0, counts[0])]
