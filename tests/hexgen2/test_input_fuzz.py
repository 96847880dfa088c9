"""Whatever a file holds, a loader returns a value or raises InputError with one line."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster_specs.loader import load_cluster, parse_cluster
from cluster_specs.schema import ClusterSpec
from cost_model.config import architecture_from_config
from cost_model.errors import InputError
from cost_model.models import SHIPPED
from hexgen2.cluster import Cluster
from hexgen2.workload.traces import read_trace

BOUNDED = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

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
    "offers": [{"accelerators": "A100", "price_per_gpu_hour": 1.69, "max_count": 4}],
}

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 10**400, 10**19]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["", "H100:2", "H100:0", "A100-80G", ":", "nvlink", "a", "b", "m.csv", "..", "\x00", "3090:2"]
    ),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(tree, path=()):
    """Paths of every value in a tree of dicts and lists."""
    steps = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for step, value in steps:
        yield (*path, step)
        yield from places(value, (*path, step))


@st.composite
def mutated(draw, original):
    """The tree with one to three values replaced, removed or joined by an unknown key."""
    tree = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        paths = list(places(tree))
        if not paths:
            return tree
        *parents, last = draw(st.sampled_from(paths))
        target = tree
        for step in parents:
            target = target[step]
        action = draw(st.sampled_from(["replace", "remove", "add"]))
        if action == "remove":
            del target[last]
        elif action == "add" and isinstance(target, dict):
            target[draw(st.text(max_size=6))] = draw(VALUES)
        else:
            target[last] = draw(VALUES)
    return tree


def check_one_line(error):
    assert len(str(error).splitlines()) == 1 and error.problem and error.remedy


def check_spec(load):
    try:
        spec = load()
    except InputError as error:
        check_one_line(error)
        return
    assert isinstance(spec, ClusterSpec)
    assert parse_cluster(spec.model_dump(mode="json", by_alias=True), "again", Path()) == spec
    cluster = Cluster.from_spec(spec)
    between = cluster.bandwidth_bytes_s[~np.eye(len(cluster), dtype=bool)]
    assert ((between > 0) & np.isfinite(between)).all() and (cluster.latency_s >= 0).all()
    assert np.isfinite(cluster.memory_bytes).all()


@BOUNDED
@given(mutated(SPEC))
def test_mutated_cluster_trees(tree):
    check_spec(lambda: parse_cluster(tree, "c.yaml", Path("/nonexistent")))


@BOUNDED
@given(mutated(SPEC))
def test_mutated_cluster_trees_as_text(tmp_path, tree):
    file = tmp_path / "c.yaml"
    file.write_text(json.dumps(tree, default=str))
    check_spec(lambda: load_cluster(str(file)))


@st.composite
def mutated_bytes(draw, original):
    raw = bytearray(original)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(raw)))
        junk = draw(
            st.sampled_from(
                [b":", b"\t", b"&a ", b"*a", b"!!", b"- ", b"\xff", b"\0", b"{", b"[", b"'", b"\n"]
            )
        )
        raw[at : at + draw(st.integers(0, 6))] = junk
    return bytes(raw)


SHIPPED_TEXT = (Path(__file__).parents[2] / "cluster_specs" / "hexgen2-setting-4.yaml").read_bytes()


@BOUNDED
@given(mutated_bytes(SHIPPED_TEXT) | st.binary(max_size=200))
def test_mutated_cluster_bytes(tmp_path, raw):
    file = tmp_path / "c.yaml"
    file.write_bytes(raw)
    check_spec(lambda: load_cluster(str(file)))


@BOUNDED
@given(st.sampled_from(sorted(SHIPPED)).flatmap(lambda name: mutated(SHIPPED[name])))
def test_mutated_model_configs(config):
    try:
        architecture = architecture_from_config(config, "m", "m/config.json")
    except InputError as error:
        check_one_line(error)
        return
    assert architecture.total_params > 0


TRACES = [
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:50,396,109\n",
    b'{"timestamp": 1, "input_length": 10, "output_length": 5}\n'
    b'{"timestamp": 2, "input_length": 1, "output_length": 5}\n',
    b'[{"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]}]',
]


@pytest.mark.parametrize("original", TRACES, ids=["azure", "mooncake", "sharegpt"])
@BOUNDED
@given(data=st.data())
def test_mutated_traces(tmp_path, original, data):
    file = tmp_path / "trace"
    file.write_bytes(data.draw(mutated_bytes(original)))
    try:
        trace = read_trace(file)
    except InputError as error:
        check_one_line(error)
        return
    assert len(trace) and (trace.isl >= 1).all() and (trace.osl >= 1).all() and (trace.arrival_s >= 0).all()
