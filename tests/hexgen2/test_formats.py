"""Searches for weights and KV caches with fewer bits: where they run, what they gain, what vLLM is told."""

from __future__ import annotations

import json

import pytest

import hexgen2
from cluster_specs.schema import ClusterSpec, NodeSpec
from cost_model.errors import InputError
from cost_model.models import find_model
from hexgen2.export.vllm import vllm_files
from hexgen2.placement import Placement


def cluster(cards):
    return ClusterSpec(name=cards.replace(":", "-"), nodes=[NodeSpec(name="a", accelerators=cards)])


def searched(cards, **formats):
    return hexgen2.search(cluster=cluster(cards), model="llama-3-8b", workload="HPLD", **formats)


@pytest.mark.parametrize(("card", "native"), [("H100:2", True), ("A100-80GB:2", False)])
def test_fp8_gains_more_where_the_card_computes_in_it(card, native):
    """Heavy prefill is bound by compute: twice as fast on H100, while an A100 only reads less."""
    of_2023 = {"cost_model": "calibrated"}
    plain, fp8 = searched(card, **of_2023), searched(card, weights="fp8", kv="fp8", **of_2023)
    gain = fp8.throughput.req_s / plain.throughput.req_s
    assert (gain > 1.5) == native and gain > 1
    assert (fp8.model.weight_type, fp8.model.kv_value_bytes) == ("fp8", 1)


def test_fp8_gains_in_today_s_engines_too():
    """Less than on paper, since they quantise activations first; more on H100 than on A100."""
    gains = []
    for card in ("H100:2", "A100-80GB:2"):
        plain, fp8 = searched(card), searched(card, weights="fp8", kv="fp8")
        gains.append(fp8.throughput.req_s / plain.throughput.req_s)
    assert gains[0] > gains[1] > 1


def test_fewer_bits_fit_where_16_do_not():
    asked = {"cluster": cluster("H100:2"), "model": "llama-3-70b", "workload": "LPLD"}
    asked["phases"] = "disaggregated"
    with pytest.raises(hexgen2.InfeasibleError):
        hexgen2.search(**asked)
    assert hexgen2.search(**asked, weights="int4").throughput.req_s > 0


@pytest.mark.parametrize(
    ("cards", "weights"), [("T4:8", "nvfp4"), ("V100-32GB:4", "fp8"), ("MI300X:2", "int4")]
)
def test_a_format_that_a_card_lacks_is_refused(cards, weights):
    with pytest.raises(InputError, match=rf"--weights: {cards.split(':')[0]} has no kernels for {weights}"):
        searched(cards, weights=weights)
    with pytest.raises(InputError, match="has no kernels for"):
        hexgen2.estimate(gpu=cards, model="llama-3-8b", isl=512, weights=weights)


def test_a_card_of_ones_own_states_its_generation():
    own = {"memory_gib": 96, "bf16_dense_tflops": 500, "memory_bandwidth_gbyte_s": 3000}
    spec = {"name": "own", "nodes": [{"name": "a", "accelerators": "X9:2"}], "accelerators": {"X9": own}}
    asked = {"model": "llama-3-8b", "workload": "HPLD", "weights": "fp8"}
    with pytest.raises(InputError, match="state the generation of X9 under accelerators"):
        hexgen2.search(cluster=ClusterSpec.model_validate(spec), **asked)
    own["generation"] = "hopper"
    assert hexgen2.search(cluster=ClusterSpec.model_validate(spec), **asked).throughput.req_s > 0


def test_placements_keep_the_formats_and_re_plans_too(tmp_path):
    found = searched("H100:3", weights="fp8")
    found.save(tmp_path / "placement.json")
    assert Placement.load(tmp_path / "placement.json").model == found.model
    after = hexgen2.replan(found, lost=["a/0"], model="llama-3-8b", weights="fp8")
    assert after.model == found.model
    for other in ({"weights": "int4"}, {"kv": "fp8"}, {"model": "llama-3-8b"}):
        with pytest.raises(InputError, match="differs in its formats"):
            hexgen2.replan(found, lost=["a/0"], **other)


def test_old_placements_load_and_plain_ones_have_no_new_keys():
    data = json.loads(searched("H100:2").to_json())
    assert "only_experts_quantised" not in data["model"]
    assert not any("generation" in card for card in data["cluster"]["accelerators"].values())


def test_compare_takes_formats():
    asked = {"cluster": cluster("H100:2"), "model": "llama-3-8b", "workload": "HPLD", "strategies": "vllm"}
    plain, fp8 = (hexgen2.compare(**asked, seconds=2, weights=weights).rows()[0] for weights in (None, "fp8"))
    assert fp8["peak_req_s"] > plain["peak_req_s"]


def test_vllm_makes_fp8_of_a_shipped_model_and_reads_other_formats_from_the_checkpoint():
    for weights, told in (("fp8", True), ("int4", False), (None, False)):
        found = searched("H100:2", weights=weights, kv="fp8")
        scripts = "".join(
            text for name, text in vllm_files(found, "m", "test").items() if name.endswith(".sh")
        )
        assert ("--quantization fp8" in scripts) == told and "--kv-cache-dtype fp8" in scripts


def test_a_model_in_16_bits_stays_what_it_is():
    assert searched("H100:2").model == find_model("llama-3-8b")
