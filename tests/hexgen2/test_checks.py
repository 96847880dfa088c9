"""The checkers find every way in which an edited placement can be wrong."""

from __future__ import annotations

import json

import pytest

from cost_model.errors import InputError
from hexgen2.checks import verify, violations
from hexgen2.placement import Placement
from hexgen2.search.problem import make_problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy


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


WRONG = [
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
