"""What a re-plan starts from: a running placement, and what has changed since."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from cluster_specs.loader import load_cluster
from cluster_specs.schema import ClusterSpec
from cost_model.architecture import ModelArchitecture
from cost_model.dtypes import check_kernels, in_formats
from cost_model.errors import InputError
from cost_model.models import find_model
from cost_model.registry import find_cost_model
from hexgen2.cluster import Cluster
from hexgen2.goal import Goal
from hexgen2.placement import Placement
from hexgen2.search.problem import Problem
from hexgen2.workload.classes import load_workload
from hexgen2.workload.lengths import Workload


def replan_problem(
    previous: Placement,
    cluster: str | Path | ClusterSpec | None = None,
    model: str | Path | ModelArchitecture | None = None,
    workload: str | Path | Workload | None = None,
    isl: float | None = None,
    osl: float | None = None,
    cost_model: str | Path | None = None,
    pipeline: str | None = None,
    links: str | None = None,
    lost: str = "",
    added: str = "",
    weights: str | None = None,
    kv: str | None = None,
) -> Problem:
    """The problem to re-plan; whatever is not given is taken from the placement, which must be valid
    (hexgen2.checks.verify).

    Parameters
    ----------
    lost, added : GPU ids or node names, separated by commas. Lost GPUs stay out until they are added again.
        With another cluster, GPUs that it lacks count as lost, and new ones can be added

    Raises
    ------
    InputError : an unknown GPU, one both lost and added or added while it serves, another model, or an input
        that make_problem rejects
    """
    asked = in_formats(previous.model if model is None else find_model(model), weights, kv)
    if asked != previous.model:
        problem = f"differs from {previous.model.name}, which the placement serves"
        if asked.name == previous.model.name:
            problem = f"differs in its formats from the {previous.model.weight_type} model of the placement"
        raise InputError("--model", asked.name, problem, "new weights need a new search, without --from")
    now = Cluster.from_spec(previous.cluster if cluster is None else load_cluster(cluster))
    before = set(Cluster.from_spec(previous.cluster).gpu_ids)
    out = {gpu for gpu in previous.lost if gpu in set(now.gpu_ids)}
    leaving = _gpus("--lost", lost, now)
    back = _gpus("--added", added, now, among=[g for g in now.gpu_ids if g in out or g not in before])
    both = sorted(leaving & back)
    if both:
        raise InputError("--added", both[0], "is also in --lost", "name it in only one of them")
    fixed = workload is None and isl is None and osl is None
    load = previous.workload if fixed else load_workload(workload, isl, osl)
    check_kernels(now.accelerators, previous.model.weight_type, "--model")
    source = previous.cost_model.source if cost_model is None else find_cost_model(cost_model)
    return Problem(
        now.spec,
        now,
        previous.model,
        load,
        source.costs(previous.model, load.lengths),
        pipeline or previous.cost_model.pipeline,  # type: ignore[arg-type]
        Goal(),
        frozenset((out | leaving) - back),
        links or previous.cost_model.links,  # type: ignore[arg-type]
        phases=previous.phases,
    )


def _gpus(option: str, text: str, cluster: Cluster, among: Iterable[str] | None = None) -> set[str]:
    """The GPUs named by a list of ids and node names. With `among`, ids must be in it, and a node name stands
    for those of its GPUs that are."""
    by_node: dict[str, list[str]] = {name: [] for name in cluster.node_names}
    for gpu in cluster.gpu_ids:
        by_node[gpu.rsplit("/", 1)[0]].append(gpu)
    allowed = set(cluster.gpu_ids if among is None else among)
    found: set[str] = set()
    for name in filter(None, (part.strip() for part in text.split(","))):
        members = by_node.get(name, [name])
        if not set(members) <= set(cluster.gpu_ids):
            near = difflib.get_close_matches(name, [*by_node, *cluster.gpu_ids], n=1)
            hint = f"did you mean {near[0]}?" if near else f"nodes: {', '.join(by_node)[:200]}"
            raise InputError(option, name, f"is not in cluster {cluster.name}", hint)
        chosen = allowed & set(members)
        if not chosen:
            raise InputError(option, name, "is already part of the cluster and not lost", "leave it out")
        found |= chosen
    return found
