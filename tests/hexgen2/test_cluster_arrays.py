"""The cluster as arrays: order, which link definition wins, prices, assumptions."""

from pathlib import Path

import numpy as np
import pytest

from cluster_specs.loader import load_cluster, parse_cluster
from hexgen2.cluster import Cluster


def build(**network):
    data = {
        "name": "three",
        "nodes": [
            {"name": "a", "accelerators": "L40:2", "interconnect": "pcie3"},
            {"name": "b", "accelerators": "H100:2", "interconnect": "nvlink"},
            {"name": "c", "accelerators": "L40", "price_per_gpu_hour": 5.0},
        ],
        "network": network,
    }
    return Cluster.from_spec(parse_cluster(data, "three", Path()))


def test_devices_types_and_prices():
    cluster = build()
    assert cluster.gpu_ids == ("a/0", "a/1", "b/0", "b/1", "c/0") and len(cluster) == 5
    assert cluster.node_of.tolist() == [0, 0, 1, 1, 2]
    assert [card.name for card in cluster.types] == ["H100", "L40"], "fastest first"
    assert cluster.type_of.tolist() == [1, 1, 0, 0, 1]
    assert cluster.price_per_hour.tolist() == [1.03, 1.03, 3.69, 3.69, 5.0]
    assert cluster.index("b/1") == 3 and cluster.indices(["c/0", "a/0"]) == [4, 0]
    with pytest.raises(KeyError):
        cluster.index("b/2")


def test_links_win_over_the_default_and_the_interconnect_holds_inside():
    links = [{"from": "a", "to": "b", "bandwidth_gbit_s": 40, "latency_us": 7}]
    cluster = build(default={"bandwidth_gbit_s": 8, "latency_us": 100}, links=links)
    assert cluster.link(0, 3).bandwidth_bytes_s == cluster.link(3, 0).bandwidth_bytes_s == 5e9
    assert cluster.link(0, 3).latency_s == pytest.approx(7e-6)
    assert cluster.link(0, 4).bandwidth_bytes_s == 1e9 and cluster.link(0, 4).latency_s == pytest.approx(1e-4)
    assert cluster.link(2, 3).bandwidth_bytes_s == 380e9
    assert cluster.link(0, 1).bandwidth_bytes_s == 10e9


def test_a_measured_matrix_wins_over_everything():
    measured = (np.arange(25).reshape(5, 5) + 1.0).tolist()
    cluster = build(measured=measured)
    assert cluster.link(2, 3).bandwidth_bytes_s == pytest.approx(14e9 / 8)
    assert cluster.link(3, 2).bandwidth_bytes_s == pytest.approx(18e9 / 8)


def test_a_description_of_the_interconnect_is_taken_as_given():
    data = {
        "name": "one",
        "nodes": [
            {"name": "a", "accelerators": "L40:2", "interconnect": {"bandwidth_gbyte_s": 33, "latency_us": 4}}
        ],
    }
    cluster = Cluster.from_spec(parse_cluster(data, "one", Path()))
    assert cluster.link(0, 1).bandwidth_bytes_s == 33e9 and cluster.link(0, 1).latency_s == pytest.approx(
        4e-6
    )
    assert cluster.assumptions == ()


def test_assumptions_of_interconnects_are_listed_once_and_only_where_used():
    assumptions = build().assumptions
    assert sum("PCIe 3.0" in text for text in assumptions) == 1
    assert not any("PCIe 4.0 taken" in text for text in assumptions)


def test_arrays_are_consistent_and_read_only():
    cluster = Cluster.from_spec(load_cluster("hexgen2-setting-1"))
    n = len(cluster)
    assert cluster.bandwidth_bytes_s.shape == cluster.latency_s.shape == (n, n)
    assert np.isinf(cluster.bandwidth_bytes_s.diagonal()).all() and not cluster.latency_s.diagonal().any()
    assert (cluster.bandwidth_bytes_s == cluster.bandwidth_bytes_s.T).all()
    assert [card.memory_bytes for card in cluster.accelerators] == cluster.memory_bytes.tolist()
    with pytest.raises(ValueError, match="read-only"):
        cluster.memory_bytes[0] = 0
