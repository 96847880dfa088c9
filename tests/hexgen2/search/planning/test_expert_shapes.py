"""Stages with attention groups and divided experts: found where they are better, and only there."""

from __future__ import annotations

import pytest

from cost_model import registry
from cost_model.base import TensorGroup, Work
from cost_model.calibrated import Calibrated
from hexgen2.checks import violations
from hexgen2.placement import Placement
from hexgen2.search.planning.plan import Planner
from hexgen2.search.planning.shapes import StageShape, vllm_runs, with_experts_divided
from hexgen2.search.problem import make_problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy

CLUSTER = """
name: two-nodes
nodes:
  - {name: a, accelerators: "H200:8", interconnect: nvlink, network_gbit_s: 400}
  - {name: b, accelerators: "H200:8", interconnect: nvlink, network_gbit_s: 400}
network: {default: {bandwidth_gbit_s: 400}}
"""


class Groups(Calibrated):
    """Memory alone decides, since times do not depend on the degrees."""

    times_expert_parallel = True


class Slow(Groups):
    """Attention groups take twice as long as other stages."""

    def layer_work_s(self, group: TensorGroup, work: Work) -> float:
        return super().layer_work_s(group, work) * (2 if group.attention_dp > 1 else 1)


@pytest.fixture
def problem_of(tmp_path, monkeypatch):
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)

    def make(costs: type[Calibrated], model: str):
        monkeypatch.setitem(registry.COST_MODELS, "calibrated", costs)
        return make_problem(path, model, None, 16000, 1000, "calibrated", weights="fp8")

    return make


def searched(problem) -> Placement:
    return find_strategy("hexgen2")(problem, SearchOptions())


def test_attention_groups_where_a_latent_cache_would_be_copied(problem_of):
    """Tensor parallelism holds the cache of a request on each GPU, so that fewer requests fit."""
    counts = ((0, 8),)
    plain = Planner(problem_of(Calibrated, "deepseek-v3")).plan("decode", counts)
    found = Planner(problem_of(Groups, "deepseek-v3")).plan("decode", counts)
    assert plain is not None and found is not None
    assert {stage[3:] for stage in plain.stages} == {(1, 1)}
    assert all(stage.attention_dp == stage.degree > 1 for stage in found.stages)
    assert found.capacity_req_s > 1.2 * plain.capacity_req_s
    slow = Planner(problem_of(Slow, "deepseek-v3")).plan("decode", counts)
    assert slow is not None and all(stage.attention_dp == 1 for stage in slow.stages)


def test_a_search_places_them_and_they_pass_the_checks(problem_of):
    placement = searched(problem_of(Groups, "deepseek-v3"))
    assert violations(placement) == []
    decode = [replica for replica in placement.replicas if replica.role == "decode"]
    assert decode and all(replica.attention_data_parallel > 1 for replica in decode)
    assert Placement.model_validate_json(placement.to_json()) == placement
    for route in placement.routes:
        source, target = placement.replica(route.from_), placement.replica(route.to)
        assert {link.from_ for link in route.links} == set(source.gpus)
        assert {link.to for link in route.links} == set(target.gpus)


@pytest.mark.parametrize(("costs", "model"), [(Groups, "llama-3-70b"), (Calibrated, "deepseek-v3")])
def test_dense_models_and_other_cost_models_have_plain_shapes(problem_of, costs, model):
    problem = problem_of(costs, model)
    shape = [(0, 4), (0, 4)]
    assert list(with_experts_divided(problem, shape)) == [[StageShape(0, 4), StageShape(0, 4)]]


def test_which_shapes_are_tried(problem_of):
    problem = problem_of(Groups, "mixtral-8x7b")  # 8 experts
    equal = [[stage[2:] for stage in each] for each in with_experts_divided(problem, [(0, 4), (1, 4)])]
    assert equal == [[(1, 1)] * 2, [(1, 4)] * 2, [(4, 4)] * 2]
    mixed = [[stage[2:] for stage in each] for each in with_experts_divided(problem, [(0, 4), (0, 2)])]
    assert mixed == [[(1, 1)] * 2, [(1, 4), (1, 2)]]
    assert len(list(with_experts_divided(problem, [(0, 1)]))) == 1


def test_vllm_runs_attention_groups_on_one_node_only():
    assert vllm_runs("colocated", [StageShape(0, 4, 4, 4), StageShape(0, 4, 4, 4)])
    assert not vllm_runs("colocated", [StageShape(0, 4, 4, 4), StageShape(1, 4, 4, 4)])
    assert vllm_runs("colocated", [StageShape(0, 4, 1, 4), StageShape(1, 4, 1, 4)])
