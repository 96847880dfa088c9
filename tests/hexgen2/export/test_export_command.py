"""`hexgen2 export`, and exports to Ray."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from by_hand import by_hand
from commands import hexgen2, installed, refused

from hexgen2.export.ray import ray_files
from hexgen2.placement import Placement


@pytest.fixture(scope="module")
def placement(tmp_path_factory):
    path = tmp_path_factory.mktemp("placement") / "placement.json"
    where = ["--cluster", "hexgen2-setting-1", "--model", "llama-2-70b", "--workload", "HPHD"]
    done = hexgen2("search", *where, "--phases", "disaggregated", "-o", path)
    assert done.returncode == 0, done.stderr
    return path


@pytest.mark.parametrize("name", ["kubernetes", "ray"])
def test_a_searched_placement_is_exported_whole_once(tmp_path, placement, name):
    folder = tmp_path / "out"
    done = installed("export", placement, "--format", name, "-o", folder)
    assert done.returncode == 0, done.stderr
    assert {Path(line) for line in done.stdout.splitlines()} == set(folder.iterdir())
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert "not empty" in refused(hexgen2("export", placement, "--format", name, "-o", folder))
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    (folder / "mine").write_text("x")
    assert hexgen2("export", placement, "--format", name, "-o", folder, "--force").returncode == 0
    assert not (folder / "mine").exists() and list(tmp_path.iterdir()) == [folder]


def test_bad_input_is_one_line_and_nothing_is_written(tmp_path, placement):
    folder = tmp_path / "out"
    line = refused(hexgen2("export", placement, "--format", "vllm", "-o", folder))
    assert "replicas[" in line and str(placement) in line
    assert "missing" in refused(hexgen2("export", tmp_path / "missing", "--format", "ray", "-o", folder))
    refused(hexgen2("export", placement, "--format", "helm", "-o", folder))
    refused(hexgen2("export", placement, "--format", "ray", "-o", tmp_path / "no" / "folder"))
    assert "--image" in refused(hexgen2("export", placement, "--format", "ray", "-o", folder, "--image", "x"))
    file = tmp_path / "file"
    file.write_text("x")
    assert "is a file" in refused(hexgen2("export", placement, "--format", "ray", "-o", file, "--force"))
    assert list(tmp_path.iterdir()) == [file]


def test_ray_bundles_hold_every_gpu_where_it_is():
    shapes = {"prefill-0": [("a/0 a/1", 20), ("b/0", 12)], "decode-0": [("b/1 b/3", 32)]}
    placement = by_hand({"a": "H100:2", "b": "A100-80GB:4"}, shapes, addresses={"a": "10.0.0.1"})
    files = ray_files(placement, "/m", "test")
    groups = json.loads(files["placement_groups.json"])
    there = [{name for name in bundle if name != "GPU"} for bundle in groups["prefill-0"]["bundles"]]
    assert there == [{"node:10.0.0.1"}, {"hexgen2-b"}]
    assert [bundle["GPU"] for group in groups.values() for bundle in group["bundles"]] == [2, 1, 2]
    assert Placement.model_validate_json(files["placement.json"]) == placement
    job = json.loads(files["job.json"])
    assert "--launcher ray" in job["entrypoint"] and "--model-path /m" in job["entrypoint"]


def test_rays_own_check_takes_the_job():
    common = pytest.importorskip("ray.dashboard.modules.job.common")
    utils = pytest.importorskip("ray.dashboard.modules.job.utils")
    assert utils
    placement = by_hand({"a": "H100:1"}, {"colocated-0": [("a/0", 32)]})
    job = json.loads(ray_files(placement, None, "test")["job.json"])
    assert common.JobSubmitRequest(**job).entrypoint == job["entrypoint"]


def test_the_start_script_gives_each_machine_what_the_placement_asks_of_it(tmp_path):
    placement = by_hand(
        {"a b".replace(" ", "_"): "H100:2", "b": "A100-80GB:4"}, {"colocated-0": [("b/1", 32)]}
    )
    script, tools = tmp_path / "start-ray.sh", tmp_path / "tools"
    script.write_text(ray_files(placement, None, "test")["start-ray.sh"])
    tools.mkdir()
    for name, body in {"ray": 'printf "%s\\n" "$@"', "hostname": "echo 10.0.0.1 10.0.0.9"}.items():
        (tools / name).write_text(f"#!/bin/sh\n{body}\n")
        (tools / name).chmod(0o755)
    environment = {"PATH": f"{tools}:/usr/bin:/bin"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["sh", script, *words], env=environment, capture_output=True, text=True)

    head = run("b", "10.0.0.1").stdout.splitlines()
    assert head[:2] == ["start", "--head"]
    assert head[-4:] == ["--num-gpus", "2", "--resources", '{"hexgen2-b": 1}']
    assert "--address" in run("b", "10.0.0.2").stdout.splitlines()
    assert run("a_b", "10.0.0.1").returncode == 2  # the placement uses nothing of this node
