"""Search with a strategy for colocated replicas, launch the placement, and check its tokens."""

from pathlib import Path

import httpx
import pytest
from served import SECONDS, Server, gauge, until_idle

from cluster_specs.loader import parse_cluster
from cost_model.config import architecture_from_folder
from cost_model.registry import make_cost_model
from hexgen2.checks import violations
from hexgen2.cluster import Cluster
from hexgen2.search.problem import Problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy
from hexgen2.workload.lengths import RequestClass, Workload

CORE = {"memory_gib": 0.0039, "bf16_dense_tflops": 0.1, "memory_bandwidth_gbyte_s": 10, "kind": "cpu"}
CLUSTER = {
    "name": "small-cores",
    "nodes": [
        {"name": "big", "accelerators": "Fast:2", "interconnect": "shared-memory"},
        {"name": "small", "accelerators": "Slow:3", "interconnect": "shared-memory"},
    ],
    "network": {"default": {"bandwidth_gbit_s": 16, "latency_us": 200}},
    "accelerators": {"Fast": CORE, "Slow": CORE | {"memory_gib": 0.0035, "bf16_dense_tflops": 0.03}},
}


@pytest.fixture
def placement(model_folder):
    """vLLM's placement on cores of two types that are so small that each replica needs several."""
    spec, model = parse_cluster(CLUSTER, "test", Path()), architecture_from_folder(model_folder)
    workload = Workload(name="short", classes=(RequestClass(name="short", isl=32, osl=16),))
    costs = make_cost_model("calibrated", model, workload.lengths)
    problem = Problem(spec, Cluster.from_spec(spec), model, workload, costs)
    return find_strategy("vllm")(problem, SearchOptions())


def test_colocated_replicas_of_unlike_shapes_serve_the_same_tokens(placement, model_folder, tmp_path):
    assert violations(placement) == [] and len(placement.replicas) == 2
    assert all(len(replica.gpus) > 1 for replica in placement.replicas)
    server = Server(model_folder, tmp_path, placement=placement)
    body = {"model": placement.model.name, "prompt": "the quick", "max_tokens": 12, "temperature": 0}
    try:
        server.until_serving()
        with httpx.Client(base_url=server.url, timeout=SECONDS) as http:
            answers = [http.post("/v1/completions", json=body | {"ignore_eos": True}) for _ in range(24)]
            until_idle(http)
            served, moved = (gauge(http, f"hexgen2_route_{name}_total") for name in ("requests", "kv_bytes"))
    finally:
        server.close()
    routes = {
        (answer.headers["x-hexgen2-prefill-replica"], answer.headers["x-hexgen2-decode-replica"])
        for answer in answers
    }
    assert routes == {("colocated-0", "colocated-0"), ("colocated-1", "colocated-1")}
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {12}
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    assert (served, moved) == (24, 0)
