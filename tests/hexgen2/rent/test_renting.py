"""Renting within a budget, compared with brute force and single types; more money never gets less."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import WORKLOADS, clusters

import hexgen2
from cluster_specs.loader import parse_cluster
from cluster_specs.offers import rented_part, with_offers
from cost_model.errors import InfeasibleError, InputError
from cost_model.models import find_model
from cost_model.registry import make_cost_model
from hexgen2.checks import violations
from hexgen2.cluster import Cluster
from hexgen2.goal import Goal
from hexgen2.placement import OPTIMAL, Placement
from hexgen2.rent.rental import part_of
from hexgen2.search.evaluator import Evaluator
from hexgen2.search.problem import Problem, make_problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import STRATEGIES, find_strategy
from hexgen2.workload.classes import load_workload


def problem_of(spec, model: str, workload: str, goal: Goal | None = None) -> Problem:
    architecture, load = find_model(model), load_workload(workload)
    costs = make_cost_model("calibrated", architecture, load.lengths)
    return Problem(spec, Cluster.from_spec(spec), architecture, load, costs, goal=goal or Goal())


def run(problem: Problem, strategy: str = "hexgen2") -> Placement:
    """A valid placement, whose price equals that of its cluster and of the rentals that it lists."""
    placement = find_strategy(strategy)(problem, SearchOptions())
    assert violations(placement) == []
    goal, price = problem.goal, placement.price_per_hour
    if goal.rents:
        assert price == pytest.approx(sum(r.count * r.price_per_gpu_hour for r in placement.rented))
        assert goal.budget_per_hour is None or price <= goal.budget_per_hour * (1 + 1e-9)
        used = {gpu for replica in placement.replicas for gpu in replica.gpus}
        assert used == set(Cluster.from_spec(placement.cluster).gpu_ids)
    return placement


def sub_rentals(problem: Problem) -> dict[float, float]:
    """The best requests/s at each price: exhaustive search on every part of the available GPUs."""
    best: dict[float, float] = {}
    for counts in itertools.product(*(range(len(gpus) + 1) for gpus in problem.node_gpus)):
        if sum(counts) < 2:
            continue
        part = problem_of(rented_part(problem.spec, counts), problem.model.name, problem.workload.name)
        try:
            found = run(part, "exact").throughput.req_s
        except InfeasibleError:
            continue
        price = round(float(part.cluster.price_per_hour.sum()), 6)
        best[price] = max(best.get(price, 0.0), found)
    return best


def within(best: dict[float, float], budget: float) -> float:
    return max((req_s for price, req_s in best.items() if price <= budget * (1 + 1e-9)), default=0.0)


@st.composite
def tiny_universes(draw: st.DrawFn) -> Problem:
    """Up to five GPUs that can be rented one by one."""
    spec = parse_cluster(draw(clusters(max_gpus=5)), "tiny", Path())
    return problem_of(spec, draw(st.sampled_from(["opt-13b", "opt-30b"])), draw(st.sampled_from(WORKLOADS)))


def asking(problem: Problem, **goal) -> Problem:
    return problem_of(problem.spec, problem.model.name, problem.workload.name, Goal(**goal))


@settings(max_examples=15, deadline=None)
@given(tiny_universes(), st.floats(0.2, 1.0))
def test_budget_equals_the_best_of_all_rentals(problem, share):
    budget = share * float(problem.cluster.price_per_hour.sum())
    best = within(sub_rentals(problem), budget)
    for strategy in ("hexgen2", "exact"):
        if best == 0:
            with pytest.raises(InfeasibleError):
                run(asking(problem, budget_per_hour=budget), strategy)
            continue
        placement = run(asking(problem, budget_per_hour=budget), strategy)
        assert placement.throughput.req_s == pytest.approx(best, rel=1e-5)
        assert best <= Evaluator(problem).relaxed.upper_bound(budget).req_s * (1 + 1e-6)
        assert placement.bound.gap <= OPTIMAL


@settings(max_examples=10, deadline=None)
@given(tiny_universes(), st.floats(0.1, 1.0))
def test_cost_equals_the_cheapest_of_all_rentals(problem, share):
    best = sub_rentals(problem)
    if not best:
        return
    load = share * max(best.values()) * (1 - 1e-5)
    cheapest = min(price for price, req_s in best.items() if req_s >= load * (1 + 3e-6))
    placement = run(asking(problem, objective="cost", request_rate=load))
    assert placement.throughput.req_s >= load
    assert placement.price_per_hour == pytest.approx(cheapest, rel=1e-6)
    least, _ = Evaluator(problem).relaxed.cheapest(load, 1000)
    assert least <= cheapest * (1 + 1e-6)
    assert placement.bound.price_per_hour == pytest.approx(cheapest)


@settings(max_examples=8, deadline=None)
@given(tiny_universes())
def test_more_money_never_gives_less(problem):
    try:
        placement = run(asking(problem, frontier=4))
    except InfeasibleError:
        return
    best = sub_rentals(problem)
    rates = [point.req_s for point in placement.frontier]
    assert rates == sorted(rates)
    assert placement.frontier[0].price_per_hour == pytest.approx(min(best))
    for point in placement.frontier:
        assert point.price_per_hour <= point.budget_per_hour * (1 + 1e-9)
        assert point.req_s == pytest.approx(within(best, point.budget_per_hour), rel=1e-5)


def homogeneous(card: str, count: int, interconnect: str) -> dict:
    size = 8 if interconnect == "nvlink" else 4
    sizes = [size] * (count // size) + ([count % size] if count % size else [])
    nodes = [
        {"name": f"n{k}", "accelerators": f"{card}:{size}", "interconnect": interconnect}
        for k, size in enumerate(sizes)
    ]
    network = {"default": {"bandwidth_gbit_s": 25, "latency_us": 100}}
    return {"name": "one-type", "nodes": nodes, "network": network}


def test_never_worse_than_the_best_single_type():
    """Compares with each type alone: as many GPUs as 20.66 $/h buy, searched as a cluster of their own."""
    model, workload, goal = "llama-2-70b", "LPHD", Goal(budget_per_hour=20.66)
    rented = run(make_problem("hexgen2-offers", model, workload, goal=goal))
    alone = []
    for card, price, interconnect in (
        ("H100", 3.69, "nvlink"),
        ("A100-80GB", 1.69, "nvlink"),
        ("L40", 1.03, "pcie4"),
        ("A6000", 0.76, "pcie4"),
    ):
        count = min(16, math.floor(20.66 / price))
        spec = parse_cluster(homogeneous(card, count, interconnect), "one-type", Path())
        alone.append(run(problem_of(spec, model, workload)).throughput.req_s)
    assert rented.throughput.req_s >= max(alone) * (1 - 1e-6)
    assert rented.throughput.req_s <= rented.bound.req_s


def test_nodes_may_be_left_out_and_offers_join_them():
    """Owned GPUs, which are free, are used first; the budget decides what is rented beside them."""
    spec = {
        "name": "mixed",
        "nodes": [
            {"name": "own", "accelerators": "L40:2", "price_per_gpu_hour": 0},
            {"name": "old", "accelerators": "T4:1", "price_per_gpu_hour": 9},
        ],
        "offers": [
            {"accelerators": "A100-80GB", "price_per_gpu_hour": 1.69, "max_count": 3, "gpus_per_node": 2},
        ],
    }
    universe = with_offers(parse_cluster(spec, "mixed", Path()))
    assert [(n.name, n.accelerators) for n in universe.nodes[2:]] == [
        ("a100-80gb-offer-1", "A100-80GB:2"),
        ("a100-80gb-offer-2", "A100-80GB:1"),
    ]
    assert "network.default" in " ".join(universe.assumptions)
    placement = run(problem_of(universe, "opt-13b", "LPLD", Goal(budget_per_hour=3.4)))
    assert {(r.accelerators, r.count) for r in placement.rented} == {("L40", 2), ("A100-80GB", 2)}
    assert placement.price_per_hour == pytest.approx(3.38)


def test_a_measured_matrix_grows_with_offers_and_shrinks_with_what_is_rented():
    spec = {
        "name": "measured",
        "nodes": [{"name": "a", "accelerators": "L40:2"}, {"name": "b", "accelerators": "L40:1"}],
        "network": {"default": {"bandwidth_gbit_s": 7}, "measured": [[0, 80, 20], [80, 0, 30], [20, 30, 0]]},
        "offers": [
            {
                "accelerators": "L40",
                "price_per_gpu_hour": 1,
                "max_count": 2,
                "interconnect": {"bandwidth_gbyte_s": 5},
            }
        ],
    }
    universe = with_offers(parse_cluster(spec, "measured", Path()))
    assert universe.network.measured == [
        [0, 80, 20, 7, 7],
        [80, 0, 30, 7, 7],
        [20, 30, 0, 7, 7],
        [7, 7, 7, 0, 40],
        [7, 7, 7, 40, 0],
    ]
    part = rented_part(universe, [1, 1, 1])
    assert part.network.measured == [[0, 20, 7], [20, 0, 7], [7, 7, 0]]
    assert [node.accelerators for node in part.nodes] == ["L40:1"] * 3


def test_what_is_rented_keeps_its_links_cards_and_uplinks():
    spec = {
        "name": "linked",
        "nodes": [{"name": name, "accelerators": "L40:2"} for name in "abc"],
        "network": {
            "default": {"bandwidth_gbit_s": 5},
            "links": [
                {"from": "a", "to": "b", "bandwidth_gbit_s": 20},
                {"from": "a", "to": "c", "bandwidth_gbit_s": 80},
            ],
            "uplinks": [
                {"name": "west", "nodes": ["a", "c"], "bandwidth_gbit_s": 10},
                {"name": "east", "nodes": ["c"], "bandwidth_gbit_s": 10},
            ],
        },
    }
    universe = problem_of(parse_cluster(spec, "linked", Path()), "opt-13b", "LPLD")
    part = part_of(universe, [1, 2, 0])
    network = part.problem.spec.network
    assert [(link.from_, link.to) for link in network.links] == [("a", "b")]
    assert [(uplink.name, uplink.nodes) for uplink in network.uplinks] == [("west", ["a"])]
    assert part.nodes == (0, 1) and len(part.problem.cluster) == 3
    assert list(part.problem.cluster.card_bytes_s) == list(universe.cluster.card_bytes_s[:2])


def test_a_budget_that_is_too_small_says_what_would_do():
    with pytest.raises(InfeasibleError, match=r"within 3 \$/h: the cheapest .*costs 6.76 \$/h"):
        run(make_problem("hexgen2-case-study", "llama-2-70b", "LPLD", goal=Goal(budget_per_hour=3)))


def test_a_load_that_nothing_carries_says_what_is_carried():
    small = Goal(objective="cost", request_rate=1, budget_per_hour=1)
    with pytest.raises(InfeasibleError, match=r"within 1 \$/h: the cheapest .*costs 3.38 \$/h"):
        run(make_problem("hexgen2-case-study", "opt-30b", "HPHD", goal=small))
    goal = Goal(objective="cost", request_rate=50, budget_per_hour=8)
    carried = r"50 requests/s: the best found carries .* for .* \$/h, and none carries more than \d"
    with pytest.raises(InfeasibleError, match=carried):
        run(make_problem("hexgen2-offers", "opt-30b", "HPHD", goal=goal))


@pytest.mark.parametrize("strategy", sorted(set(STRATEGIES) - {"hexgen2", "exact"}))
def test_other_strategies_refuse_to_rent(strategy):
    problem = make_problem("hexgen2-setting-1", "opt-30b", "LPLD", goal=Goal(budget_per_hour=20))
    with pytest.raises(InputError, match="does not choose what to rent"):
        find_strategy(strategy)(problem, SearchOptions())


def test_cost_carries_the_load_within_the_targets():
    """Meeting the targets costs more than just carrying the load."""
    goal = Goal(objective="cost", request_rate=16)
    tight = goal.model_copy(update={"ttft_ms": 300.0, "tpot_ms": 35.0})
    loose, kept = (run(make_problem("hexgen2-case-study", "opt-30b", "LPLD", goal=g)) for g in (goal, tight))
    assert kept.price_per_hour > loose.price_per_hour
    assert min(kept.throughput.req_s, loose.throughput.req_s) >= 16
    assert kept.goodput.goodput_req_s == 16
    runs = [hexgen2.simulate(kept, request_rate=16, num_requests=8000, seed=seed) for seed in (1, 2)]
    assert min(run.attainment for run in runs) > 0.88
