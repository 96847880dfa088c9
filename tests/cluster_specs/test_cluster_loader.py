"""Bad cluster files give exactly one line that names the file, the key and the remedy."""

import os

import pytest

from cluster_specs.loader import load_cluster
from cluster_specs.offers import with_offers
from cost_model.errors import InputError
from hexgen2.cluster import Cluster

GOOD = """\
name: two-pods
nodes:
  - {name: pod-a, accelerators: "H100:2", interconnect: nvlink}
  - {name: pod-b, accelerators: "A100-80G:1"}
network:
  default: {bandwidth_gbit_s: 10, latency_us: 50}
  links: [{from: pod-a, to: pod-b, bandwidth_gbit_s: 25, latency_us: 30}]
"""


def load(tmp_path, text):
    file = tmp_path / "c.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_cluster(str(file))


def refused(tmp_path, text):
    with pytest.raises(InputError) as caught:
        load(tmp_path, text)
    error = caught.value
    assert len(str(error).splitlines()) == 1 and error.problem and error.remedy
    assert str(error).startswith(str(tmp_path))
    return error


def test_the_good_file_loads(tmp_path):
    spec = load(tmp_path, GOOD)
    assert [node.accelerators for node in spec.nodes] == ["H100:2", "A100-80GB:1"]
    assert [node.price_per_gpu_hour for node in spec.nodes] == [3.69, 1.69]


@pytest.mark.parametrize(
    ("old", "new", "key", "hint"),
    [
        ("H100:2", "H101:2", "nodes[0].accelerators", "did you mean H100?"),
        ("A100-80G:1", "A100-80G:0", "nodes[1].accelerators", "at least 1"),
        ("A100-80G:1", "A100-80G:-3", "nodes[1].accelerators", "at least 1"),
        ("A100-80G:1", "A100-80G:two", "nodes[1].accelerators", "H100:2"),
        ("A100-80G:1", "", "nodes[1].accelerators", "H100:2"),
        ("A100-80G:1", "A100-80G:99999", "nodes[1].accelerators", "smaller"),
        ('"A100-80G:1"', "[A100]", "nodes[1].accelerators", "text"),
        ('accelerators: "A100-80G:1"', "gpus: 1", "nodes[1].gpus", "known keys: name, address, accelerators"),
        ("interconnect: nvlink", "interconect: nvlink", "nodes[0].interconect", "did you mean interconnect?"),
        ("interconnect: nvlink", "interconnect: nvlnk", "nodes[0].interconnect", "nvlink, pcie3"),
        ("interconnect: nvlink", "interconnect: 7", "nodes[0].interconnect", "nvlink, pcie3"),
        (
            "interconnect: nvlink",
            "interconnect: {bandwidth_gbyte_s: -1}",
            "nodes[0].interconnect.bandwidth_gbyte_s",
            "greater than 0",
        ),
        (
            "interconnect: nvlink",
            "interconnect: {bandwidth_gbyte: 1, bandwidth_gbyte_s: 1}",
            "nodes[0].interconnect.bandwidth_gbyte",
            "did you mean bandwidth_gbyte_s?",
        ),
        ("name: pod-b", "name: pod-a", "nodes[1].name", "own name"),
        ("name: pod-b", "name: a/b", "nodes[1].name", "dashes"),
        ("name: pod-b", "name: 7", "nodes[1].name", "quotes"),
        ("name: two-pods\n", "", "name", "add it"),
        ("to: pod-b", "to: pod-c", "network.links[0].to", "did you mean 'pod-"),
        ("from: pod-a", "from: x", "network.links[0].from", "nodes: pod-a, pod-b"),
        ("to: pod-b", "to: pod-a", "network.links[0]", "interconnect"),
        ("from: pod-a, ", "", "network.links[0].from", "add it"),
        (
            "bandwidth_gbit_s: 25",
            "bandwidth_gbit_s: -25",
            "network.links[0].bandwidth_gbit_s",
            "greater than 0",
        ),
        ("bandwidth_gbit_s: 25", "bandwidth_gbit_s: .nan", "network.links[0].bandwidth_gbit_s", "should be"),
        ("bandwidth_gbit_s: 25", "bandwidth_gbit_s: true", "network.links[0].bandwidth_gbit_s", "number"),
        (
            "bandwidth_gbit_s: 25",
            "bandwidth_gbits: 25",
            "network.links[0].bandwidth_gbits",
            "did you mean bandwidth_gbit_s?",
        ),
        ("bandwidth_gbit_s: 10", "bandwidth_gbit_s: fast", "network.default.bandwidth_gbit_s", "number"),
        ("bandwidth_gbit_s: 10", "bandwidth_gbit_s: 1e300", "network.default.bandwidth_gbit_s", "less than"),
        ("latency_us: 50", "latency_us: -1", "network.default.latency_us", "greater than or equal to 0"),
        ("network:", "netwrok:", "netwrok", "did you mean network?"),
    ],
)
def test_wrong_values_name_their_key_and_remedy(tmp_path, old, new, key, hint):
    assert old in GOOD
    error = refused(tmp_path, GOOD.replace(old, new, 1))
    assert error.key == key, error
    assert hint in str(error)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("- a\n- b\n", "a list at the top level"),
        ("just text", "a single value"),
        ("name: a\nname: b\n", "line 2: duplicate key 'name'"),
        (GOOD.replace("  default", "\tdefault"), "tab"),
        ("a: &x [1]\nb: *x\n", "aliases are not accepted"),
        ("name: !!python/object/apply:os.system [ls]\n", "line 1"),
        ("name: !!binary aGk=\n", "line 1"),
        ("name: !!int x\n", "not a number"),
        ("? [a, b]\n: 1\n", "a key must be plain text"),
        ("name: [1\n", "line 2"),
        ("a: 1\n---\nb: 2\n", "line"),
        (b"name: \xff\xfe\n", "byte 6: is not UTF-8"),
        (b"name: a\0b\n", "not allowed"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("#" * (1 << 20) + "\n" + GOOD, "is larger than"),
        ("name: x\nnodes: []\n", "nodes: is empty"),
        ("name: x\nnodes: 7\n", "nodes: is 7"),
        ('name: "\\ud800"\nnodes: []\n', "line 1: "),
        ("name: x\nnodes:\n", "nodes: is None"),
    ],
)
def test_broken_files(tmp_path, text, fragment):
    assert fragment in str(refused(tmp_path, text))


def test_a_directory_a_missing_file_and_an_unknown_name(tmp_path):
    for name, fragment in [
        (str(tmp_path), "is a directory"),
        (str(tmp_path / "none.yaml"), "cannot be read"),
        ("hexgen2-seting-1", "did you mean hexgen2-setting-1?"),
        ("", "shipped:"),
        ("x" * 5000, "neither"),
        ("a\0b", "neither"),
    ]:
        with pytest.raises(InputError, match=fragment.replace("?", r"\?")) as caught:
            load_cluster(name)
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(GOOD)
    file.chmod(0)
    with pytest.raises(InputError, match="cannot be read"):
        load_cluster(str(file))


def test_repeated_links_are_refused_in_either_direction(tmp_path):
    extra = "    - {from: pod-b, to: pod-a, bandwidth_gbit_s: 1}\n"
    text = GOOD.replace("links: [{", "links:\n    - {").replace("30}]\n", "30}\n") + extra
    error = refused(tmp_path, text)
    assert error.key == "network.links[1]" and "network.links[0]" in error.problem


def test_yaml_1_1_surprises_are_off(tmp_path):
    text = (
        GOOD.replace('"A100-80G:1"', "3090:2")
        .replace("name: pod-b", "name: no")
        .replace("to: pod-b", "to: no")
    )
    spec = load(tmp_path, text.replace("bandwidth_gbit_s: 25", "bandwidth_gbit_s: 2.5e1"))
    assert spec.nodes[1].name == "no" and spec.nodes[1].accelerators == "RTX3090:2"
    assert load(tmp_path, GOOD.replace("25", "1e1")).network.links[0].bandwidth_gbit_s == 10


def test_own_cards_and_prices(tmp_path):
    own = "accelerators:\n  MyCard: {memory_gib: 48, bf16_dense_tflops: 180, memory_bandwidth_gbyte_s: 864}\n"
    spec = load(tmp_path, GOOD.replace("A100-80G:1", "mycard:4") + own)
    assert spec.nodes[1].accelerators == "MyCard:4" and spec.nodes[1].price_per_gpu_hour == 0
    assert any("MyCard" in a for a in spec.assumptions)
    error = refused(tmp_path, GOOD + own.replace("memory_gib", "memory_gb"))
    assert error.key in {"accelerators.MyCard.memory_gb", "accelerators.MyCard.memory_gib"}


def test_a_node_price_wins_over_the_card_and_the_catalogue(tmp_path):
    spec = load(
        tmp_path, GOOD.replace("interconnect: nvlink", "interconnect: nvlink, price_per_gpu_hour: 1.5")
    )
    assert spec.nodes[0].price_per_gpu_hour == 1.5
    assert "price of T4" in " ".join(load(tmp_path, GOOD.replace("H100:2", "T4:2")).assumptions)


MEASURED = GOOD.replace("  default", "  measured: m.csv\n  default")


def test_a_measured_matrix_is_taken_in(tmp_path):
    (tmp_path / "m.csv").write_text("# Gbit/s\n-,3000,20\n3000,nan,21\n19,18,0\n")
    measured = load(tmp_path, MEASURED).network.measured
    assert measured == [[0, 3000, 20], [3000, 0, 21], [19, 18, 0]]


@pytest.mark.parametrize(
    ("matrix", "fragment"),
    [
        ("0,1\n1,0\n", "m.csv: has 2 rows for 3 devices"),
        ("0,1,2\n1,0\n1,2,0\n", "m.csv: line 2: has 2 columns for 3 devices"),
        ("0,1,2\n1,0,fast\n1,2,0\n", "m.csv: line 2: column 3 is 'fast'"),
        ("0,1,2\n1,0,-4\n1,2,0\n", "m.csv: line 2: column 3 is '-4'"),
        ("0,1,inf\n1,0,4\n1,2,0\n", "m.csv: line 1: column 3 is 'inf'"),
        ("0,1,\n1,0,4\n1,2,0\n", "m.csv: line 1: column 3 is ''"),
        ("", "m.csv: has 0 rows"),
    ],
)
def test_wrong_measured_files(tmp_path, matrix, fragment):
    (tmp_path / "m.csv").write_text(matrix)
    assert fragment in str(refused(tmp_path, MEASURED))


def test_wrong_measured_values_in_the_spec(tmp_path):
    assert "m.csv: cannot be read" in str(refused(tmp_path, MEASURED))
    inline = MEASURED.replace("m.csv", "[[0, 1, 2], [1, 0, -4], [1, 2, 0]]")
    assert refused(tmp_path, inline).key == "network.measured[1]"
    assert refused(tmp_path, MEASURED.replace("m.csv", "[[0]]")).key == "network.measured"
    assert refused(tmp_path, MEASURED.replace("m.csv", "[[0, fast, 2]]")).key == "network.measured[0][1]"
    assert refused(tmp_path, MEASURED.replace("m.csv", "7")).key == "network.measured"


UPLINK = GOOD + "  uplinks: [{name: west, nodes: [pod-a], bandwidth_gbit_s: 5}]\n"


@pytest.mark.parametrize(
    ("old", "new", "key", "hint"),
    [
        ("[pod-a]", "[pod-c]", "network.uplinks[0].nodes[0]", "did you mean 'pod-"),
        ("[pod-a]", "[pod-a, pod-a]", "network.uplinks[0].nodes[1]", "once"),
        ("[pod-a]", "[]", "network.uplinks[0].nodes", "at least one"),
        ("gbit_s: 5}", "gbit_s: 0}", "network.uplinks[0].bandwidth_gbit_s", "greater than 0"),
        ("5}]", "5}, {name: west, nodes: [pod-b], bandwidth_gbit_s: 1}]", "network.uplinks[1].name", "own"),
        (", nodes: [pod-a]", "", "network.uplinks[0].nodes", "add it"),
        ("nvlink", "nvlink, network_gbit_s: 0", "nodes[0].network_gbit_s", "greater than 0"),
        ("nvlink", "nvlink, network_gbit: 9", "nodes[0].network_gbit", "did you mean network_gbit_s?"),
    ],
)
def test_wrong_uplinks_and_cards(tmp_path, old, new, key, hint):
    load(tmp_path, UPLINK)
    error = refused(tmp_path, UPLINK.replace(old, new, 1))
    assert error.key == key and hint in str(error)


def test_offers_are_checked_and_named_canonically(tmp_path):
    offer = "offers: [{accelerators: a100-80g, price_per_gpu_hour: 1.69, max_count: 16}]\n"
    assert load(tmp_path, GOOD + offer).offers[0].accelerators == "A100-80GB"
    assert refused(tmp_path, GOOD + offer.replace("a100-80g", "b3000")).key == "offers[0].accelerators"
    assert refused(tmp_path, GOOD + offer.replace("16", "0")).key == "offers[0].max_count"


def test_offers_alone_are_a_universe_to_rent_from(tmp_path):
    offer = "{accelerators: A100-80GB, price_per_gpu_hour: 1.69, max_count: 20}"
    spec = load(tmp_path, f"name: x\noffers: [{offer}]\n")
    assert spec.nodes == [] and len(Cluster.from_spec(spec)) == 0
    nodes = with_offers(spec).nodes
    assert [node.accelerators for node in nodes] == ["A100-80GB:8", "A100-80GB:8", "A100-80GB:4"]
    assert {node.price_per_gpu_hour for node in nodes} == {1.69}
    many = load(tmp_path, f"name: x\noffers: [{offer}, {offer.replace('20', '4077')}]\n")
    with pytest.raises(InputError, match="more than 4096"):
        with_offers(many)
