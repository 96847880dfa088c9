"""Service times computed from a placement alone equal those that its search used."""

import itertools
from pathlib import Path

import pytest

from cluster_specs.loader import resolve
from cost_model.pipeline import PIPELINE_SEMANTICS
from hexgen2.cluster import Cluster
from hexgen2.prediction.bottlenecks import bottlenecks_of
from hexgen2.prediction.latency import latency_of
from hexgen2.search.problem import make_problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy


@pytest.mark.parametrize(
    ("strategy", "pipeline", "workload"),
    [
        ("hexgen2", "pipelined", "LPHD"),
        *itertools.product(["splitwise", "vllm"], PIPELINE_SEMANTICS, ["HPLD", "LPHD"]),
    ],
)
def test_a_placement_tells_its_own_times_and_limits(strategy, pipeline, workload):
    problem = make_problem("hexgen2-setting-1", "opt-30b", workload, pipeline=pipeline)
    placement = find_strategy(strategy)(problem, SearchOptions(0, 2.0, simulated=False))
    cluster = Cluster.from_spec(resolve(placement.cluster, "cluster", Path()))
    found = latency_of(placement.replicas, cluster, problem.costs, pipeline)
    assert found.ttft_ms == pytest.approx(placement.latency.ttft_ms, rel=1e-6)
    assert found.tpot_ms == pytest.approx(placement.latency.tpot_ms, rel=1e-6)
    used = {gpu for replica in placement.replicas for gpu in replica.gpus}
    idle = [gpu for gpu in cluster.gpu_ids if gpu not in used]
    said = bottlenecks_of(placement.replicas, placement.routes, idle, cluster, problem.costs, problem.links)
    assert said == placement.bottlenecks
