"""The shipped cluster files load, are self-contained and match the papers."""

import json
from collections import Counter
from pathlib import Path

import pytest

from cluster_specs.loader import list_clusters, load_cluster, parse_cluster
from hexgen2.cluster import Cluster

NAMES = [name for name, _ in list_clusters()]
PAPERS = {
    "hexgen2-homogeneous": ({"H100": 8}, 29.5),
    "hexgen2-setting-1": ({"H100": 2, "A100-80GB": 6, "L40": 8, "A6000": 4}, 28.8),
    "hexgen2-setting-2": ({"H100": 3, "A100-80GB": 3, "L40": 6, "A6000": 6}, 26.9),
    "hexgen2-setting-3": ({"A100-80GB": 6, "L40": 12, "A6000": 6}, 27.1),
    "hexgen2-setting-4": ({"H100": 3, "A100-80GB": 9}, 26.3),
    "hexgen2-setting-5": ({"A100-80GB": 4, "L40": 6, "A6000": 10}, 20.5),
    "hexgen2-case-study": ({"H100": 4, "A100-80GB": 4}, None),
    "helix-single-24": ({"A100-40GB": 4, "L4": 8, "T4": 12}, None),
    "helix-geo-24": ({"A100-40GB": 4, "L4": 8, "T4": 12}, None),
    "helix-mixed-42": ({"A100-40GB": 4, "V100-16GB": 6, "L4": 16, "T4": 38}, None),
    "hetis-12": ({"A100-80GB": 4, "RTX3090": 4, "P100-12GB": 4}, None),
    "huawei-v100-a800": ({"V100-32GB": 8, "A800-80GB": 1}, None),
}


def test_every_promised_cluster_ships_with_a_description():
    assert set(PAPERS) <= set(NAMES)
    assert all(description for _, description in list_clusters())


@pytest.mark.parametrize("name", PAPERS)
def test_counts_and_budgets_are_those_of_the_papers(name):
    counts, budget = PAPERS[name]
    cluster = Cluster.from_spec(load_cluster(name))
    assert Counter(card.name for card in cluster.accelerators) == counts
    if budget is not None:
        assert cluster.price_per_hour.sum() == pytest.approx(budget, abs=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_a_resolved_spec_is_self_contained_and_resolves_to_itself(name, tmp_path):
    spec = load_cluster(name)
    assert all(node.price_per_gpu_hour is not None for node in spec.nodes)
    assert {node.accelerators.split(":")[0] for node in spec.nodes} <= set(spec.accelerators)
    dumped = spec.model_dump(mode="json", by_alias=True)
    assert parse_cluster(dumped, "again", Path()) == spec
    file = tmp_path / "resolved.yaml"
    file.write_text(json.dumps(dumped))
    assert load_cluster(str(file)) == spec


@pytest.mark.parametrize("name", NAMES)
def test_names_match_files_and_assumptions_are_listed(name):
    spec = load_cluster(name.upper())
    assert spec.name == name
    if name.startswith(("hexgen2", "helix", "hetis", "huawei")):
        assert spec.assumptions


def test_hexgen2_settings_say_that_their_links_are_assumed():
    for number in range(1, 6):
        text = " ".join(load_cluster(f"hexgen2-setting-{number}").assumptions)
        assert "Figure 4" in text and "Gbit/s" in text


def test_helix_regions_are_slow_between_and_fast_within():
    spec = load_cluster("helix-geo-24")
    cluster = Cluster.from_spec(spec)
    region = [node.region for node in spec.nodes]
    assert Counter(region) == {"region-1": 4, "region-2": 10, "region-3": 10}
    for i in range(24):
        for j in range(24):
            if i != j:
                near = region[i] == region[j]
                link = cluster.link(i, j)
                assert link.bandwidth_bytes_s == pytest.approx(1.25e9 if near else 12.5e6)
                assert link.latency_s == pytest.approx(1e-3 if near else 50e-3)


def test_helix_mixed_cluster_has_42_nodes_of_7_kinds():
    spec = load_cluster("helix-mixed-42")
    kinds = Counter(node.accelerators for node in spec.nodes)
    assert kinds == {
        "A100-40GB:1": 4,
        "V100-16GB:1": 6,
        "L4:1": 8,
        "L4:2": 4,
        "T4:1": 10,
        "T4:2": 6,
        "T4:4": 4,
    }
