"""`hexgen2 search`, `show` and `list`: exit codes, output, one-line errors; a few run as whole processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from importlib import import_module

import pytest
import yaml
from commands import HEXGEN2, hexgen2, installed, refused
from lost_interrupts import press_ctrl_c_in_vain
from problems import ON_SETTING_1

search_command = import_module("hexgen2.commands.search")

CLUSTER = {
    "name": "pods",
    "nodes": [
        {"name": "a", "accelerators": "H100:2", "interconnect": "nvlink"},
        {"name": "b", "accelerators": "A100-80GB:4", "interconnect": "nvlink"},
    ],
    "network": {"default": {"bandwidth_gbit_s": 100, "latency_us": 20}},
}


@pytest.fixture
def cluster_file(tmp_path):
    def write(change=None, text: str | None = None) -> str:
        spec = json.loads(json.dumps(CLUSTER))
        if change:
            change(spec)
        path = tmp_path / "pods.yaml"
        path.write_text(yaml.safe_dump(spec) if text is None else text)
        return str(path)

    return write


def test_search_writes_shows_and_repeats(tmp_path, cluster_file):
    path, again = tmp_path / "placement.json", tmp_path / "again.json"
    command = ["search", "--cluster", cluster_file(), "--model", "llama-2-70b", "--workload", "LPHD"]
    first = installed(*command, "-o", str(path))
    assert first.returncode == 0, first.stderr
    assert "requests/s" in first.stdout and "assumed" not in first.stderr
    assert any(words in first.stdout for words in ("best possible", "optimal"))
    installed(*command, "--seed", "0", "-o", str(again))
    one, two = (json.loads(p.read_text()) for p in (path, again))
    one["search"]["seconds"] = two["search"]["seconds"] = 0
    assert one == two
    shown = hexgen2("show", str(path))
    assert shown.returncode == 0 and shown.stdout == first.stdout


def test_json_is_the_only_thing_on_stdout():
    asked = ["--cluster", "hexgen2-case-study", "--model", "llama-2-13b", "--workload", "HPLD"]
    result = hexgen2("search", *asked, "--phases", "disaggregated", "--json")
    placement = json.loads(result.stdout)
    assert placement["version"] == 1 and placement["strategy"] == "hexgen2"
    assert placement["cluster"]["assumptions"]


def test_budget_cost_and_frontier():
    of = ["search", "--cluster", "hexgen2-case-study", "--model", "opt-30b", "--workload", "LPLD"]
    rented = hexgen2(*of, "--budget", "10")
    assert rented.returncode == 0, rented.stderr
    assert "\nrent " in rented.stdout and "per million output tokens" in rented.stdout
    cheapest = json.loads(hexgen2(*of, "--objective", "cost", "--request-rate", "30", "--json").stdout)
    assert cheapest["throughput"]["req_s"] >= 30
    assert cheapest["bound"]["price_per_hour"] <= cheapest["price_per_hour"] < 21.52
    points = json.loads(hexgen2(*of, "--frontier", "3", "--json").stdout)["frontier"]
    assert [point["budget_per_hour"] for point in points] == sorted(p["budget_per_hour"] for p in points)
    assert points[-1]["budget_per_hour"] == pytest.approx(21.52)
    assert points[-1]["rented"][0]["accelerators"] == "H100"


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        (["--budget", "10", "--strategy", "genetic"], "--strategy: genetic: does not choose what to rent"),
        (["--frontier", "--strategy", "exact"], "--strategy: exact: takes one budget only"),
        (["--frontier", "--objective", "cost", "--request-rate", "1"], "--frontier: does not go with"),
        (["--frontier", "1"], "--frontier"),
        ([], "hexgen2-offers: nodes: is empty, there are only offers; say what to spend with --budget"),
    ],
)
def test_wrong_ways_to_rent(options, fragment):
    of = ["search", "--cluster", "hexgen2-offers", "--model", "opt-30b", "--workload", "LPLD"]
    assert fragment in refused(hexgen2(*of, *options))


def test_assumed_figures_are_shown_to_the_user():
    result = hexgen2("search", *ON_SETTING_1, "--strategy", "splitwise")
    assert "every link figure here is assumed" in result.stdout
    assert "cost model  vllm (vllm" in result.stdout and "+- " in result.stdout
    asked = ["--cost-model", "calibrated", "--strategy", "vllm"]
    of_2023 = hexgen2("search", *ON_SETTING_1, *asked).stdout
    assert "calibrated (fitted)" in of_2023 and "No step of A6000 or L40 was measured" in of_2023


def test_lengths_instead_of_a_workload(cluster_file):
    arguments = ["--model", "opt-30b", "--isl", "500", "--osl", "50", "--json"]
    result = hexgen2("search", "--cluster", cluster_file(), *arguments)
    assert json.loads(result.stdout)["workload"]["classes"][0]["isl"] == 500


@pytest.mark.parametrize("kind", ["clusters", "gpus", "models", "workloads", "strategies"])
def test_list(kind):
    result = hexgen2("list", kind)
    assert result.returncode == 0 and len(result.stdout.splitlines()) >= 2


@pytest.mark.parametrize("kind", ["clusters", "models", "workloads", "strategies"])
def test_list_for_programs(kind):
    rows = json.loads(hexgen2("list", kind, "--json").stdout)
    assert len(rows) >= 2 and all(set(row) == {"name", "description"} for row in rows)


def test_list_gpus_for_programs():
    """Every figure has its unit in its key, and every card a source; Hopper's formats are vLLM's."""
    gpus = {gpu["name"]: gpu for gpu in json.loads(hexgen2("list", "gpus", "--json").stdout)}
    figures = {"memory_gib", "memory_bandwidth_gbyte_s", "bf16_dense_tflops", "interconnect_gbyte_s"}
    optional = {"fp8_dense_tflops", "int8_dense_tops", "fp4_dense_tflops", "processors", "price_per_gpu_hour"}
    texts = {"name", "kind", "generation", "interconnect", "interconnect_assumption", "source"}
    for gpu in gpus.values():
        assert set(gpu) == figures | optional | texts | {"formats", "price_assumed", "price_source"}
        assert gpu["source"] and all(gpu[key] > 0 for key in figures)
        assert all(gpu[key] is None or gpu[key] >= 0 for key in optional)
    assert gpus["H100"]["memory_gib"] == 80 and gpus["H100"]["fp4_dense_tflops"] is None
    h100 = {"fp8": "native", "int4": "weight-only", "nvfp4": "weight-only", "bf16": "native"}
    assert h100.items() <= gpus["H100"]["formats"].items()


def set_node(index, **values):
    return lambda spec: spec["nodes"][index].update(values)


WRONG_CLUSTERS = {
    "unknown GPU": (set_node(0, accelerators="H1000:2"), "nodes[0].accelerators", "H100"),
    "no GPU": (set_node(0, accelerators="H100:0"), "nodes[0].accelerators", "at least 1"),
    "duplicate node": (set_node(1, name="a"), "nodes[1].name", "a"),
    "negative bandwidth": (
        lambda s: s["network"]["default"].update(bandwidth_gbit_s=-1),
        "network.default.bandwidth_gbit_s",
        "greater than 0",
    ),
    "unknown key": (set_node(0, acelerators="H100:2"), "acelerators", "accelerators"),
    "link to nowhere": (
        lambda s: s["network"].update(links=[{"from": "a", "to": "c", "bandwidth_gbit_s": 5}]),
        "network.links[0]",
        "c",
    ),
}


@pytest.mark.parametrize("name", WRONG_CLUSTERS)
def test_wrong_clusters(cluster_file, name):
    change, key, hint = WRONG_CLUSTERS[name]
    path = cluster_file(change)
    line = refused(hexgen2("search", "--cluster", path, "--model", "opt-30b", "--workload", "LPLD"))
    assert path in line and key in line and hint in line


@pytest.mark.parametrize("text", ["{", "- a\n- b\n", "", "name: [1, 2\nnodes", "\t\tname: x", "a: &x [*x]"])
def test_yaml_that_is_not_a_cluster(cluster_file, text):
    path = cluster_file(text=text)
    line = refused(hexgen2("search", "--cluster", path, "--model", "opt-30b", "--workload", "LPLD"))
    assert path in line


def test_a_model_that_fits_nowhere(tmp_path):
    output = tmp_path / "placement.json"
    arguments = ["--cluster", "local-cpu", "--model", "llama-2-70b", "--workload", "LPLD", "-o", str(output)]
    line = refused(installed("search", *arguments), code=3)
    assert "llama-2-70b" in line and "GiB" in line and "local-cpu" in line
    assert not output.exists()


@pytest.mark.parametrize(
    "strategy", ["hexgen2", "exact", "hexgen2-paper", "genetic", "splitwise", "distserve"]
)
def test_one_gpu_cannot_be_both(cluster_file, strategy):
    def one_gpu(spec):
        spec["nodes"] = [{"name": "a", "accelerators": "H100:1"}]

    arguments = ["--cluster", cluster_file(one_gpu), "--model", "opt-13b", "--workload", "LPLD"]
    asked = [*arguments, "--strategy", strategy]
    if strategy in ("hexgen2", "exact"):
        assert hexgen2("search", *asked).returncode == 0  # One replica does both.
        asked += ["--phases", "disaggregated"]
    assert "one GPU" in refused(hexgen2("search", *asked), code=3)


@pytest.mark.parametrize(
    "arguments,expected",
    [
        (["--cluster", "hexgen2-seting-1", "--model", "opt-30b", "--workload", "LPLD"], "hexgen2-setting-1"),
        (["--cluster", "hexgen2-setting-1", "--model", "lama-2-70b", "--workload", "LPLD"], "llama-2-70b"),
        (["--cluster", "hexgen2-setting-1", "--model", "opt-30b", "--workload", "HPXD"], "HPLD"),
        (["--cluster", "hexgen2-setting-1", "--model", "opt-30b"], "workload"),
        ([*ON_SETTING_1, "--strategy", "hexgen3"], "hexgen2"),
        ([*ON_SETTING_1, "--cost-model", "table2"], "table1"),
        ([*ON_SETTING_1, "--seed", "-1"], "seed"),
        ([*ON_SETTING_1, "--time-limit", "0"], "time-limit"),
        ([*ON_SETTING_1, "--time-limit", "nan"], "time-limit"),
        ([*ON_SETTING_1, "--certify", "--strategy", "genetic"], "--certify"),
        ([*ON_SETTING_1, "--certify", "--budget", "20"], "--certify"),
        ([*ON_SETTING_1, "--isl", "1e308", "--osl", "1e308"], "isl"),
        ([*ON_SETTING_1, "-o", "/nonexistent/folder/p.json"], "/nonexistent/folder"),
        ([*ON_SETTING_1, "--isl", "-5", "--osl", "5"], "isl"),
        ([*ON_SETTING_1, "--strategy", "exact"], "too many"),
        (["--cluster", "hexgen2-setting-1", "--modl", "x"], "--model"),
        (["--model", "opt-30b", "--workload", "LPLD"], "--cluster"),
    ],
)
def test_wrong_options(arguments, expected):
    assert expected in refused(hexgen2("search", *arguments))


def test_ctrl_c_keeps_the_best_so_far(tmp_path):
    """Interrupts a search that takes long, once it has found something."""
    cards = ["H100", "A100-80GB", "L40", "A6000"] * 20
    spec = {
        "name": "large",
        "nodes": [{"name": f"n{i}", "accelerators": f"{card}:4"} for i, card in enumerate(cards)],
    }
    cluster, output = tmp_path / "large.yaml", tmp_path / "placement.json"
    cluster.write_text(yaml.safe_dump(spec))
    command = [HEXGEN2, "search", "--cluster", str(cluster), "--model", "opt-30b", "--workload", "HPHD"]
    pipe = subprocess.PIPE
    process = subprocess.Popen([*command, "-o", str(output)], stderr=pipe, stdout=pipe, text=True)
    assert process.stderr is not None
    assert "best" in process.stderr.readline()
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    placement = json.loads(output.read_text())
    assert placement["search"]["cut"] == "interrupted" and placement["throughput"]["req_s"] > 0
    assert "Traceback" not in errors


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("strategy", ["hexgen2", "helix"])
def test_a_lost_ctrl_c_keeps_the_best_so_far_too(strategy, monkeypatch):
    """Python drops the KeyboardInterrupt while the first result is shown."""
    monkeypatch.setattr(search_command, "_progress", lambda: lambda state: press_ctrl_c_in_vain())
    done = hexgen2("search", *ON_SETTING_1, "--strategy", strategy, "--json")
    placement = json.loads(done.stdout)
    assert placement["search"]["cut"] == "interrupted" and placement["throughput"]["req_s"] > 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("strategy", ["hetis", "vllm", "huawei"])
def test_a_lost_ctrl_c_before_anything_was_found(strategy, monkeypatch):
    given = search_command._given
    monkeypatch.setattr(search_command, "_given", lambda asked: press_ctrl_c_in_vain() or given(asked))
    done = hexgen2("search", *ON_SETTING_1, "--strategy", strategy)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.strip() == "hexgen2: interrupted before anything was found"


@pytest.mark.parametrize("text", ["", "{}", "[]", "not json", '{"version": 2}'])
def test_files_that_are_no_placement(tmp_path, text):
    path = tmp_path / "placement.json"
    path.write_text(text)
    assert str(path) in refused(hexgen2("show", str(path)))


def test_a_placement_that_is_missing(tmp_path):
    assert "cannot be read" in refused(installed("show", str(tmp_path / "none.json")))


def test_what_solvers_print_is_not_in_the_midst_of_json() -> None:
    """Past Python's own stdout, as C libraries do."""
    code = (
        "import os, sys; from hexgen2.terminal import silence_libraries as silence; silence(); "
        "os.write(1, b'from C'); print('ours'); sys.stdout.flush(); os.write(1, b'later')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "ours\n"
