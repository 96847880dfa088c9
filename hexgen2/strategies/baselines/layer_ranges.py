"""Helix and the systems that it compares with: overlapping ranges of layers, one per node.

Helix (Mei et al., ASPLOS 2025) searches the ranges with the greatest max flow. Petals, Swarm and separate
pipelines place them by rule (section 6.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from cost_model.errors import InfeasibleError, InputError
from hexgen2.placement import Placement, SearchRecord
from hexgen2.search.layer_ranges.bounds import upper_bound
from hexgen2.search.layer_ranges.build import build_placement
from hexgen2.search.layer_ranges.from_costs import nodes_of
from hexgen2.search.layer_ranges.heuristics import petals, separate_pipelines, swarm
from hexgen2.search.layer_ranges.instance import Instance, Ranges
from hexgen2.search.layer_ranges.plan import RangeSearch, search_ranges
from hexgen2.search.layer_ranges.service import KeptUp, Service
from hexgen2.search.problem import Problem
from hexgen2.search.stopping import Stopping
from hexgen2.strategies.base import SearchOptions, before_output_s
from hexgen2.strategies.registry import RANGES

HELIX, PETALS, SWARM, SEPARATE = RANGES


def search_helix(problem: Problem, options: SearchOptions) -> Placement:
    """The ranges of greatest flow that are found."""
    return _run(HELIX, problem, options, None)


def search_petals(problem: Problem, options: SearchOptions) -> Placement:
    """Each node in turn where tokens/s are least so far. The seed changes nothing, here and below."""
    return _run(PETALS, problem, options, petals)


def search_swarm(problem: Problem, options: SearchOptions) -> Placement:
    """Equal stages that the weakest node can hold, nodes balanced among them."""
    return _run(SWARM, problem, options, swarm)


def search_separate(problem: Problem, options: SearchOptions) -> Placement:
    """Pipelines of one kind of node each."""
    return _run(SEPARATE, problem, options, separate_pipelines)


def _run(
    name: str, problem: Problem, options: SearchOptions, rule: Callable[[Instance], Ranges | None] | None
) -> Placement:
    """Search, or follow the rule, and build the placement.

    Raises
    ------
    InputError : the goal is not throughput
    InfeasibleError : no request can be served
    """
    if problem.goal.rents:
        raise InputError(
            "--strategy", name, "does not choose what to rent", "use hexgen2, or give no --budget"
        )
    if problem.goal.objective != "throughput":
        text = f"does not search for --objective {problem.goal.objective}"
        raise InputError("--strategy", name, text, "use hexgen2")
    nodes = problem.range_nodes or nodes_of(problem, problem.partial_inference)
    stopping = Stopping(before_output_s(problem, options))
    search = RangeSearch(
        nodes.instance,
        stopping,
        problem.workload.isl + problem.workload.osl,
        options.progress or (lambda search: None),
    )
    if rule is None:
        aware = KeptUp(nodes.instance, Service(problem, nodes)) if problem.latency_aware else None
        search_ranges(search, options.seed, options.certify, aware)
    elif nodes.instance.nodes:
        search.offer(rule(nodes.instance), name)
        search.bound = upper_bound(nodes.instance, search.tok_s, stopping.out_of_time)
    if search.ranges is None or search.bound is None:
        stopping.raise_if_interrupted()
        raise InfeasibleError(_why_none(name, problem, nodes.instance, stopping))
    record = SearchRecord(
        seconds=stopping.elapsed_s,
        seed=options.seed,
        evaluations=search.evaluations,
        trace=search.trace,
        cut=stopping.cut_anywhere,
    )
    return build_placement(problem, nodes, search.ranges, search.flow(), search.bound, name, record)


def _why_none(name: str, problem: Problem, instance: Instance, stopping: Stopping) -> str:
    room, cluster = math.fsum(instance.most_layers), problem.cluster.name
    if room < instance.layers:
        return (
            f"no feasible placement: the nodes of {cluster} hold {room:.0f} layers together at most, and "
            f"{problem.model.name} has {instance.layers}; add GPUs or choose a smaller model"
        )
    if stopping.cut:
        return f"no feasible placement found within the time limit on {cluster}; raise --time-limit"
    if name == HELIX:
        return (
            f"no feasible placement found: the nodes of {cluster} hold {room:.0f} layers together, for the "
            f"{instance.layers} of {problem.model.name}, but no path through all of them was found; add GPUs"
        )
    why = (
        "no kind of node holds all layers by itself"
        if name == SEPARATE
        else "its rule leaves layers to no node"
    )
    return f"no feasible placement by {name} for {problem.model.name} on {cluster}: {why}; use helix"
