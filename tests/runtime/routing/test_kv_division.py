"""A launch divides memory between layers with and without a window so that it holds the requests planned."""

from __future__ import annotations

from pathlib import Path

import pytest
from placements import placement_of, replica_of

from cluster_specs.loader import resolve
from cluster_specs.schema import ClusterSpec, NodeSpec
from cost_model.models import shipped_model
from hexgen2.cluster import Cluster
from hexgen2.prediction.kv_capacity import kv_capacity_tokens, kv_tokens_held
from hexgen2.workload.lengths import RequestClass, Workload
from runtime.routing.kv_budget import KvBudget, growth_tokens
from runtime.routing.kv_division import divided, windowed_account


@pytest.mark.parametrize(("isl", "osl"), [(3000, 600), (500, 100), (900, 2000)])
def test_as_many_requests_are_admitted_as_the_plan_counts(isl: int, osl: int) -> None:
    model = shipped_model("gpt-oss-20b")
    box = NodeSpec(name="box", accelerators="H100:1", interconnect="nvlink")
    workload = Workload(name="alike", classes=(RequestClass(name="alike", isl=isl, osl=osl),))
    replica = replica_of("decode-0", [("box/0", model.layers)], max_batch=256)
    placement = placement_of(ClusterSpec(name="box", nodes=[box]), model, workload, [replica], [])
    costs = placement.costs()
    cluster = Cluster.from_spec(resolve(placement.cluster, "cluster", Path()))
    tokens = kv_capacity_tokens(replica, cluster, costs)
    planned = tokens / kv_tokens_held(replica, costs)
    whole, room = divided(placement, replica, costs, tokens)
    budget = KvBudget(
        whole, 10**6, growth_tokens(placement), windowed=windowed_account(placement, replica, room)
    )
    admitted = 0
    while budget.has_room(isl + osl // 2, prefill_only=False):
        budget.hold(admitted, isl + osl // 2)
        admitted += 1
    assert 0.96 * planned < admitted <= planned
