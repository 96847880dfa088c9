"""Coarsening of groups of GPUs into super nodes, and the projection back (HexGen-2, section 3.2, steps (ii)
and (iii); Hendrickson et al., 1995)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hexgen2.search.problem import Group, Problem, Solution, counts_of


@dataclass(frozen=True)
class CoarseGraph:
    """One super node per group.

    Attributes
    ----------
    members : of each super node, its GPUs (vertices of `gpu_graph`)
    weights : [k, k] bytes/s between groups, over all pairs of their GPUs
    memory : [k] bytes
    """

    members: tuple[tuple[int, ...], ...]
    weights: np.ndarray
    memory: np.ndarray


def gpu_graph(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """The graph of the n usable GPUs: [n, n] bandwidth in bytes/s (0 on the diagonal) and [n] memory in
    bytes."""
    cluster, usable = problem.cluster, problem.usable
    bandwidth = cluster.bandwidth_bytes_s[np.ix_(usable, usable)]
    return np.where(np.isfinite(bandwidth), bandwidth, 0.0), cluster.memory_bytes[usable]


def coarsen(weights: np.ndarray, memory: np.ndarray, labels: np.ndarray) -> CoarseGraph:
    """Merge the vertices of each group: parallel edges add up, edges inside a group vanish.

    Parameters
    ----------
    weights : [n, n] symmetric, bytes/s; the diagonal is ignored
    memory : [n] bytes
    labels : [n] group of each vertex
    """
    groups = np.unique(labels)
    edges = sums_by(sums_by(np.where(np.eye(len(weights), dtype=bool), 0.0, weights), labels).T, labels)
    np.fill_diagonal(edges, 0.0)
    members = tuple(tuple(int(v) for v in np.flatnonzero(labels == g)) for g in groups)
    return CoarseGraph(members, edges, sums_by(memory, labels))


def sums_by(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """[k, ...] the sums of those of the values [n, ...] that share a label [n], in the order of the labels.

    Values are added in their own order, so that results do not depend on the processor, as those of a matrix
    product do.
    """
    return np.array([values[labels == label].sum(axis=0) for label in np.unique(labels)])


def project(problem: Problem, graph: CoarseGraph, roles: list[str]) -> Solution:
    """The solution in which super node k is a replica of the role roles[k]."""
    groups, owners = [], problem.cluster.node_of[problem.usable]
    for members, role in zip(graph.members, roles, strict=True):
        nodes, counts = np.unique(owners[list(members)], return_counts=True)
        groups.append(Group(role, counts_of(dict(zip(nodes.tolist(), counts.tolist(), strict=True)))))
    return Solution(tuple(groups))
