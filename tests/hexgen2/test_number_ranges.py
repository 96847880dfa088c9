"""Numbers in files: those too small or too large to compute with are refused, and the message states the
range; realistic numbers, and those that emulation needs, are accepted."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from commands import hexgen2

from cluster_specs.loader import parse_cluster
from cluster_specs.schema import LARGEST, SMALLEST
from cost_model.coefficients import fitted, load_coefficients
from cost_model.errors import InputError
from hexgen2.placement import Placement
from hexgen2.workload.traces import read_trace

SPEC = {
    "name": "two",
    "nodes": [
        {
            "name": "a",
            "accelerators": "Mine:2",
            "interconnect": {"bandwidth_gbyte_s": 9.5, "latency_us": 1.0},
            "network_gbit_s": 20.0,
            "price_per_gpu_hour": 0.5,
        },
        {"name": "b", "accelerators": "L4:1"},
    ],
    "network": {
        "default": {"bandwidth_gbit_s": 10.0, "latency_us": 50.0},
        "links": [{"from": "a", "to": "b", "bandwidth_gbit_s": 25.0, "latency_us": 30.0}],
        "uplinks": [{"name": "rack", "nodes": ["a"], "bandwidth_gbit_s": 15.0}],
        "measured": [[0, 1.0, 2.0], [1.0, 0, 2.0], [1.0, 2.0, 0]],
    },
    "accelerators": {
        "Mine": {
            "memory_gib": 4.0,
            "bf16_dense_tflops": 10.0,
            "memory_bandwidth_gbyte_s": 200.0,
            "price_per_gpu_hour": 0.25,
        }
    },
    "offers": [{"accelerators": "L4", "price_per_gpu_hour": 1.69, "max_count": 2, "network_gbit_s": 9.0}],
}
TINY = [5e-324, 1e-320, 1e-300]
NO_NUMBERS = [1e308, float("inf"), float("-inf"), float("nan"), True, 10**400, -1.0, -5e-324]


def numbers(tree, path=()):
    """The paths of all floats in a tree of dicts and lists."""
    steps = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for step, value in steps:
        if isinstance(value, float):
            yield (*path, step)
        yield from numbers(value, (*path, step))


def changed(tree, path, value):
    """A copy of the tree with another value at this path."""
    tree = copy.deepcopy(tree)
    *parents, last = path
    target = tree
    for step in parents:
        target = target[step]
    target[last] = value
    return tree


def load(tree):
    return parse_cluster(tree, "c.yaml", Path())


def text(path) -> str:
    return ".".join(map(str, path))


@pytest.mark.parametrize("path", list(numbers(SPEC)), ids=text)
@pytest.mark.parametrize("value", [*TINY, *NO_NUMBERS], ids=lambda value: str(value)[:8])
def test_a_cluster_s_numbers(path, value):
    with pytest.raises(InputError) as refused:
        load(changed(SPEC, path, value))
    line = str(refused.value)
    assert line.startswith("c.yaml: ") and "\n" not in line
    if value in TINY:
        assert "from " in line and " to " in line, "the range"


@pytest.mark.parametrize("path", list(numbers(SPEC)), ids=text)
def test_what_a_cluster_s_numbers_may_be(path):
    slow, fast = (1e-4, 1e5) if path[-1] == "price_per_gpu_hour" else (SMALLEST, LARGEST)
    if "price_per_gpu_hour" in path or "latency_us" in path:
        assert load(changed(SPEC, path, -0.0)) == load(changed(SPEC, path, 0.0))
    for value in (slow, fast):
        load(changed(SPEC, path, value))


@pytest.mark.parametrize("value", TINY)
@pytest.mark.parametrize("path", [p for p in numbers(SPEC) if p[-1] != "latency_us"], ids=text)
def test_a_search_refuses_them_in_one_line(tmp_path, path, value):
    """Such figures used to divide to infinity in the evaluation and in the flow."""
    file = tmp_path / "c.yaml"
    file.write_text(json.dumps(changed(SPEC, path, value)))
    ended = hexgen2("search", "--cluster", str(file), "--model", "llama-2-7b", "--workload", "LPLD")
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1 and str(file) in ended.stderr


@pytest.fixture(scope="module")
def placement(tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("numbers") / "p.json"
    asked = ("--cluster", "hexgen2-case-study", "--model", "llama-2-7b", "--workload", "LPLD")
    assert hexgen2("search", *asked, "-o", str(path)).returncode == 0
    return json.loads(path.read_text())


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e308, 10**400], ids=lambda v: str(v)[:8])
def test_a_placement_s_numbers(placement, tmp_path, value):
    file = tmp_path / "p.json"
    for path in numbers(placement):
        file.write_text(json.dumps(changed(placement, path, value)))
        with pytest.raises(InputError) as refused:
            Placement.load(file)
        line = str(refused.value)
        assert line.startswith(f"{file}: {path[0]}") and "\n" not in line


@pytest.mark.parametrize("key", ["prefill_replicas", "decode_replicas", "colocated_replicas", "req_s"])
@pytest.mark.parametrize("value", [[1], {}, "2", None, -1, True, 10**400])
def test_a_search_trace_with_something_else(placement, tmp_path, key, value):
    """With a list in place of a number, the report of `show` used to crash."""
    file = tmp_path / "p.json"
    file.write_text(json.dumps(changed(placement, ("search", "trace", 0, key), value)))
    ended = hexgen2("show", str(file))
    assert ended.returncode == 2 and f"search.trace[0]: {key} should be a number" in ended.stderr


def test_an_unresolved_cluster_in_a_placement_is_resolved(placement, tmp_path):
    """`search --from` and `export` used to crash when the accelerators had been removed from the placement's
    cluster."""
    file = tmp_path / "p.json"
    file.write_text(json.dumps(changed(placement, ("cluster", "accelerators"), {})))
    ended = hexgen2("search", "--from", str(file), "--lost", placement["replicas"][0]["stages"][0]["gpus"][0])
    assert ended.returncode == 0, ended.stderr
    assert hexgen2("export", str(file), "--format", "kubernetes", "-o", str(tmp_path / "out")).returncode == 0


@pytest.mark.parametrize("value", [*TINY, 1e308, float("inf"), float("nan"), -1.0], ids=str)
def test_coefficients(tmp_path, value):
    file, tree = tmp_path / "k.json", json.loads(fitted().to_json())
    for key in ("compute_efficiency", "memory_efficiency", "overlap"):
        file.write_text(json.dumps(changed(tree, ("base", key), value)))
        with pytest.raises(InputError, match=rf"k.json: base.{key}"):
            load_coefficients(file)


@pytest.mark.parametrize("time", ["1e308", "-1e308", "1e19", "nan", "inf"])
def test_times_of_a_trace(tmp_path, time):
    """Times whose differences overflow are refused."""
    file = tmp_path / "t.csv"
    file.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n1,10,10\n{time},10,10\n")
    with pytest.raises(InputError, match="line 3"):
        read_trace(file)


def test_a_trace_within_less_than_a_nanosecond_has_no_times(placement, tmp_path):
    """Replaying such times at a rate used to divide to infinity."""
    file, trace = tmp_path / "p.json", tmp_path / "t.csv"
    file.write_text(json.dumps(placement))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,10,10\n1e-320,10,10\n")
    ended = hexgen2("simulate", str(file), "--workload", str(trace))
    assert ended.returncode == 2 and "a trace with times" in ended.stderr
    assert hexgen2("simulate", str(file), "--workload", str(trace), "--request-rate", "3").returncode == 0


def test_tokens_of_a_trace_are_those_of_a_workload(tmp_path):
    """Between the two limits, the trace used to be accepted while the workload made from it was refused."""
    file = tmp_path / "t.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n1,100000000,10\n")
    with pytest.raises(InputError, match="ContextTokens"):
        read_trace(file)
