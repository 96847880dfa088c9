"""Hetis: fast GPUs hold the weights, slow ones help with decode attention (Mo et al., SC 2025).

Of every number of instances, the Parallelizer plans primary workers and attention workers. The placement of
the greatest throughput is returned, by the times of steps whose attention heads are divided as the dispatcher
would. Throughput is by formulas; `hexgen2 simulate` dispatches request by request.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from cost_model.attention import DenseCosts, token_s
from cost_model.base import TensorGroup
from cost_model.errors import InfeasibleError, InputError
from cost_model.hardware import NO_LINK, Accelerator
from cost_model.pipeline import CHUNKS, Pace
from hexgen2.attention_workers import AttentionWorker, kv_room, stage_requests, worker_memory
from hexgen2.checks import traffic_of
from hexgen2.placement import CostModelName, Latency, Placement, SearchRecord, Throughput
from hexgen2.prediction.bottlenecks import bottlenecks_of
from hexgen2.prediction.headwise_times import step_times
from hexgen2.prediction.latency import pace_of
from hexgen2.replica import EngineSettings, Replica, Stage
from hexgen2.search.bounds.upper_bounds import (
    UpperBound,
    best_split,
    decode_batch_limit,
    mixed_rates,
)
from hexgen2.search.problem import Problem
from hexgen2.search.stopping import Stopping
from hexgen2.search.ties import exceeds
from hexgen2.strategies.base import SearchOptions, promised
from hexgen2.strategies.baselines.parallelizer import Instance, Parallelizer, PrimaryPlan, dealt

NAME = "hetis"


@dataclass(frozen=True)
class Planned:
    """One replica with its attention workers, and its pace."""

    replica: Replica
    workers: tuple[AttentionWorker, ...]
    pace: Pace

    @property
    def served(self) -> float:
        """Requests/s."""
        return self.replica.utilisation * self.replica.capacity_req_s


def search(problem: Problem, options: SearchOptions) -> Placement:
    """The best number of instances, by enumeration. The seed changes nothing.

    Raises
    ------
    InputError : the goal is to rent, or is not throughput
    InfeasibleError : the model fits in no instance
    """
    _check_goal(problem)
    stopping = Stopping(options.time_limit_s)
    parallelizer, best, trace = Parallelizer(problem), list[Planned](), []
    try:
        for count in parallelizer.instance_counts():
            if stopping.out_of_time():
                break
            found = _planned(problem, parallelizer, dealt(problem, count))
            if found and exceeds(_served(found), _served(best)):
                best = found
                numbers = {"req_s": _served(best), "colocated_replicas": len(best)}
                trace.append({"step": f"{count} instances", **numbers})
    except KeyboardInterrupt:
        if not best:
            raise
        stopping.interrupt()
    if not best and stopping.cut:
        stopping.raise_if_interrupted()
        name = problem.cluster.name
        raise InfeasibleError(
            f"no feasible placement found within the time limit on {name}; raise --time-limit"
        )
    if not best:
        raise InfeasibleError(_why_infeasible(problem))
    record = SearchRecord(
        seconds=stopping.elapsed_s,
        seed=options.seed,
        evaluations=parallelizer.evaluations,
        trace=trace,
        cut=stopping.cut,
    )
    placement = _placement(problem, best, record)
    if options.simulated and problem.goal.request_rate is not None:
        placement = promised([placement], problem.cluster, options.seed, stopping)
    ended = record.model_copy(update={"seconds": stopping.elapsed_s, "cut": stopping.cut})
    return placement.model_copy(update={"search": ended})


def _check_goal(problem: Problem) -> None:
    if problem.goal.rents:
        remedy = "use hexgen2, or give no --budget"
        raise InputError("--strategy", NAME, "does not choose what to rent", remedy)
    if problem.goal.objective != "throughput":
        problem_text = f"does not search for --objective {problem.goal.objective}"
        raise InputError("--strategy", NAME, problem_text, "use hexgen2")


def _served(planned: list[Planned]) -> float:
    return math.fsum(each.served for each in planned)


def _planned(problem: Problem, parallelizer: Parallelizer, instances: list[Instance]) -> list[Planned]:
    """The replicas of these instances; those in which the model does not fit are left out. Instances with the
    same numbers of GPUs on nodes and links of the same kinds are planned once."""
    found: list[Planned] = []
    known: dict[tuple, tuple[list[str], Planned | None]] = {}
    for instance in instances:
        own = [problem.cluster.gpu_ids[gpu] for pool in instance for gpu in pool.gpus]
        key = _kind(problem, instance)
        if key not in known:
            plan = parallelizer.plan(instance)
            known[key] = own, _fastest(problem, plan) if plan else None
        planned_on, planned = known[key]
        if planned is not None:
            found.append(_moved(planned, dict(zip(planned_on, own, strict=True)), f"colocated-{len(found)}"))
    return _within_links(problem, found)


def _within_links(problem: Problem, planned: list[Planned]) -> list[Planned]:
    """The same, all with less to do where their activations together are more than a link can carry."""
    if problem.links != "shared":
        return planned
    traffic = traffic_of(problem.cluster, problem.costs, [each.replica for each in planned], [])
    used = 1 / max(1.0, *traffic.shares.values(), 0.0)
    return [replace(each, replica=each.replica.model_copy(update={"utilisation": used})) for each in planned]


def _kind(problem: Problem, instance: Instance) -> tuple:
    """Equal for instances whose GPUs and links are alike, in their order."""
    counts = [(node, count) for pool in instance for node, count in pool.counts]
    links = tuple(
        problem.node_links[a][b]
        for a, b in itertools.combinations_with_replacement([n for n, _ in counts], 2)
    )
    return tuple((problem.node_accelerator[node], count) for node, count in counts), links


def _moved(planned: Planned, at: Mapping[str, str], name: str) -> Planned:
    """The same on other GPUs."""
    stages = [
        stage.model_copy(update={"gpus": [at[gpu] for gpu in stage.gpus]}) for stage in planned.replica.stages
    ]
    workers = [w.model_copy(update={"gpu": at[w.gpu], "replica": name}) for w in planned.workers]
    replica = planned.replica.model_copy(update={"id": name, "stages": stages})
    return Planned(replica, tuple(workers), planned.pace)


def _fastest(problem: Problem, plan: PrimaryPlan) -> Planned | None:
    """The replica of a plan, with the chunks of prompts that serve most; None if no request fits."""
    names, layer, stages = problem.cluster.gpu_ids, 0, []
    for stage in plan.stages:
        stages.append(Stage(gpus=[names[g] for g in stage.gpus], layers=(layer, layer + stage.layers)))
        layer += stage.layers
    replica = Replica(
        id="instance", role="colocated", stages=stages, max_batch=1, capacity_req_s=0.0, utilisation=1.0
    )
    workers: tuple[AttentionWorker, ...] = ()
    if problem.model.latent is None:
        workers = _with_memory(problem, replica, [names[g] for g in plan.others])
    room = min(stage_requests(replica, workers, problem.cluster, problem.costs))
    held = min(problem.costs.batch_cap, int(room))
    if held < 1:
        return None
    engine = EngineSettings().explicit(problem.pipeline, len(stages))
    replica = replica.model_copy(update={"max_batch": held, "engine": engine})
    times = step_times(replica, workers, problem.cluster, problem.costs, problem.pipeline)
    best: Planned | None = None
    for chunk in CHUNKS if problem.pipeline == "pipelined" else CHUNKS[:1]:
        chunked = engine.model_copy(update={"chunk_tokens": chunk})
        tried = replica.model_copy(update={"engine": chunked})
        pace = pace_of(tried, times)
        if best is None or exceeds(pace.capacity_req_s, best.pace.capacity_req_s):
            served = tried.model_copy(update={"capacity_req_s": pace.capacity_req_s})
            best = Planned(served, workers, pace)
    return best


def accelerator_of(problem: Problem, gpu: str) -> Accelerator:
    """The type of a GPU."""
    return problem.cluster.accelerators[problem.cluster.index(gpu)]


def _with_memory(problem: Problem, replica: Replica, gpus: list[str]) -> tuple[AttentionWorker, ...]:
    """Attention workers on these GPUs. Their memory goes to the stages that have least, so that all stages
    hold as many requests, as many as possible."""
    stages = range(len(replica.stages))
    equal_shares = [1.0 / len(stages)] * len(stages)
    given = [
        AttentionWorker(gpu=gpu, replica=replica.id, kv_shares=equal_shares)
        for gpu in gpus
        if kv_room(worker_memory(problem.costs, accelerator_of(problem, gpu))) > 0
    ]
    if not given:
        return ()
    own = stage_requests(replica, (), problem.cluster, problem.costs)
    equal = stage_requests(replica, given, problem.cluster, problem.costs)
    # What all workers together would hold of each stage, if they held nothing else.
    whole = [(both - alone) * len(stages) for both, alone in zip(equal, own, strict=True)]
    if min(whole) <= 0:
        return ()
    level, order = 0.0, sorted(stages, key=lambda s: own[s])
    for count in range(1, len(order) + 1):
        lowest = order[:count]
        # sum over them of (level - own) / whole = 1
        level = (1 + math.fsum(own[s] / whole[s] for s in lowest)) / math.fsum(1 / whole[s] for s in lowest)
        if count == len(order) or level <= own[order[count]]:
            break
    shares = [max(0.0, level - own[s]) / whole[s] for s in stages]
    total = math.fsum(shares)
    return tuple(w.model_copy(update={"kv_shares": [s / max(1.0, total) for s in shares]}) for w in given)


def _placement(problem: Problem, planned: list[Planned], record: SearchRecord) -> Placement:
    replicas = [each.replica for each in planned]
    workers = [worker for each in planned for worker in each.workers]
    served = _served(planned)
    used = {*(gpu for r in replicas for gpu in r.gpus), *(w.gpu for w in workers)}
    idle = [
        problem.cluster.gpu_ids[g] for g in problem.usable.tolist() if problem.cluster.gpu_ids[g] not in used
    ]
    cards = {accelerator_of(problem, gpu) for gpu in used}
    first_s = math.fsum(each.pace.latency_s * each.served for each in planned) / served
    token_s = math.fsum(each.pace.token_s * each.served for each in planned) / served
    return Placement(
        strategy=NAME,
        cluster=problem.spec,
        model=problem.model,
        workload=problem.workload,
        cost_model=CostModelName.of(problem.costs, problem.pipeline, problem.links, cards),
        goal=problem.goal,
        lost=sorted(problem.lost, key=problem.cluster.index),
        replicas=replicas,
        routes=[],
        attention_workers=workers,
        throughput=Throughput(req_s=served, output_tok_s=served * problem.costs.osl),
        latency=Latency(ttft_ms=first_s * 1e3, tpot_ms=token_s * 1e3),
        price_per_hour=float(problem.cluster.price_per_hour.sum()),
        bound=_bound(problem).record(served),
        bottlenecks=bottlenecks_of(replicas, [], idle, problem.cluster, problem.costs, problem.links),
        search=record,
    )


def _bound(problem: Problem) -> UpperBound:
    """The bound by rates where a GPU may do the dense modules of some requests and the decode attention of
    others: F <= sum x_d D_d and F <= sum (1 - x_d) A_d for some shares x_d, with D_d and A_d the requests/s
    of GPU d if it did nothing but one of them, alone and at its best."""
    costs, batch = problem.costs, decode_batch_limit(problem)
    dense = mixed_rates(replace(problem, costs=DenseCosts(costs)))
    per_request = costs.work("decode", 1.0).context * costs.osl * problem.model.layers
    rates: list[tuple[float, float]] = []
    for accelerator, dense_req_s, gpus in zip(
        problem.node_accelerator, dense, problem.node_gpus, strict=True
    ):
        alone = TensorGroup(accelerator, 1, NO_LINK)
        least_s = min(token_s(costs, alone, decodes) for decodes in (1.0, float(max(1, batch))))
        if gpus:
            attention_req_s = 1 / (least_s * per_request) if least_s > 0 else math.inf
            rates.append((dense_req_s * len(gpus), attention_req_s * len(gpus)))
    assumptions = (
        "no communication or idle time inside a replica, and no LM head",
        "each GPU, or its time, can be divided between dense modules and decode attention",
        f"every decode step runs {batch} requests (the batch cap, or what all memory together holds)",
    )
    free = any(attention_req_s == math.inf for _, attention_req_s in rates)
    req_s = math.fsum(dense_req_s for dense_req_s, _ in rates) if free else best_split(rates)
    return UpperBound(req_s, "rates", assumptions)


def _why_infeasible(problem: Problem) -> str:
    weights = problem.model.total_bytes / 2**30
    memory = float(problem.cluster.memory_bytes[problem.usable].sum()) / 2**30
    return (
        f"no feasible placement: {problem.model.name} needs {weights:.3g} GiB for weights, in stages of one "
        f"type inside a node, and more for its KV cache; the {len(problem.usable)} GPUs of "
        f"{problem.cluster.name} have {memory:.3g} GiB; add GPUs or choose a smaller model"
    )
