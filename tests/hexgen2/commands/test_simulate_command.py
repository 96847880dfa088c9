"""`hexgen2 simulate` and `hexgen2 compare`."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from commands import hexgen2, installed, refused

LATENCIES = [
    f"{kind}_{name}_ms"
    for kind in ("mean", "median", "p90", "p99")
    for name in ("ttft", "tpot", "itl", "e2el")
]


@pytest.fixture(scope="module")
def placement(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("simulate") / "placement.json"
    done = hexgen2(
        "search",
        "--cluster",
        "hexgen2-case-study",
        "--model",
        "llama-2-13b",
        "--workload",
        "LPLD",
        "--phases",
        "disaggregated",
        "-o",
        str(path),
    )
    assert done.returncode == 0, done.stderr
    return str(path)


@pytest.fixture
def trace(tmp_path) -> str:
    path = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:{k // 60:02}:{k % 60:02}.5,{100 + k},{5 + k % 7}" for k in range(120)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    return str(path)


def test_results_have_the_names_of_the_benchmark(placement, tmp_path):
    out, lines = tmp_path / "results.json", tmp_path / "requests.csv"
    options = ["--request-rate", "5", "--num-requests", "200", "--ttft", "500", "--tpot", "100"]
    done = hexgen2("simulate", placement, *options, "-o", str(out), "--requests-out", str(lines), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert json.loads(out.read_text()) == found
    assert found["completed"] == 200 and found["failed"] == 0
    assert found["request_goodput"] <= found["request_throughput"]
    assert all(found[key] > 0 for key in LATENCIES)
    assert sum(row["requests"] for row in found["routes"]) == 200
    with lines.open() as stream:
        rows = list(csv.DictReader(stream))
    assert sorted(int(row["request"]) for row in rows) == list(range(200))
    waits = [float(row["first_token_s"]) - float(row["arrival_s"]) for row in rows]
    assert sum(waits) / 200 * 1e3 == pytest.approx(found["mean_ttft_ms"], rel=1e-3)


@pytest.mark.parametrize("targets", [",", "", "40,x", "40,-1", "0", "nan"])
def test_wrong_targets_of_a_comparison_are_refused(targets):
    asked = ["--cluster", "hexgen2-case-study", "--model", "llama-2-13b", "--workload", "LPLD"]
    assert "--tpot" in refused(hexgen2("compare", *asked, "--tpot", targets))
    assert "--tpot" in refused(hexgen2("compare", *asked, "--ttft", "500"))


def test_a_trace_is_replayed_at_its_times_or_faster(placement, trace):
    slow = json.loads(hexgen2("simulate", placement, "--workload", trace, "--json").stdout)
    assert slow["completed"] == 120 and 119 < slow["duration_s"] < 130
    fast = json.loads(
        hexgen2("simulate", placement, "--workload", trace, "--request-rate", "10", "--json").stdout
    )
    assert 11.9 < fast["duration_s"] < 20
    first = json.loads(
        hexgen2("simulate", placement, "--workload", trace, "--duration-s", "30", "--json").stdout
    )
    assert first["completed"] == 31


def test_a_closed_loop_keeps_as_many_in_flight_as_it_may(placement, tmp_path):
    lines = tmp_path / "requests.csv"
    options = ["--isl", "200", "--osl", "50", "--length-range", "0.8", "--max-concurrency", "7"]
    options += ["--num-prompts", "60", "--requests-out", str(lines), "--json"]
    done = hexgen2("simulate", placement, *options)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["completed"] == 60 and 60 * 160 <= found["total_input_tokens"] <= 60 * 200
    with lines.open() as stream:
        rows = list(csv.DictReader(stream))
    sent = sorted(float(row["arrival_s"]) for row in rows)
    assert sent[7:] == sorted(float(row["end_s"]) for row in rows)[:-7] and not any(sent[:7])
    waits = [float(row["first_token_s"]) - float(row["arrival_s"]) for row in rows]
    assert sum(waits) / 60 * 1e3 == pytest.approx(found["mean_ttft_ms"], rel=1e-3)


@pytest.mark.parametrize("command", ["simulate", "bench"])
@pytest.mark.parametrize(
    "options",
    [
        ("--max-concurrency", "0"),
        ("--length-range", "0"),
        ("--length-range", "1.5"),
        ("--length-range", "nan"),
        ("--duration-s", "3", "--max-concurrency", "2"),
    ],
)
def test_limits_that_make_no_sense_are_one_line(placement, command, options):
    target = placement if command == "simulate" else "http://127.0.0.1:9"
    done = hexgen2(command, target, "--isl", "100", "--osl", "10", *options)
    assert options[0] in refused(done)


def test_tables_for_people(placement):
    fails = "--fail", "decode-0@0.5", "--no-recover"
    done = installed("simulate", placement, "--offline", "--num-requests", "100", *fails)
    assert done.returncode == 0, done.stderr
    assert "TTFT" in done.stdout and "KV route" in done.stdout and "failed" in done.stdout


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], "--request-rate"),
        (["--offline", "--request-rate", "3"], "--offline"),
        (["--offline", "--duration-s", "3"], "--duration-s"),
        (["--request-rate", "0"], "--request-rate"),
        (["--offline", "--step-tokens", "0"], "--step-tokens"),
        (["--offline", "--max-batch", "0"], "--max-batch"),
        (["--offline", "--policy", "static"], "--policy"),
        (["--request-rate", "3", "--fail", "decode-0"], "--fail"),
        (["--request-rate", "3", "--fail", "decode-0@soon"], "--fail"),
        (["--request-rate", "3", "--fail", "nobody@3"], "nobody"),
        (["--request-rate", "3", "--workload", "nothing"], "nothing"),
        (["--request-rate", "3", "-o", "/nowhere/at/all.json"], "/nowhere"),
        (["--request-rate", "3", "--requests-out", "/nowhere/at/all.csv"], "/nowhere"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(placement, options, named):
    assert named in refused(hexgen2("simulate", placement, *options))


def test_a_broken_placement_is_refused(tmp_path, placement):
    broken = json.loads(Path(placement).read_text())
    broken["routes"][0]["to"] = "nobody"
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(broken))
    assert "nobody" in refused(hexgen2("simulate", str(path), "--offline"))


def test_compare_prints_tables_and_writes_files(tmp_path):
    options = ["--cluster", "hexgen2-case-study", "--model", "llama-2-13b", "--workload", "LPLD,HPLD"]
    options += ["--strategies", "distserve,vllm", "--seconds", "2"]
    done = installed("compare", *options, "-o", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("SLO scale") >= 2
    table = (tmp_path / "out" / "comparison.csv").read_text().splitlines()
    assert len(table) == 5
    rows = json.loads(hexgen2("compare", *options, "--json").stdout)
    assert [row["strategy"] for row in rows] == ["distserve", "vllm"] * 2


@pytest.mark.parametrize("options", [["--strategies", "nobody"], ["--workload", "x"], ["--cluster", "x"]])
def test_compare_refuses_what_it_does_not_know(options):
    asked = {"--cluster": "hexgen2-case-study", "--model": "llama-2-13b", "--workload": "LPLD"}
    asked |= dict([options])
    assert asked[options[0]] in refused(
        hexgen2("compare", *(word for pair in asked.items() for word in pair))
    )
