"""`hexgen2 search --from`: the moves it prints, and one-line errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import hexgen2, refused
from problems import ON_SETTING_1


@pytest.fixture(scope="module")
def placement(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("replan") / "placement.json")
    options = ["--phases", "disaggregated", "-o", path]
    assert hexgen2("search", *ON_SETTING_1, *options).returncode == 0
    return path


def load(path: str) -> dict:
    return json.loads(Path(path).read_text())


def test_a_loss_and_a_return(placement, tmp_path):
    less, back = str(tmp_path / "less.json"), str(tmp_path / "back.json")
    result = hexgen2("search", "--from", placement, "--lost", "l40-2/1,h100-1", "-o", less)
    assert result.returncode == 0, result.stderr
    assert "reload" in result.stdout and "GB to load" in result.stdout and "(assumed)" in result.stdout
    shown = hexgen2("show", less)
    assert shown.returncode == 0 and shown.stdout == result.stdout
    assert load(less)["lost"] == ["h100-1/0", "h100-1/1", "l40-2/1"]
    result = hexgen2("search", "--from", less, "--added", "h100-1", "--horizon", "1e6", "-o", back)
    assert result.returncode == 0, result.stderr
    again = load(back)
    assert again["lost"] == ["l40-2/1"]
    assert again["throughput"]["req_s"] > load(less)["throughput"]["req_s"]


def test_another_workload(placement):
    result = hexgen2("search", "--from", placement, "--workload", "LPHD", "--load-gbyte-s", "5", "--json")
    found = json.loads(result.stdout)
    assert found["workload"]["name"] == "LPHD" and found["migration"]["load_gbyte_s"] == 5
    assert found["migration"]["before_req_s"] == load(placement)["throughput"]["req_s"]


def test_a_cluster_file_without_a_node(placement, tmp_path):
    """Nodes that the new --cluster lacks are lost; nodes that it adds may be used."""
    spec = load(placement)["cluster"]
    spec["nodes"] = [node for node in spec["nodes"] if node["name"] != "l40-1"]
    spec["network"]["links"] = [link for link in spec["network"]["links"] if "l40-1" not in link.values()]
    spec["nodes"].append({"name": "new", "accelerators": "H100:4", "interconnect": "nvlink"})
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(spec))
    result = hexgen2("search", "--from", placement, "--cluster", str(path), "--json")
    assert result.returncode == 0, result.stderr
    used = {
        gpu
        for replica in json.loads(result.stdout)["replicas"]
        for stage in replica["stages"]
        for gpu in stage["gpus"]
    }
    assert not any(gpu.startswith("l40-1/") for gpu in used) and any(gpu.startswith("new/") for gpu in used)


@pytest.mark.parametrize(
    "arguments,expected",
    [
        (["--lost", "l40-2/9"], "l40-2/"),
        (["--lost", "l40-3"], "l40-2"),
        (["--lost", "l40-2/1", "--added", "l40-2/1"], "not lost"),
        (["--added", "h100-1/0"], "not lost"),
        (["--model", "opt-30b"], "new search"),
        (["--strategy", "genetic"], "cannot re-plan"),
        (["--objective", "latency", "--request-rate", "1"], "throughput"),
        (["--horizon", "0"], "--horizon"),
        (["--osl", "10"], "--isl"),
    ],
)
def test_wrong_options(placement, arguments, expected):
    assert expected in refused(hexgen2("search", "--from", placement, *arguments))


@pytest.mark.parametrize("option", [["--lost", "l40-2/1"], ["--added", "l40-2/1"], ["--horizon", "60"]])
def test_changes_without_a_placement(option):
    assert "--from" in refused(hexgen2("search", *ON_SETTING_1, *option))


def test_too_much_lost(placement):
    nodes = "h100-1,a100-1,a100-2,a6000-1,a6000-2,l40-1"
    assert "GiB" in refused(hexgen2("search", "--from", placement, "--lost", nodes), code=3)
    assert "no GPU" in refused(hexgen2("search", "--from", placement, "--lost", f"{nodes},l40-2"), code=3)


def test_a_placement_on_a_lost_gpu_is_refused(placement, tmp_path):
    data = load(placement)
    data["lost"] = [data["replicas"][0]["stages"][0]["gpus"][0]]
    path = tmp_path / "lost.json"
    path.write_text(json.dumps(data))
    assert "is lost" in refused(hexgen2("show", str(path)))
    assert "is lost" in refused(hexgen2("search", "--from", str(path)))
