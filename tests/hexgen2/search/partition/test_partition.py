"""The paper's phase one, step by step, compared with brute force."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import graphs, problem_from

from hexgen2.search.partition.coarsen import CoarseGraph, coarsen, project
from hexgen2.search.partition.kernighan_lin import kernighan_lin
from hexgen2.search.partition.secondary import secondary_partition
from hexgen2.search.partition.spectral import spectral_partition


def two_pods(size: int) -> np.ndarray:
    """Two halves with fast links inside and slow links between them."""
    half = np.arange(size) < size // 2
    return np.where(half[:, None] == half[None, :], 200.0, 1.0)


def test_spectral_cuts_where_links_are_thin():
    labels = spectral_partition(two_pods(8), np.full(8, 80.0), 2)
    assert len(set(labels[:4])) == 1 and len(set(labels[4:])) == 1 and labels[0] != labels[7]


def test_spectral_finds_scattered_pods():
    order = np.random.default_rng(3).permutation(12)
    pod = np.arange(12) % 3
    weights = np.where(pod[:, None] == pod[None, :], 200.0, 1.0)[np.ix_(order, order)]
    labels = spectral_partition(weights, np.full(12, 80.0), 3)
    assert {frozenset(np.flatnonzero(labels == k)) for k in range(3)} == {
        frozenset(np.flatnonzero(pod[order] == p)) for p in range(3)
    }


@given(graphs(), st.data())
def test_spectral_groups_are_never_empty(graph, data):
    weights, memory = graph
    groups = data.draw(st.integers(1, len(memory)))
    labels = spectral_partition(weights, memory, groups)
    assert sorted(set(labels)) == list(range(groups))


def objective(weights, memory, labels):
    """What Kernighan-Lin minimises, summed over all pairs of groups."""
    total = np.triu(weights, 1).sum()
    cut = sum(
        weights[i, j] for i, j in itertools.combinations(range(len(labels)), 2) if labels[i] != labels[j]
    )
    shares = np.array([memory[labels == k].sum() for k in np.unique(labels)]) / memory.sum()
    return cut / total + sum(abs(a - b) for a, b in itertools.combinations(shares, 2))


@given(graphs(least=4), st.randoms(use_true_random=False))
def test_kernighan_lin_on_two_groups_never_loses_and_keeps_sizes(graph, random):
    weights, memory = graph
    labels = np.array([0, 1] + [random.randint(0, 1) for _ in memory[2:]])
    refined = kernighan_lin(weights, memory, labels)
    assert sorted(refined) == sorted(labels)
    assert objective(weights, memory, refined) <= objective(weights, memory, labels) + 1e-9


def test_kernighan_lin_repairs_a_swapped_pair():
    labels = np.array([1, 0, 0, 0, 0, 1, 1, 1])
    refined = kernighan_lin(two_pods(8), np.full(8, 80.0), labels)
    assert len(set(refined[:4])) == 1 and len(set(refined[4:])) == 1


@given(graphs(), st.data())
def test_coarsening_keeps_bandwidth_between_groups(graph, data):
    weights, memory = graph
    groups = data.draw(st.integers(1, len(memory)))
    labels = spectral_partition(weights, memory, groups)
    coarse = coarsen(weights, memory, labels)
    for k, el in itertools.combinations(range(groups), 2):
        between = sum(weights[i, j] for i in coarse.members[k] for j in coarse.members[el])
        assert np.isclose(coarse.weights[k, el], between)
    assert np.isclose(coarse.memory.sum(), memory.sum())


@settings(deadline=None)
@given(graphs(most=8))
def test_secondary_partition_is_a_maximum_cut(graph):
    weights, memory = graph
    side = secondary_partition(CoarseGraph(tuple((i,) for i in range(len(memory))), weights, memory))

    def cut(sides):
        pairs = itertools.combinations(range(len(sides)), 2)
        return sum(weights[i, j] for i, j in pairs if sides[i] != sides[j])

    assert np.isclose(cut(side), max(map(cut, itertools.product([False, True], repeat=len(memory)))))


def test_secondary_partition_of_many_super_nodes_beats_a_random_one():
    rng = np.random.default_rng(0)
    weights = np.triu(rng.uniform(1, 100, (40, 40)), 1)
    weights += weights.T
    side = secondary_partition(CoarseGraph(tuple((i,) for i in range(40)), weights, np.ones(40)))
    assert weights[np.ix_(side, ~side)].sum() > weights.sum() / 4


def test_projection_gives_back_every_gpu():
    nodes = [{"name": "a", "accelerators": "H100:4"}, {"name": "b", "accelerators": "A100-80GB:3"}]
    problem = problem_from({"name": "t", "nodes": nodes}, "opt-13b", "LPLD")
    labels = np.array([0, 0, 1, 1, 1, 2, 2])
    graph = coarsen(np.ones((7, 7)), np.ones(7), labels)
    solution = project(problem, graph, ["prefill", "decode", "prefill"])
    assert [(g.role, g.counts) for g in solution.groups] == [
        ("prefill", ((0, 2),)),
        ("decode", ((0, 2), (1, 1))),
        ("prefill", ((1, 2),)),
    ]
