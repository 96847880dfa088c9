"""`hexgen2 estimate --runs`."""

from __future__ import annotations

import csv

import pytest
from commands import hexgen2, installed, refused

HEAD = "backend,model_path,system,isl,osl,tp_size,concurrency,mine"
ROWS = [
    "vllm,meta-llama/Llama-3.1-8B-Instruct,h100_sxm,256,16,1,2,a",
    "vllm,zhipuai/GLM-5,h100_sxm,256,16,8,2,b",
    "sglang,Qwen/Qwen3-8B,H200,256,16,1,3,c",
]


@pytest.fixture
def runs(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([HEAD, *ROWS]) + "\n")
    return path


def test_predictions_are_added_to_the_rows(runs, tmp_path):
    done = installed("estimate", "--runs", runs, "-o", tmp_path / "out.csv")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert [row["mine"] for row in rows] == ["a", "b", "c"]
    assert all(float(row["predicted_ttft_ms"]) > float(row["predicted_tpot_ms"]) > 0 for row in rows[::2])
    assert rows[1]["predicted_ttft_ms"] == rows[1]["predicted_tpot_ms"] == ""
    assert rows[1]["why_not"].startswith("model_path: GLM-5 has sparse attention")
    assert hexgen2("estimate", "--runs", runs).stdout == (tmp_path / "out.csv").read_text()


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["--csv", "steps.csv"], "--runs: does not go with --csv"),
        (["--gpu", "H100:8"], "--gpu: is a column with --runs"),
        (["--engine", "vllm"], "--engine: is a column with --runs"),
        (["--cost-model", "mine.json"], "mine.json: cannot be read"),
        (["--json"], "--json: does not go with --runs"),
        (["-o", "no/such/folder/out.csv"], "no/such/folder"),
    ],
)
def test_what_does_not_go_together_is_refused(runs, more, complaint):
    assert complaint in refused(hexgen2("estimate", "--runs", runs, *more))


def test_a_file_without_the_columns_is_one_line(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("backend,isl\nvllm,100\n")
    assert "model_path: is missing; needed columns: backend" in refused(hexgen2("estimate", "--runs", path))
    assert "cannot be read" in refused(hexgen2("estimate", "--runs", tmp_path / "none.csv"))
    assert "--jobs: goes with --runs only" in refused(hexgen2("estimate", "--jobs", 2, "--csv", path))
