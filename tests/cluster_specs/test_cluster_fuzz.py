"""Any cluster file gives either a spec or a one-line InputError, never a traceback."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import mutated, mutated_bytes

import cluster_specs
from cluster_specs.loader import load_cluster, parse_cluster
from cluster_specs.schema import ClusterSpec
from cluster_specs.strict_yaml import parse_mapping
from cost_model.errors import InputError
from hexgen2.cluster import Cluster

BOUNDED = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])

FOLDER = Path(cluster_specs.__file__).parent
TEXTS = [path.read_bytes() for path in sorted(FOLDER.glob("*.yaml")) if path.stem != "prices"]

SPEC = {
    "name": "two",
    "nodes": [
        {"name": "a", "accelerators": "H100:2", "interconnect": "nvlink", "region": "r"},
        {"name": "b", "accelerators": "Mine:1", "interconnect": {"bandwidth_gbyte_s": 9.5, "latency_us": 1}},
    ],
    "network": {
        "default": {"bandwidth_gbit_s": 10, "latency_us": 50},
        "links": [{"from": "a", "to": "b", "bandwidth_gbit_s": 25, "latency_us": 30}],
        "measured": [[0, 1, 2], [1, 0, 2], [1, 2, 0]],
    },
    "accelerators": {"Mine": {"memory_gib": 4, "bf16_dense_tflops": 1, "memory_bandwidth_gbyte_s": 2}},
    "offers": [{"accelerators": "A100-80GB", "price_per_gpu_hour": 1.69, "max_count": 4}],
}
TREES = [SPEC, *map(yaml.safe_load, TEXTS)]

# PyYAML leaves text such as 1e5 unquoted: in YAML 1.1 it is no number.
TEXT = st.text(max_size=12).filter(lambda text: not text[:1].isdigit() and text[:1] not in {"+", "-", "."})
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(TEXT, PLAIN, min_size=1, max_size=4), st.booleans())
@BOUNDED
def test_plain_data_is_read_as_pyyaml_wrote_it(data, flow):
    assert parse_mapping(yaml.safe_dump(data, default_flow_style=flow), "file") == data


def test_without_libyaml_the_same_is_read(monkeypatch):
    read = [parse_mapping(text.decode(), "file") for text in TEXTS]
    monkeypatch.setattr("cluster_specs.strict_yaml._Parser", cluster_specs.strict_yaml._PythonParser)
    assert [parse_mapping(text.decode(), "file") for text in TEXTS] == read


def check_spec(load):
    try:
        spec = load()
    except InputError as error:
        assert len(str(error).splitlines()) == 1 and error.problem and error.remedy
        return
    assert isinstance(spec, ClusterSpec)
    assert parse_cluster(spec.model_dump(mode="json", by_alias=True), "again", Path()) == spec
    cluster = Cluster.from_spec(spec)
    between = cluster.bandwidth_bytes_s[~np.eye(len(cluster), dtype=bool)]
    assert ((between > 0) & np.isfinite(between)).all() and (cluster.latency_s >= 0).all()
    assert np.isfinite(cluster.memory_bytes).all()


@BOUNDED
@given(mutated(SPEC))
def test_mutated_trees(tree):
    check_spec(lambda: parse_cluster(tree, "c.yaml", Path("/nonexistent")))


@pytest.mark.parametrize("write", [yaml.safe_dump, json.dumps], ids=["yaml", "json"])
@BOUNDED
@given(st.sampled_from(TREES).flatmap(mutated))
def test_mutated_trees_as_text(tmp_path, write, tree):
    file = tmp_path / "c.yaml"
    file.write_text(write(tree), errors="surrogatepass")
    check_spec(lambda: load_cluster(str(file)))


@BOUNDED
@given(st.sampled_from(TEXTS).flatmap(mutated_bytes) | st.binary(max_size=200))
def test_mutated_text(tmp_path, raw):
    file = tmp_path / "c.yaml"
    file.write_bytes(raw)
    check_spec(lambda: load_cluster(str(file)))
