"""A placement states the error of its figures, and whether other placements are within it."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from cost_model.hardware import CATALOGUE
from hexgen2.placement import Placement
from hexgen2.report.placement import print_placement
from hexgen2.search.problem import make_problem
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy


@pytest.fixture(scope="module")
def placement() -> Placement:
    problem = make_problem("hexgen2-case-study", "llama-2-70b", "HPHD")
    return find_strategy("hexgen2")(problem, SearchOptions())


def printed(placement: Placement) -> str:
    out = StringIO()
    print_placement(placement, Console(file=out, width=200))
    return out.getvalue()


def with_rival(placement: Placement, req_s: float, prefill_replicas: int = 7) -> Placement:
    step = {
        "req_s": req_s,
        "prefill_replicas": prefill_replicas,
        "decode_replicas": 2,
        "colocated_replicas": 0,
    }
    return placement.model_copy(update={"search": placement.search.model_copy(update={"trace": [step]})})


def test_the_error_is_that_of_the_cards_in_use(placement):
    problem = make_problem("hexgen2-case-study", "llama-2-70b", "HPHD")
    cards = {node.accelerators.split(":")[0] for node in placement.cluster.nodes}
    errors = [problem.costs.error(CATALOGUE[card]) for card in cards]
    assert min(errors) <= placement.cost_model.error <= max(errors)
    assert f"+- {placement.cost_model.error:.0%} requests/s" in printed(placement)


def test_a_rival_inside_the_error_is_named(placement):
    best, error = placement.throughput.req_s, placement.cost_model.error
    assert "7 prefill and 2 decode replicas reach" in printed(with_rival(placement, best / (1 + 0.9 * error)))
    assert "caution" not in printed(with_rival(placement, best / (1 + 1.1 * error)))


def test_the_same_makeup_is_no_rival(placement):
    replicas = sum(replica.role == "prefill" for replica in placement.replicas)
    decode = sum(replica.role == "decode" for replica in placement.replicas)
    step = {"req_s": placement.throughput.req_s, "prefill_replicas": replicas, "decode_replicas": decode}
    same = placement.model_copy(update={"search": placement.search.model_copy(update={"trace": [step]})})
    assert "caution" not in printed(same)


def test_a_placement_without_an_error_still_prints(placement):
    costs = placement.cost_model.model_copy(update={"error": None})
    text = printed(with_rival(placement.model_copy(update={"cost_model": costs}), placement.throughput.req_s))
    assert "+-" not in text and "caution" not in text
