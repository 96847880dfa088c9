"""METIS and the partition of large clusters by parts of nodes, compared with brute force and networkx."""

from __future__ import annotations

import functools
import itertools

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import graphs, problem_from

from hexgen2.checks import violations
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.partition import kernighan_lin as kl
from hexgen2.search.partition.coarsen import gpu_graph
from hexgen2.search.partition.initial import group_graph, initial_solution, node_parts, spectral_and_swaps
from hexgen2.search.partition.metis import metis_partition
from hexgen2.search.problem import Problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy

PARTITIONERS = (spectral_and_swaps, metis_partition)


def cut(weights: np.ndarray, labels: np.ndarray) -> float:
    """Bandwidth between different groups."""
    graph = nx.from_numpy_array(weights)
    return (
        sum(
            nx.cut_size(graph, np.flatnonzero(labels == k).tolist(), weight="weight")
            for k in set(labels.tolist())
        )
        / 2
    )


@functools.cache
def racks(gpus: int) -> Problem:
    """Nodes of 8 GPUs of four types, 8 nodes per rack."""
    nodes = [
        {
            "name": f"n{i}",
            "accelerators": f"{('H100', 'A100-80GB', 'L40', 'A6000')[i % 4]}:8",
            "interconnect": "pcie4",
        }
        for i in range(gpus // 8)
    ]
    links = [
        {"from": f"n{i}", "to": f"n{j}", "bandwidth_gbit_s": 100, "latency_us": 20}
        for i, j in itertools.combinations(range(len(nodes)), 2)
        if i // 8 == j // 8
    ]
    network = {"default": {"bandwidth_gbit_s": 25, "latency_us": 50}, "links": links}
    return problem_from({"name": "racks", "nodes": nodes, "network": network}, "llama-2-70b", "HPHD")


@given(graphs(), st.data())
def test_metis_groups_are_never_empty_and_repeat(graph, data):
    weights, memory = graph
    groups = data.draw(st.integers(1, len(memory)))
    labels = metis_partition(weights, memory, groups)
    assert sorted(set(labels.tolist())) == list(range(groups))
    assert (metis_partition(weights, memory, groups) == labels).all()


@pytest.mark.parametrize("groups", [2, 3])
def test_metis_cuts_little_more_than_any_balanced_partition(groups):
    rng = np.random.default_rng(1)
    ratios = []
    for _ in range(20):
        weights = np.triu(rng.choice([1.0, 3.0, 25.0, 200.0], (6, 6)), 1)
        weights += weights.T
        equal = [
            np.array(labels)
            for labels in itertools.product(range(groups), repeat=6)
            if (np.bincount(labels, minlength=groups) == 6 // groups).all()
        ]
        labels = metis_partition(weights, np.full(6, 80.0), groups)
        assert np.bincount(labels).max() <= 6 // groups + 1
        ratios.append(cut(weights, labels) / min(cut(weights, other) for other in equal))
    assert np.median(ratios) <= 1.01
    assert max(ratios) <= 1.5


def test_metis_balances_memory_and_not_the_number_of_gpus():
    memory = np.array([80.0] * 3 + [20.0] * 12)
    labels = metis_partition(np.ones((15, 15)), memory, 2)
    assert abs(memory[labels == 0].sum() - 240) <= 20


@pytest.mark.parametrize("groups", [4, 16])
def test_metis_finds_scattered_pods(groups):
    pod = np.random.default_rng(groups).permutation(groups * 4) % groups
    weights = np.where(pod[:, None] == pod[None, :], 200.0, 1.0)
    labels = metis_partition(weights, np.full(len(pod), 80.0), groups)
    assert cut(weights, labels) == cut(weights, pod)


@given(
    st.lists(st.tuples(st.integers(1, 8), st.sampled_from([24.0, 48.0, 80.0])), min_size=1, max_size=8),
    st.data(),
)
def test_parts_of_nodes_are_even_and_as_many_as_wanted(nodes, data):
    sizes, memory = (np.array(values) for values in zip(*nodes, strict=True))
    node_of = np.repeat(np.arange(len(nodes)), sizes)
    groups = data.draw(st.integers(1, len(node_of)))
    part_of = node_parts(node_of, memory[node_of], groups)
    assert sorted(set(part_of.tolist())) == list(range(part_of[-1] + 1))
    assert groups <= part_of[-1] + 1 <= max(groups, len(nodes) + groups)
    for part in set(part_of.tolist()):
        assert len(set(node_of[part_of == part])) == 1
    for node in range(len(nodes)):
        counts = np.bincount(part_of[node_of == node])
        counts = counts[counts > 0]
        assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("groups", [2, 7, 30, 100, 256])
def test_groups_of_a_large_cluster_cover_each_gpu_once(partitioner, groups):
    problem = racks(256)
    solution = initial_solution(Evaluator(problem), groups, partitioner)
    assert len(solution.groups) == groups
    taken = np.zeros(32, dtype=int)
    for node, count in (part for group in solution.groups for part in group.counts):
        taken[node] += count
    assert (taken == 8).all()
    if groups <= 32:
        assert all(count == 8 for group in solution.groups for _, count in group.counts)
    else:
        assert all(len(group.counts) == 1 for group in solution.groups)
    assert initial_solution(Evaluator(problem), groups, partitioner) == solution


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_a_large_cluster_is_cut_between_racks(partitioner):
    problem = racks(256)
    weights, _ = gpu_graph(problem)
    graph = group_graph(problem, 4, partitioner)
    labels = np.zeros(256, dtype=int)
    for group, members in enumerate(graph.members):
        labels[list(members)] = group
    rack = np.arange(256) // 64
    assert cut(weights, labels) == pytest.approx(cut(weights, rack))
    assert graph.weights.sum() / 2 == pytest.approx(cut(weights, rack))


def test_swaps_end_where_no_pair_of_groups_has_one_left():
    rng = np.random.default_rng(5)
    for _ in range(10):
        weights = np.triu(rng.choice([1.0, 25.0, 200.0], (24, 24)), 1)
        weights += weights.T
        memory = rng.choice([24.0, 48.0, 80.0], 24)
        refined = kl.kernighan_lin(weights, memory, np.arange(24) % 6, passes=100)
        assert (kl.kernighan_lin(weights, memory, refined, passes=1) == refined).all()


def test_of_too_many_pairs_those_with_most_to_gain_are_refined(monkeypatch):
    pod = np.arange(16) // 4
    weights = np.where(pod[:, None] == pod[None, :], 200.0, 1.0)
    labels = pod.copy()
    labels[[8, 12]] = labels[[12, 8]]
    monkeypatch.setattr(kl, "MAX_PAIRS", 1)
    assert cut(weights, kl.kernighan_lin(weights, np.full(16, 80.0), labels)) == cut(weights, pod)


@pytest.mark.parametrize("strategy", ["hexgen2-paper", "random-swap"])
def test_a_spent_time_limit_leaves_the_start_of_a_large_cluster(strategy):
    placement = find_strategy(strategy)(racks(256), SearchOptions(time_limit_s=0.0))
    assert placement.search.cut == "time limit"
    assert placement.search.evaluations == 2  # the start, with roles both ways around
    assert violations(placement) == []
