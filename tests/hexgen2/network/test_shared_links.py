"""Links, network cards and uplinks as resources that routes share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import clusters, problem_from

from cluster_specs.loader import parse_cluster
from hexgen2.network.occupancy import occupied_s
from hexgen2.network.shared_links import SharedLinks

GBIT_S = 1e9 / 8


def spec_of(cards=(None, None, None), uplinks=(), default=10, links=()):
    """Three nodes a, b and c with two H100 each."""
    nodes: list[dict] = [
        {"name": n, "accelerators": "H100:2", **({"network_gbit_s": card} if card else {})}
        for n, card in zip("abc", cards, strict=True)
    ]
    network = {"default": {"bandwidth_gbit_s": default}, "links": list(links), "uplinks": list(uplinks)}
    return {"name": "three", "nodes": nodes, "network": network}


def resources(**kwargs) -> SharedLinks:
    return problem_from(spec_of(**kwargs), "opt-13b", "HPLD").shared_links


def named(shared: SharedLinks) -> dict[str, float]:
    """Capacity in Gbit/s of every resource that traffic between two nodes can use."""
    pairs = [(a, b) for a in range(shared.nodes) for b in range(shared.nodes)]
    used = {r for pair in pairs for r in shared.resources_between(*pair)}
    return {shared.name(r): shared.capacity_bytes_s[r] / GBIT_S for r in used}


def test_a_card_carries_as_much_as_the_fastest_link_unless_the_spec_says_otherwise():
    fast = {"from": "a", "to": "b", "bandwidth_gbit_s": 40}
    capacity = named(resources(links=[fast], cards=(None, 50, None)))
    assert capacity["the network card of a (out)"] == capacity["the network card of a (in)"] == 40
    assert capacity["the network card of b (out)"] == 50 and capacity["the network card of c (in)"] == 10
    assert capacity["the link from a to b"] == capacity["the link from b to a"] == 40


def test_no_link_is_faster_than_the_cards_at_its_ends():
    capacity = named(resources(cards=(None, 4, 6)))
    assert capacity["the link from a to b"] == capacity["the link from c to b"] == 4
    assert capacity["the link from a to c"] == capacity["the network card of a (out)"] == 6


def test_traffic_takes_the_uplinks_it_leaves_and_enters():
    shared = resources(uplinks=[{"name": "west", "nodes": ["a", "b"], "bandwidth_gbit_s": 4}])
    words = [shared.name(r) for r in shared.resources_between(0, 2)]
    assert words == [
        "the link from a to c",
        "the network card of a (out)",
        "the network card of c (in)",
        "uplink west (out)",
    ]
    assert shared.name(shared.resources_between(2, 1)[-1]) == "uplink west (in)"
    assert len(shared.resources_between(0, 1)) == 3 and shared.resources_between(1, 1) == ()
    assert named(shared)["the link from a to c"] == 4, "no link is faster than the uplinks on its way"


@settings(deadline=None)
@given(clusters(), st.data())
def test_traffic_occupies_every_link_card_and_uplink_on_its_way(spec, data):
    names = [node["name"] for node in spec["nodes"]]
    subsets = st.lists(st.sampled_from(names), min_size=1, unique=True)
    spec["network"]["uplinks"] = [
        {"name": str(k), "nodes": data.draw(subsets), "bandwidth_gbit_s": 5} for k in range(2)
    ]
    shared = problem_from(spec, "opt-13b", "HPLD").shared_links
    n = shared.nodes
    sent = [(a, b, 1.0 + a * n + b) for a in range(n) for b in range(n)]
    between = np.array([0.0 if a == b else bytes_ for a, b, bytes_ in sent]).reshape(n, n)
    inside = [np.isin(names, uplink["nodes"]) for uplink in spec["network"]["uplinks"]]
    leaving = [between[np.ix_(own, ~own)].sum() for own in inside]
    entering = [between[np.ix_(~own, own)].sum() for own in inside]
    moved = np.concatenate([between.ravel(), between.sum(1), between.sum(0), leaving, entering])
    busy_s = occupied_s(shared, sent)
    assert np.allclose([busy_s.get(r, 0.0) for r in range(shared.count)], moved / shared.capacity_bytes_s)
    assert occupied_s(shared, sent, "pairwise") == {r: s for r, s in busy_s.items() if r < n * n}


def test_the_assumption_about_cards_is_stated_once_and_only_where_it_is_made():
    def stated(cards):
        spec = parse_cluster(spec_of(cards), "three", Path())
        return sum("network card" in text for text in spec.assumptions)

    assert stated((None, 10, 10)) == stated((None, None, None)) == 1
    assert stated((10, 10, 10)) == 0


def test_a_measured_matrix_gives_cards_their_fastest_pair_and_links_their_slowest():
    spec = spec_of()
    measured = np.full((6, 6), 8.0)
    measured[0, 2] = 16.0
    spec["network"]["measured"] = measured.tolist()
    capacity = named(problem_from(spec, "opt-13b", "HPLD").shared_links)
    assert capacity["the network card of a (out)"] == capacity["the network card of b (in)"] == 16
    assert capacity["the link from a to b"] == pytest.approx(8)
