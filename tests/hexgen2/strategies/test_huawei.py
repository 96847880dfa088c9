"""Workload-aware deployment: the search is exhaustive, and Algorithm 1 groups requests as the paper says."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problem_from, problems

from cost_model.errors import InfeasibleError
from hexgen2.checks import violations
from hexgen2.placement import Placement
from hexgen2.prediction.batch_times import BatchTimes
from hexgen2.search.problem import Problem, make_problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.baselines.huawei import (
    OneStagePlanner,
    by_machine,
    instance,
    sampled,
    search,
    throughput_req_s,
)

BY_FORMULAS = SearchOptions(simulated=False)


def degrees_of(placement: Placement) -> dict[str, list[int]]:
    """The degrees of the instances of each machine."""
    found: dict[str, list[int]] = {}
    for replica in placement.replicas:
        assert len(replica.stages) == 1 and replica.role == "colocated"
        (machine,) = {gpu.split("/")[0] for gpu in replica.gpus}
        found.setdefault(machine, []).append(len(replica.gpus))
    return found


@settings(max_examples=30, deadline=None)
@given(problems(max_gpus=8))
def test_the_configuration_is_the_best_of_all(problem):
    """Against every combination of degrees of all machines, each valued as a whole."""
    requests, planner = sampled(problem, 0), OneStagePlanner(problem)
    largest = max(isl + osl for isl, osl in requests)

    def served(node: int, degree: int) -> float:
        times = instance(problem, planner, node, degree)
        fits = times is not None and times.kv_tokens >= largest
        return len(problem.node_gpus[node]) // degree * throughput_req_s(times, requests) if fits else 0.0

    options = [
        [d for d in problem.model.tensor_degrees(len(gpus)) if len(gpus) % d == 0]
        for gpus in problem.node_gpus
    ]
    value = {node: {d: served(node, d) for d in choices} for node, choices in enumerate(options)}
    best = max(
        math.fsum(value[node][degree] for node, degree in enumerate(chosen))
        for chosen in itertools.product(*options)
    )
    try:
        placement = search(problem, BY_FORMULAS)
    except InfeasibleError:
        assert best == 0
        return
    assert violations(placement) == []
    total = 0.0
    for machine, degrees in degrees_of(placement).items():
        node = problem.cluster.node_names.index(machine)
        assert len(set(degrees)) == 1 and sum(degrees) == len(problem.node_gpus[node])
        total += value[node][degrees[0]]
    assert total == pytest.approx(best, rel=1e-8)


def by_hand(times: BatchTimes, requests: list[tuple[int, int]]) -> float:
    """Algorithm 1, written down once more: the batches first, then their times."""
    batches, rest = [], list(requests)
    while rest:
        size = 1
        while size < min(len(rest), times.places):
            more = rest[: size + 1]
            if len(more) * (max(i for i, _ in more) + max(o for _, o in more)) > times.kv_tokens:
                break
            size += 1
        batches.append(rest[:size])
        rest = rest[size:]
    seconds = 0.0
    for batch in batches:
        b, s, o = len(batch), max(i for i, _ in batch), max(o for _, o in batch)
        p1, p2, p3, p4 = times.prefill
        p5, p6, p7, p8 = times.decode
        seconds += p1 * b * s + p2 * b + p3 * s + p4
        seconds += sum(p5 * b * (s + k) + p6 * b + p7 * (s + k) + p8 for k in range(1, o))
    return len(requests) / seconds


LENGTHS = st.lists(st.tuples(st.integers(1, 900), st.integers(1, 300)), min_size=1, max_size=40)


@settings(deadline=None)
@given(LENGTHS, st.integers(1200, 9000), st.integers(1, 12))
def test_requests_are_grouped_in_the_largest_batches(requests, kv_tokens, places):
    times = BatchTimes((1e-4, 1e-3, 1e-5, 0.01), (1e-6, 1e-4, 1e-6, 0.02), kv_tokens, places)
    assert throughput_req_s(times, requests) == pytest.approx(by_hand(times, requests))


def test_an_instance_must_hold_the_largest_request():
    """One V100 holds Llama-2 13B and 4,443 tokens: not a request of 4,600."""
    short = make_problem("huawei-v100-a800", "llama-2-13b", None, 3000, 400)
    long = make_problem("huawei-v100-a800", "llama-2-13b", None, 4200, 400)
    for problem, smallest in ((short, 1), (long, 2)):
        choices = next(iter(by_machine(problem, OneStagePlanner(problem), sampled(problem, 0))))
        assert choices[0].degree == smallest


def test_a_machine_of_three_gpus_has_no_degree_of_two():
    nodes = [{"name": "n", "accelerators": "A100-80GB:3"}]
    problem = problem_from({"name": "three", "nodes": nodes}, "llama-2-13b", "LPLD")
    assert degrees_of(search(problem, BY_FORMULAS)) == {"n": [1, 1, 1]}
    with pytest.raises(InfeasibleError, match=r"no machine alone.*llama-2-70b.*--strategy hexgen"):
        search(problem_from({"name": "three", "nodes": nodes}, "llama-2-70b", "LPLD"), BY_FORMULAS)


def test_machines_too_small_stay_idle():
    nodes = [{"name": "big", "accelerators": "H100:2"}, {"name": "small", "accelerators": "T4:2"}]
    problem: Problem = problem_from({"name": "two", "nodes": nodes}, "opt-30b", "LPLD")
    placement = search(problem, BY_FORMULAS)
    assert set(degrees_of(placement)) == {"big"}
    assert violations(placement) == []


def test_the_trace_has_every_degree():
    problem = make_problem("huawei-v100-a800", "llama-3-8b", "online")
    step = search(problem, BY_FORMULAS).search.trace[-1]["step"]
    assert all(f"tp{degree} " in step for degree in (1, 2, 4, 8))
