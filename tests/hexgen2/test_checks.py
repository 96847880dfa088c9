"""The checkers find every way in which an edited placement can be wrong."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placements import placement_of, replica_of

from cluster_specs.loader import resolve
from cluster_specs.schema import ClusterSpec, NodeSpec
from cost_model.architecture import ModelArchitecture
from cost_model.errors import InputError
from hexgen2.checks import verify, violations
from hexgen2.placement import Placement, Stage
from hexgen2.search.problem import make_problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy
from hexgen2.workload.classes import load_workload


@pytest.fixture(scope="module")
def sound() -> dict:
    problem = make_problem("hexgen2-setting-1", "llama-2-70b", "HPHD")
    return json.loads(find_strategy("hexgen2")(problem, SearchOptions()).to_json())


def staged(placement: dict) -> dict:
    """A replica with more than one stage."""
    return next(r for r in placement["replicas"] if len(r["stages"]) > 1)


def overlap_layers(p):
    staged(p)["stages"][1]["layers"][0] -= 1


def skip_a_layer(p):
    staged(p)["stages"][1]["layers"][0] += 1


def drop_the_last_stage(p):
    staged(p)["stages"].pop()


def empty_stage(p):
    stage = staged(p)["stages"][0]
    stage["layers"][1] = stage["layers"][0]


def use_a_gpu_twice(p):
    p["replicas"][1]["stages"][0]["gpus"] = p["replicas"][0]["stages"][0]["gpus"]


def invent_a_gpu(p):
    p["replicas"][0]["stages"][0]["gpus"][0] = "h100-1/7"


def mix_types_in_a_stage(p):
    taken = {g for r in p["replicas"] for s in r["stages"] for g in s["gpus"]}
    assert {"h100-1/0", "l40-1/0"} <= taken
    for replica in p["replicas"]:
        for stage in replica["stages"]:
            stage["gpus"] = [g for g in stage["gpus"] if g not in ("h100-1/0", "l40-1/0")]
        replica["stages"] = [s for s in replica["stages"] if s["gpus"]]
    p["replicas"] = [{**p["replicas"][0], "stages": [{"gpus": ["h100-1/0", "l40-1/0"], "layers": [0, 80]}]}]
    p["routes"] = []


def batch_beyond_memory(p):
    next(r for r in p["replicas"] if r["role"] == "decode")["max_batch"] = 5000


def all_layers_on_one_card(p):
    replica = next(r for r in p["replicas"] if len(r["stages"][0]["gpus"]) == 1)
    replica["stages"] = [{**replica["stages"][0], "layers": [0, 80]}]


def flow_beyond_a_route(p):
    p["routes"][0]["capacity_req_s"] = p["routes"][0]["flow_req_s"] / 2


def flow_beyond_a_replica(p):
    p["replicas"][0]["capacity_req_s"] /= 2


def utilisation_made_up(p):
    p["replicas"][0]["utilisation"] /= 2


def throughput_made_up(p):
    p["throughput"]["req_s"] *= 1.1


def bound_below_throughput(p):
    p["bound"]["req_s"] = p["throughput"]["req_s"] / 2


def route_to_nowhere(p):
    p["routes"][0]["to"] = "decode-99"


def route_backwards(p):
    route = p["routes"][0]
    route["from"], route["to"] = route["to"], route["from"]


def route_twice(p):
    p["routes"].append(p["routes"][0])


def same_name_twice(p):
    p["replicas"][0]["id"] = p["replicas"][1]["id"]


def unknown_pipeline_semantics(p):
    p["cost_model"]["pipeline"] = "wishful"


def more_than_a_card_carries(p):
    for node in p["cluster"]["nodes"]:
        node["network_gbit_s"] = 1.0


def kv_cache_that_does_not_move(p):
    p["routes"][0]["links"].pop()


def route_through_other_gpus(p):
    p["routes"][0]["links"][0]["to"] = p["routes"][0]["links"][0]["from"]


def attention_groups_of_unequal_size(p):
    p["replicas"][0]["stages"][0]["attention_data_parallel"] = 7


def experts_of_a_dense_model(p):
    stage = next(s for r in p["replicas"] for s in r["stages"] if len(s["gpus"]) > 1)
    stage["expert_parallel"] = len(stage["gpus"])


WRONG = [
    (attention_groups_of_unequal_size, "attention_data_parallel"),
    (experts_of_a_dense_model, "expert_parallel"),
    (more_than_a_card_carries, "routes"),
    (kv_cache_that_does_not_move, "routes[0].links"),
    (route_through_other_gpus, "routes[0].links"),
    (overlap_layers, "layers"),
    (skip_a_layer, "layers"),
    (drop_the_last_stage, "stages"),
    (empty_stage, "layers"),
    (use_a_gpu_twice, "gpus"),
    (invent_a_gpu, "gpus"),
    (mix_types_in_a_stage, "gpus"),
    (batch_beyond_memory, "stages"),
    (all_layers_on_one_card, "stages"),
    (flow_beyond_a_route, "flow_req_s"),
    (flow_beyond_a_replica, "capacity_req_s"),
    (utilisation_made_up, "utilisation"),
    (throughput_made_up, "throughput"),
    (bound_below_throughput, "bound"),
    (route_to_nowhere, "routes[0]"),
    (route_backwards, "routes[0]"),
    (route_twice, "routes"),
    (same_name_twice, "replicas"),
    (unknown_pipeline_semantics, "pipeline"),
]


def on_one_node(degrees: list[int], experts: int, heads: int) -> Placement:
    """One colocated replica of a small mixture, with stages of so many H100 and a layer each."""
    shape = {"layers": len(degrees), "hidden": 64, "head_dim": 8, "ffn": 64, "vocab": 64, "max_position": 64}
    model = ModelArchitecture(
        **shape, name="m", family="mixtral", heads=heads, kv_heads=heads, experts=experts
    )
    firsts = itertools.accumulate(degrees, initial=0)
    stages = [
        (" ".join(f"here/{first + k}" for k in range(degree)), 1)
        for first, degree in zip(firsts, degrees, strict=False)
    ]
    cluster = ClusterSpec(name="c", nodes=[NodeSpec(name="here", accelerators="H100:8")])
    replica = replica_of("colocated-0", stages)
    return placement_of(resolve(cluster, "c", Path()), model, load_workload("LPLD"), [replica], [])


@given(
    gpus=st.sampled_from([1, 2, 3, 4, 6, 8]),
    groups=st.integers(1, 9),
    parts=st.integers(1, 9),
    experts=st.sampled_from([1, 4, 6, 8]),
    heads=st.sampled_from([1, 2, 4, 6]),
)
def test_only_degrees_that_divide_are_sound(gpus, groups, parts, experts, heads):
    placement = on_one_node([gpus], experts, heads)
    degrees = {"attention_data_parallel": groups, "expert_parallel": parts}
    stages = placement.replicas[0].stages
    stages[0] = stages[0].model_copy(update=degrees)
    sound = gpus % groups == 0 and heads % (gpus // groups) == 0
    sound &= gpus % parts == 0 and experts % parts == 0
    assert any("stages" in key for key, _ in violations(placement)) != sound


def test_all_stages_have_as_many_attention_groups():
    placement = on_one_node([4, 2], experts=8, heads=8)
    first, second = placement.replicas[0].stages
    first.attention_data_parallel = 2
    assert [key for key, _ in violations(placement)] == ["replicas[0].stages[1].attention_data_parallel"]
    second.attention_data_parallel, second.expert_parallel = 2, 2
    assert violations(placement) == []
    assert placement.replicas[0].shape == "tp4dp2,tp2dp2ep2"


def test_degrees_of_one_leave_no_trace(sound):
    stage = Stage(gpus=["a/0", "a/1"], layers=(0, 2), attention_data_parallel=2)
    assert stage.model_dump(mode="json") == {
        "gpus": ["a/0", "a/1"],
        "layers": [0, 2],
        "attention_data_parallel": 2,
    }
    assert stage.shape == "tp2dp2"
    assert Stage.model_validate(stage.model_dump()) == stage
    assert "_parallel" not in Placement.model_validate(sound).to_json()


def test_a_searched_placement_is_sound(sound):
    assert violations(Placement.model_validate(sound)) == []


@pytest.mark.parametrize("edit,key", WRONG, ids=[edit.__name__ for edit, _ in WRONG])
def test_every_edit_is_found(sound, edit, key):
    placement = json.loads(json.dumps(sound))
    edit(placement)
    with pytest.raises(InputError) as caught:
        verify(Placement.model_validate(placement), "edited.json")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("edited.json: ")
    assert key in caught.value.key


def unknown_gpu(p):
    p["cluster"]["nodes"][0]["accelerators"] = "H1000:2"


def duplicate_node(p):
    p["cluster"]["nodes"][1]["name"] = p["cluster"]["nodes"][0]["name"]


def unknown_cost_model(p):
    p["cost_model"]["name"] = "guess"


@pytest.mark.parametrize("edit", [unknown_gpu, duplicate_node, unknown_cost_model])
def test_whatever_is_wrong_the_file_is_named(sound, edit):
    placement = json.loads(json.dumps(sound))
    edit(placement)
    with pytest.raises(InputError, match=r"^edited\.json: "):
        verify(Placement.model_validate(placement), "edited.json")


def test_saving_is_all_or_nothing(sound, tmp_path):
    placement = Placement.model_validate(sound)
    path = tmp_path / "placement.json"
    placement.save(path)
    assert Placement.load(path).to_json() == placement.to_json()
    assert [p.name for p in tmp_path.iterdir()] == ["placement.json"]
    with pytest.raises(InputError, match="cannot be written"):
        placement.save(tmp_path / "nowhere" / "placement.json")
