"""Search problems and graphs for tests: random ones, and the shipped settings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from cluster_specs.loader import parse_cluster
from cost_model.architecture import ModelArchitecture
from cost_model.models import find_model
from cost_model.registry import make_cost_model
from hexgen2.cluster import Cluster
from hexgen2.search.problem import Problem
from hexgen2.workload.classes import load_workload

TYPES = ("H100", "A100-80GB", "L40", "A6000", "L4")
WORKLOADS = ("HPLD", "HPHD", "LPHD", "LPLD")
LATENT = ModelArchitecture(**{**find_model("deepseek-v3").model_dump(), "name": "latent", "layers": 4})
"""A mixture with latent attention that fits on a few GPUs."""
SETTINGS = ("hexgen2-homogeneous", *(f"hexgen2-setting-{k}" for k in range(1, 6)))
MODELS = ("llama-2-70b", "opt-30b")
ON_SETTING_1 = ["--cluster", "hexgen2-setting-1", "--model", "llama-2-70b", "--workload", "HPHD"]
"""Search options."""


def problem_from(
    spec: dict,
    model: str | ModelArchitecture,
    workload: str,
    cost_model: str = "calibrated",
    pipeline: str = "pipelined",
) -> Problem:
    """A problem on a cluster that is given as a dictionary."""
    cluster, architecture, load = (
        parse_cluster(spec, "test", Path()),
        find_model(model),
        load_workload(workload),
    )
    costs = make_cost_model(cost_model, architecture, load.lengths)
    return Problem(cluster, Cluster.from_spec(cluster), architecture, load, costs, pipeline)  # type: ignore[arg-type]


@st.composite
def clusters(draw: st.DrawFn, max_gpus: int = 6) -> dict:
    """One to four nodes with one GPU type each, up to max_gpus GPUs, and links of any speed."""
    nodes: list[dict] = []
    left = draw(st.integers(2, max_gpus))
    while left and len(nodes) < 4:
        count = draw(st.integers(1, min(left, 4)))
        left -= count
        nodes.append(
            {
                "name": f"n{len(nodes)}",
                "accelerators": f"{draw(st.sampled_from(TYPES))}:{count}",
                "interconnect": draw(st.sampled_from(["nvlink", "pcie4", "pcie3"])),
            }
        )
    bandwidths = st.sampled_from([1, 5, 10, 25, 100, 400])
    links = [
        {"from": a["name"], "to": b["name"], "bandwidth_gbit_s": draw(bandwidths), "latency_us": 50}
        for i, a in enumerate(nodes)
        for b in nodes[i + 1 :]
        if draw(st.booleans())
    ]
    default = {"bandwidth_gbit_s": draw(bandwidths), "latency_us": 50}
    return {"name": "random", "nodes": nodes, "network": {"default": default, "links": links}}


@st.composite
def problems(draw: st.DrawFn, max_gpus: int = 6) -> Problem:
    """A random cluster with a model that often fits, and any workload, cost model and pipeline semantics."""
    return problem_from(
        draw(clusters(max_gpus)),
        draw(st.sampled_from(["opt-13b", "opt-30b", "llama-2-13b", "llama-2-70b", "mixtral-8x7b", LATENT])),
        draw(st.sampled_from(WORKLOADS)),
        draw(st.sampled_from(["vllm", "calibrated", "table1"])),
        draw(st.sampled_from(["pipelined", "literal", "paper_optimistic"])),
    )


@st.composite
def graphs(draw: st.DrawFn, least: int = 2, most: int = 9) -> tuple[np.ndarray, np.ndarray]:
    """Bandwidths [n, n] and memories [n] of a complete graph."""
    n = draw(st.integers(least, most))
    upper = draw(st.lists(st.sampled_from([1.0, 3.0, 25.0, 200.0]), min_size=n * n, max_size=n * n))
    weights = np.triu(np.array(upper).reshape(n, n), 1)
    memory = np.array(draw(st.lists(st.sampled_from([24.0, 48.0, 80.0]), min_size=n, max_size=n)))
    return weights + weights.T, memory


def set_partitions(items: list[int]):
    """Every partition of the items into non-empty sets."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for smaller in set_partitions(rest):
        yield [[first], *smaller]
        for k in range(len(smaller)):
            yield [*smaller[:k], [first, *smaller[k]], *smaller[k + 1 :]]
