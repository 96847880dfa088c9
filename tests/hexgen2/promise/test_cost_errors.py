"""What a perturbation changes, and what it leaves alone."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hexgen2
from cluster_specs.loader import parse_cluster, resolve
from cluster_specs.schema import ClusterSpec
from cost_model.base import TensorGroup, Work
from cost_model.hardware import CATALOGUE, NO_LINK
from cost_model.perturbed import PerturbedCosts, PhaseFactors
from cost_model.registry import COST_MODELS, make_cost_model
from hexgen2.cluster import Cluster
from hexgen2.prediction.step_times import StepTimes
from hexgen2.promise.cost_errors import LOG_SD, CostErrors, Perturbation
from hexgen2.promise.trial import Trials
from hexgen2.search.problem import make_problem

PODS = {
    "name": "pods",
    "nodes": [
        {"name": "a", "accelerators": "H100:2", "interconnect": "nvlink"},
        {"name": "b", "accelerators": "A100-80GB:2", "interconnect": "nvlink"},
        {"name": "c", "accelerators": "A100-80GB:2", "interconnect": "pcie5", "network_gbit_s": 40},
    ],
    "network": {
        "default": {"bandwidth_gbit_s": 25, "latency_us": 20},
        "links": [{"from": "a", "to": "b", "bandwidth_gbit_s": 10, "latency_us": 20}],
        "uplinks": [{"name": "west", "nodes": ["a"], "bandwidth_gbit_s": 100}],
    },
}
PREFILL, DECODE = Work(512.0, 512.0 * 256, 0.0, 0.0, 1.0), Work(0.0, 0.0, 32.0, 32.0 * 700, 32.0)
BOTH = Work(*(a + b for a, b in zip(PREFILL, DECODE, strict=True)))
H100, A100 = (TensorGroup(CATALOGUE[name], 1, NO_LINK) for name in ("H100", "A100-80GB"))


@pytest.fixture(scope="module")
def pods() -> Cluster:
    return Cluster.from_spec(parse_cluster(PODS, "test", Path()))


@pytest.fixture(scope="module")
def placement() -> hexgen2.Placement:
    spec = {**PODS, "nodes": PODS["nodes"][:2], "network": {"default": PODS["network"]["default"]}}
    asked = {"model": "llama-2-13b", "workload": "HPLD", "phases": "disaggregated"}
    return hexgen2.search(cluster=ClusterSpec.model_validate(spec), **asked)


def costs_of(name: str):
    problem = make_problem("hexgen2-case-study", "llama-2-13b", "HPLD")
    return make_cost_model(name, problem.model, problem.workload.lengths)


def cluster_of(placement: hexgen2.Placement) -> Cluster:
    return Cluster.from_spec(resolve(placement.cluster, "cluster", Path()))


@pytest.mark.parametrize("name", COST_MODELS)
def test_without_errors_nothing_changes(name, pods):
    costs = costs_of(name)
    for draw in CostErrors.of(costs, pods).times(0.0).draws(pods, 3, 4):
        perturbed, cluster = draw.costs(costs), draw.cluster(pods)
        for work in (PREFILL, DECODE, BOTH):
            assert perturbed.layer_work_s(H100, work) == costs.layer_work_s(H100, work)
        assert perturbed.edge_work_s(A100, 8.0, True) == costs.edge_work_s(A100, 8.0, True)
        assert np.array_equal(cluster.bandwidth_bytes_s, pods.bandwidth_bytes_s)
        assert np.array_equal(cluster.card_bytes_s, pods.card_bytes_s) and cluster.uplinks == pods.uplinks


@given(st.integers(0, 100), st.floats(0.1, 4.0))
def test_factors_spread_with_the_errors(seed, times):
    pods = Cluster.from_spec(parse_cluster(PODS, "test", Path()))
    errors = CostErrors.of(costs_of("calibrated"), pods)
    for one, other in zip(errors.draws(pods, seed, 2), errors.times(times).draws(pods, seed, 2), strict=True):
        for name, factors in one.gpu_factors().items():
            for small, large in zip(factors, other.gpu_factors()[name], strict=True):
                assert math.log(large) == pytest.approx(times * math.log(small), abs=1e-9)


def test_their_spread_is_that_of_the_stated_error(pods):
    errors = CostErrors({"H100": 0.2}, {}, 0.2)
    draws = errors.draws(pods, 5, 4000)
    logs = [[math.log(f) for f in draw.gpu_factors()["H100"]] for draw in draws]
    links = [math.log(d.cluster(pods).bandwidth_bytes_s[0, 2] / pods.bandwidth_bytes_s[0, 2]) for d in draws]
    assert np.abs(logs).mean(axis=0) == pytest.approx([0.2, 0.2], rel=0.05)
    assert np.corrcoef(np.array(logs).T)[0, 1] == pytest.approx(0.5, abs=0.05)
    assert np.abs(links).mean() == pytest.approx(0.2, rel=0.05)


@pytest.mark.parametrize("name", COST_MODELS)
def test_a_factor_changes_the_times_of_its_gpu_type_and_phase_only(name):
    costs = costs_of(name)
    slower = PerturbedCosts(costs, {"H100": PhaseFactors(prefill=1.5, decode=2.0)})
    assert slower.layer_work_s(H100, PREFILL) == pytest.approx(1.5 * costs.layer_work_s(H100, PREFILL))
    assert slower.layer_work_s(H100, DECODE) == pytest.approx(2.0 * costs.layer_work_s(H100, DECODE))
    prompts_s, both_s = (costs.layer_work_s(H100, work) for work in (PREFILL, BOTH))
    expected = 1.5 * prompts_s + 2.0 * (both_s - prompts_s)
    assert slower.layer_work_s(H100, BOTH) == pytest.approx(expected)
    for work in (PREFILL, DECODE, BOTH):
        assert slower.layer_work_s(A100, work) == costs.layer_work_s(A100, work)
    memory = [model.stage_memory("decode", H100, True, True) for model in (costs, slower)]
    assert memory[0] == memory[1] and slower.prefill_batch() == costs.prefill_batch()


def test_simulated_steps_take_the_factor(placement):
    cluster, costs = cluster_of(placement), placement.costs()
    draw = Perturbation(CostErrors({"H100": 0.3, "A100-80GB": 0.3}, {}, 0.0), {("gpu", "H100"): 1.0})
    factor = draw.gpu_factors()["H100"].prefill
    assert factor > 1.1 and draw.gpu_factors()["A100-80GB"] == (1.0, 1.0)
    for replica in placement.replicas:
        times, changed = (
            StepTimes(replica, cluster, model, "pipelined") for model in (costs, draw.costs(costs))
        )
        for work in (PREFILL, DECODE):
            for group, before, after in zip(
                times.groups, times.step(work)[0], changed.step(work)[0], strict=True
            ):
                expected = factor if group.accelerator.name == "H100" else 1.0
                assert after == pytest.approx(expected * before)


def test_a_perturbed_link_is_that_of_a_cluster_file_with_another_bandwidth(placement):
    """The same arrays, and the same simulated times to the last bit."""
    draw = Perturbation(CostErrors({}, {}, 0.4), {("link", "a", "b"): -1.5})
    factor = math.exp(-1.5 * 0.4 * LOG_SD)
    assert factor < 0.6
    spec = placement.cluster.model_copy(deep=True)
    spec.network.default.bandwidth_gbit_s *= factor
    by_hand, cluster = placement.model_copy(update={"cluster": spec}), draw.cluster(cluster_of(placement))
    other = cluster_of(by_hand)
    assert cluster.bandwidth_bytes_s == pytest.approx(other.bandwidth_bytes_s)
    assert cluster.card_bytes_s == pytest.approx(other.card_bytes_s)
    runs = [
        Trials(one, where, placement.goal, 4).run(placement.throughput.req_s / 20, 300, 0)
        for one, where in ((placement, cluster), (by_hand, other), (placement, cluster_of(placement)))
    ]
    assert runs[0].e2el_s == pytest.approx(runs[1].e2el_s)
    assert runs[0].mean_e2el_s > runs[2].mean_e2el_s


def test_a_slower_type_is_that_of_a_cluster_file_with_a_slower_card():
    """By the formulas of Table 1, a card of half the peaks takes twice as long."""
    options = {"model": "llama-2-13b", "workload": "HPLD", "cost_model": "table1"}
    nodes = [{**node, "interconnect": "pcie4"} for node in PODS["nodes"][:2]]
    spec = ClusterSpec.model_validate({"name": "pods", "nodes": nodes})
    placement = hexgen2.search(cluster=spec, **options)
    assert all(len(stage.gpus) == 1 for replica in placement.replicas for stage in replica.stages)
    costs, cluster = placement.costs(), cluster_of(placement)
    doubled = PerturbedCosts(costs, {"H100": PhaseFactors(2.0, 2.0)})
    slow = placement.cluster.model_copy(deep=True)
    slow.nodes[0].accelerators = "Slow:2"
    card = slow.accelerators.pop("H100")
    halves = {name: getattr(card, name) / 2 for name in ("bf16_dense_tflops", "memory_bandwidth_gbyte_s")}
    slow.accelerators["Slow"] = card.model_copy(update=halves)
    by_hand = placement.model_copy(update={"cluster": slow})
    rate = placement.throughput.req_s / 2
    one = Trials(placement, cluster, placement.goal, 4, doubled).run(rate, 300, 0)
    other = Trials(by_hand, cluster_of(by_hand), placement.goal, 4).run(rate, 300, 0)
    assert one.e2el_s == pytest.approx(other.e2el_s)


def test_links_are_off_one_by_one_and_cards_with_them(pods):
    errors = CostErrors({}, {"nvlink between H100": 0.2, "pcie5 between A100-80GB": 0.2}, 0.2)
    up = math.exp(0.2 * LOG_SD)

    def ratios(*key: str) -> tuple[np.ndarray, np.ndarray, float]:
        cluster = Perturbation(errors, {key: 1.0}).cluster(pods)
        with np.errstate(invalid="ignore"):
            links = np.nan_to_num(cluster.bandwidth_bytes_s / pods.bandwidth_bytes_s, nan=1.0)
        uplink = cluster.uplinks[0].bandwidth_bytes_s / pods.uplinks[0].bandwidth_bytes_s
        return links[::2, ::2], cluster.card_bytes_s / pods.card_bytes_s, uplink

    links, cards, uplink = ratios("link", "a", "c")
    assert links == pytest.approx(np.array([[1, 1, up], [1, 1, 1], [up, 1, 1]])) and uplink == 1
    # The card of a is as fast as its link to c; b's is taken from its link to c, and c's own is given.
    assert cards == pytest.approx([up, 1, 1])
    assert ratios("card", "c")[1] == pytest.approx([1, 1, up])
    assert ratios("uplink", "west")[2] == pytest.approx(up)
    inside = Perturbation(errors, {("inside", "nvlink between H100"): 1.0}).cluster(pods)
    assert inside.bandwidth_bytes_s[0, 1] == pytest.approx(up * pods.bandwidth_bytes_s[0, 1])
    assert inside.bandwidth_bytes_s[2, 3] == pods.bandwidth_bytes_s[2, 3]


def test_errors_are_those_that_are_stated(pods):
    costs = costs_of("vllm")
    errors = CostErrors.of(costs, pods)
    assert errors.gpus == {name: costs.error(CATALOGUE[name]) for name in ("H100", "A100-80GB")}
    # PCIe 5.0 is listed as assumed, NVLink of these cards was measured.
    assert errors.interconnects["pcie5 between A100-80GB"] > errors.interconnects["nvlink between A100-80GB"]
    assert any("assumed" in one.source for one in errors.stated if "between nodes" in one.of)
    matrix = [[0.0 if a == b else 20.0 for b in range(6)] for a in range(6)]
    network = pods.spec.network.model_copy(update={"measured": matrix})
    measured = Cluster.from_spec(pods.spec.model_copy(update={"network": network}))
    assert CostErrors.of(costs, measured).network < errors.network


def test_draws_are_seeded_and_balanced(pods):
    errors = CostErrors.of(costs_of("vllm"), pods)
    one, same, other = (errors.draws(pods, seed, 8) for seed in (1, 1, 2))
    assert [d.normal for d in one] == [d.normal for d in same] != [d.normal for d in other]
    for up, down in zip(one[::2], one[1::2], strict=True):
        assert all(up.normal[key] == -down.normal[key] for key in up.normal)
