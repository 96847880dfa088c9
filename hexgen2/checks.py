"""Checks of a placement's invariants, the same for every strategy and for placements edited by hand.

Each check yields (key, problem) pairs; none if the invariant holds.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from cluster_specs.loader import resolve
from cost_model.base import CostModel
from cost_model.errors import InputError
from cost_model.hardware import Accelerator
from cost_model.lengths import RequestLengths
from cost_model.pipeline import PIPELINE_SEMANTICS, PipelineSemantics, prompts_held
from cost_model.registry import COST_MODELS
from hexgen2.attention_workers import stage_requests
from hexgen2.cluster import Cluster
from hexgen2.layer_ranges import check_range_flow, check_ranges, served_req_s
from hexgen2.network.occupancy import KvTransfer, activations, parts_of_gpus
from hexgen2.network.traffic import Traffic
from hexgen2.placement import Placement, Replica, Route
from hexgen2.workload.prompt_limits import prompt_factors

TOLERANCE = 1e-6
"""Relative tolerance for sums of rates in floating point."""

Violation = tuple[str, str]


def violations(placement: Placement, source: str = "placement") -> list[Violation]:
    """All violated invariants of a placement, in the order of its keys.

    Raises
    ------
    InputError : its cluster alone is wrong already; names `source`
    """
    cluster = Cluster.from_spec(resolve(placement.cluster, f"{source}: cluster", Path()))
    ranges = placement.layer_ranges is not None
    structure = [
        *check_gpus(placement, cluster),
        *(check_ranges(placement) if ranges else check_layers(placement)),
        *check_degrees(placement),
        *check_names(placement),
    ]
    if structure:
        return structure
    if ranges:
        return [
            *check_tensor_groups(placement, cluster),
            *check_memory(placement, cluster),
            *check_range_flow(placement),
            *check_throughput(placement),
        ]
    return [
        *check_tensor_groups(placement, cluster),
        *check_memory(placement, cluster),
        *check_flow(placement),
        *check_throughput(placement),
        *check_links(placement, cluster),
    ]


def verify(placement: Placement, source: str = "placement") -> None:
    """Reject a placement that violates an invariant.

    Raises
    ------
    InputError : names the file, the first offending key and how many more there are
    """
    found = violations(placement, source)
    if not found:
        return
    key, problem = found[0]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    raise InputError(source, key, problem + more, "search a new placement or undo the edit")


def check_gpus(placement: Placement, cluster: Cluster) -> Iterator[Violation]:
    """Every GPU exists, is not lost and serves at most one replica, once."""
    known, lost = set(cluster.gpu_ids), set(placement.lost)
    for k, gpu in enumerate(placement.lost):
        if gpu not in known:
            yield f"lost[{k}]", f"'{gpu}' is not in cluster {cluster.name}"
    users: dict[str, list[str]] = defaultdict(list)
    for r, replica in enumerate(placement.replicas):
        for s, stage in enumerate(replica.stages):
            for gpu in stage.gpus:
                if gpu not in known:
                    yield f"replicas[{r}].stages[{s}].gpus", f"'{gpu}' is not in cluster {cluster.name}"
                elif gpu in lost:
                    yield f"replicas[{r}].stages[{s}].gpus", f"'{gpu}' is lost"
                users[gpu].append(f"replicas[{r}].stages[{s}]")
    for gpu, places in users.items():
        if len(places) > 1:
            yield f"{places[1]}.gpus", f"'{gpu}' is used by {places[0]} already"
    yield from _check_workers(placement, known - lost, users)


def _check_workers(
    placement: Placement, usable: set[str], users: dict[str, list[str]]
) -> Iterator[Violation]:
    """Every attention worker is a GPU by itself, and works for the stages of one colocated replica."""
    stages = {r.id: len(r.stages) for r in placement.replicas if r.role == "colocated"}
    for k, worker in enumerate(placement.attention_workers):
        key = f"attention_workers[{k}]"
        if worker.gpu not in usable:
            yield f"{key}.gpu", f"'{worker.gpu}' is lost or not in the cluster"
        if worker.gpu in users:
            yield f"{key}.gpu", f"'{worker.gpu}' is used by {users[worker.gpu][0]} already"
        users[worker.gpu] = [key]
        if worker.replica not in stages:
            yield f"{key}.replica", f"there is no colocated replica '{worker.replica}'"
        elif len(worker.kv_shares) != stages[worker.replica]:
            yield f"{key}.kv_shares", f"has {len(worker.kv_shares)} for {stages[worker.replica]} stages"
        if math.fsum(worker.kv_shares) > 1 + TOLERANCE:
            yield f"{key}.kv_shares", f"add up to {math.fsum(worker.kv_shares):.6g}, which is more than 1"
    if placement.attention_workers and placement.model.latent is not None:
        yield "attention_workers", "cannot divide latent attention, whose cache has no heads"


def check_layers(placement: Placement) -> Iterator[Violation]:
    """Each replica's stages cover every layer exactly once, in order."""
    for r, replica in enumerate(placement.replicas):
        expected = 0
        for s, stage in enumerate(replica.stages):
            first, end = stage.layers
            key = f"replicas[{r}].stages[{s}].layers"
            if first != expected:
                yield key, f"starts at layer {first} where layer {expected} is due"
            if end <= first:
                yield key, f"[{first}, {end}) holds no layer"
            expected = end
        if expected != placement.model.layers:
            yield f"replicas[{r}].stages", f"end at layer {expected} of {placement.model.layers}"


def check_degrees(placement: Placement) -> Iterator[Violation]:
    """A stage's GPUs divide evenly into attention groups and into parts of the experts; all stages of a
    replica have as many attention groups, since a request stays in one group of each."""
    experts = placement.model.experts
    for r, replica in enumerate(placement.replicas):
        for s, stage in enumerate(replica.stages):
            key, gpus, parts = f"replicas[{r}].stages[{s}]", stage.tensor_parallel, stage.expert_parallel
            if gpus % stage.attention_data_parallel:
                problem = f"{stage.attention_data_parallel} does not divide the {gpus} GPUs of the stage"
                yield f"{key}.attention_data_parallel", problem
            elif stage.attention_data_parallel != replica.attention_data_parallel:
                problem = f"{stage.attention_data_parallel} differs from the first stage's "
                yield f"{key}.attention_data_parallel", problem + str(replica.attention_data_parallel)
            if gpus % parts:
                yield f"{key}.expert_parallel", f"{parts} does not divide the {gpus} GPUs of the stage"
            elif parts > 1 and experts == 1:
                yield f"{key}.expert_parallel", f"{placement.model.name} has no experts to divide"
            elif experts % parts:
                yield f"{key}.expert_parallel", f"{parts} does not divide the {experts} experts"


def check_names(placement: Placement) -> Iterator[Violation]:
    """Replica ids are unique; routes lead from replicas that prefill to replicas that decode and exist, each
    once; only a mixed one may have a route to itself."""
    replicas = {replica.id: replica for replica in placement.replicas}
    for name, count in Counter(replica.id for replica in placement.replicas).items():
        if count > 1:
            yield "replicas", f"id '{name}' is used {count} times"
    if placement.layer_ranges is not None:
        return
    seen = set()
    for k, route in enumerate(placement.routes):
        for end, role in ((route.from_, "prefill"), (route.to, "decode")):
            if end not in replicas:
                yield f"routes[{k}]", f"there is no replica '{end}'"
            elif replicas[end].role not in (role, "mixed"):
                yield f"routes[{k}]", f"'{end}' is a {replicas[end].role} replica, not a {role} one"
        if (route.from_, route.to) in seen:
            yield f"routes[{k}]", f"{route.from_} -> {route.to} is listed twice"
        seen.add((route.from_, route.to))
    colocated = any(replica.role == "colocated" for replica in placement.replicas)
    if placement.routes and not colocated and all(r.min_prompt_tokens for r in placement.routes):
        yield "routes", "none takes short prompts: one needs min_prompt_tokens 0"


def check_tensor_groups(placement: Placement, cluster: Cluster) -> Iterator[Violation]:
    """A stage's GPUs are of one type, and those that share attention split the model's heads."""
    degrees = placement.model.tensor_degrees(max(len(s.gpus) for r in placement.replicas for s in r.stages))
    for r, replica in enumerate(placement.replicas):
        for s, stage in enumerate(replica.stages):
            key = f"replicas[{r}].stages[{s}].gpus"
            names = {_accelerator(cluster, gpu).name for gpu in stage.gpus}
            if len(names) > 1:
                yield key, f"mixes {' and '.join(sorted(names))} in one tensor-parallel group"
            if stage.attention_degree not in degrees:
                yield (
                    key,
                    f"{stage.attention_degree} GPUs cannot split {placement.model.heads} heads "
                    f"and {placement.model.kv_heads} KV heads evenly",
                )


def check_memory(placement: Placement, cluster: Cluster) -> Iterator[Violation]:
    """The weights and the KV cache of max_batch requests fit in every GPU, by the placement's cost model."""
    if placement.cost_model.pipeline not in PIPELINE_SEMANTICS:
        yield "cost_model.pipeline", f"unknown '{placement.cost_model.pipeline}'"
        return
    if placement.cost_model.name not in COST_MODELS:
        yield "cost_model.name", f"unknown '{placement.cost_model.name}'"
        return
    if placement.layer_ranges is not None and placement.layer_ranges.tables is not None:
        return  # What fits was given; check_range_flow compares with it.
    costs, layers = placement.costs(), placement.model.layers
    for r, replica in enumerate(placement.replicas):
        phase = "prefill" if replica.role == "prefill" else "decode"
        semantics: PipelineSemantics = placement.cost_model.pipeline  # type: ignore[assignment]
        held: float = replica.max_batch
        if phase == "prefill":
            prompts = min(replica.max_batch, replica.engine.step_tokens / costs.isl)
            steps = replica.engine.steps_in_flight(semantics, len(replica.stages))
            held = prompts_held(prompts, steps + 1)
        if workers := placement.workers_of(replica.id):
            for s, most in enumerate(stage_requests(replica, workers, cluster, costs)):
                if replica.max_batch > most * (1 + TOLERANCE):
                    where = f"replicas[{r}].stages[{s}]"
                    yield where, f"{replica.max_batch} requests need more memory than GPUs and workers have"
            continue
        for s, stage in enumerate(replica.stages):
            group = stage.tensor_group(_accelerator(cluster, stage.gpus[0]))
            ends = {"first": stage.layers[0] == 0, "last": stage.layers[1] == layers}
            memory = costs.stage_memory(phase, group, **ends)  # type: ignore[arg-type]
            needed = memory.needed(stage.layer_count, held)
            if needed > memory.limit * (1 + TOLERANCE):
                yield (
                    f"replicas[{r}].stages[{s}]",
                    f"needs {needed / 2**30:.3g} GiB on each GPU, of {memory.limit / 2**30:.3g} GiB usable",
                )


def check_flow(placement: Placement) -> Iterator[Violation]:
    """No route or replica carries more than its capacity, and utilisation agrees with the flow."""
    sent: dict[str, float] = defaultdict(float)
    received: dict[str, float] = defaultdict(float)
    factors = factors_of(placement.workload.lengths, placement.replicas, placement.routes)
    for k, (route, factor) in enumerate(zip(placement.routes, factors, strict=True)):
        sent[route.from_] += route.flow_req_s * factor
        received[route.to] += route.flow_req_s
        moved = route.flow_req_s if route.from_ == route.to else route.flow_req_s * factor
        if moved > route.capacity_req_s * (1 + TOLERANCE):
            yield f"routes[{k}].flow_req_s", f"{route.flow_req_s:.6g} exceeds {route.capacity_req_s:.6g}"
    for r, replica in enumerate(placement.replicas):
        if replica.role == "colocated":
            continue
        prompts, answers = sent[replica.id], received[replica.id]
        if replica.role == "mixed":
            used = replica.busy(prompts, answers)
            if used > 1 + TOLERANCE:
                yield f"replicas[{r}].region", f"is exceeded {used:.6g} times by the flow of its routes"
            if abs(used - replica.utilisation) > TOLERANCE * max(used, 1e-9):
                yield f"replicas[{r}].utilisation", "does not agree with the flow of its routes"
            continue
        carried = prompts + answers
        if carried > replica.capacity_req_s * (1 + TOLERANCE):
            key = f"replicas[{r}].capacity_req_s"
            yield key, f"{replica.capacity_req_s:.6g} is below its flow {carried:.6g}"
        if abs(carried - replica.utilisation * replica.capacity_req_s) > TOLERANCE * max(carried, 1e-9):
            yield f"replicas[{r}].utilisation", "does not agree with the flow of its routes"


def check_throughput(placement: Placement) -> Iterator[Violation]:
    """Flow is conserved: routes and colocated replicas together carry the throughput, which is within the
    bound."""
    if placement.layer_ranges is not None:
        carried = served_req_s(placement)
    else:
        carried = math.fsum(route.flow_req_s for route in placement.routes)
        carried += math.fsum(
            r.utilisation * r.capacity_req_s for r in placement.replicas if r.role == "colocated"
        )
    total = placement.throughput.req_s
    if abs(carried - total) > TOLERANCE * max(total, 1e-9):
        yield "throughput.req_s", f"{total:.6g} is not the {carried:.6g} that the routes carry"
    if total > placement.bound.req_s * (1 + TOLERANCE):
        yield "bound.req_s", f"{placement.bound.req_s:.6g} is below the throughput {total:.6g}"


def check_links(placement: Placement, cluster: Cluster) -> Iterator[Violation]:
    """No link, network card, uplink or GPU port carries more than it can, with the KV caches of all routes
    and the activations of all pipelines together; not checked if the placement says that routes do not share
    links."""
    if placement.cost_model.links != "shared" or placement.cost_model.name not in COST_MODELS:
        return
    for k, route in enumerate(placement.routes):
        senders, receivers = placement.replica(route.from_).gpus, placement.replica(route.to).gpus
        if any(link.from_ not in senders or link.to not in receivers for link in route.links):
            yield f"routes[{k}].links", "name GPUs that the two replicas do not have"
            return
        moved = math.fsum(link.bytes_per_req for link in route.links)
        if abs(moved - route.kv_bytes_per_req) > TOLERANCE * route.kv_bytes_per_req:
            yield f"routes[{k}].links", f"move {moved:.6g} bytes of {route.kv_bytes_per_req:.6g} per request"
    traffic = traffic_of(cluster, placement.costs(), placement.replicas, placement.routes)
    for name, share in traffic.at_least(1 + TOLERANCE):
        yield "routes", f"{name} would carry {share:.6g} times what it can"


def factors_of(lengths: RequestLengths, replicas: Iterable[Replica], routes: Sequence[Route]) -> list[float]:
    """Of each route, the mean prompt of its requests over that of all: 1 unless routes have limits. A request
    counts as so many prompts where it is prefilled and sent."""
    flows = [(route.flow_req_s, route.min_prompt_tokens) for route in routes]
    alone = [(r.utilisation * r.capacity_req_s, 0) for r in replicas if r.role == "colocated"]
    return prompt_factors(lengths, [*flows, *alone])[: len(flows)]


def traffic_of(
    cluster: Cluster, costs: CostModel, replicas: Sequence[Replica], routes: Sequence[Route]
) -> Traffic:
    """The traffic of a placement: the KV caches of all routes and the activations of all pipelines.

    Raises
    ------
    KeyError : a GPU that the cluster lacks
    """
    traffic, tokens = Traffic(cluster), dict[str, float]()
    for route, factor in zip(routes, factors_of(costs.lengths, replicas, routes), strict=True):
        prompts = route.flow_req_s * factor
        traffic.add_transfer(KvTransfer.of(parts_of_gpus(cluster, route.parts)), prompts)
        tokens[route.from_] = tokens.get(route.from_, 0.0) + prompts * costs.isl
        tokens[route.to] = tokens.get(route.to, 0.0) + route.flow_req_s * costs.osl
    for replica in replicas:
        sent = activations(
            cluster.nodes_of(stage.gpus[0] for stage in replica.stages), costs.activation_bytes_per_token
        )
        own = tokens.get(replica.id, 0.0)
        if replica.role == "colocated":
            own = replica.utilisation * replica.capacity_req_s * (costs.isl + costs.osl)
        traffic.add(sent, own)
    return traffic


def _accelerator(cluster: Cluster, gpu: str) -> Accelerator:
    """The type of a GPU."""
    return cluster.types[int(cluster.type_of[cluster.index(gpu)])]
