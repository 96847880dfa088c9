"""`hexgen2 search --case`: measured tables in, a placement out; wrong files are told apart."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from commands import hexgen2 as hexgen2_command
from placement_checks import check_placement

import hexgen2
from hexgen2.search.layer_ranges.case import load_case
from hexgen2.search.layer_ranges.from_case import problem_of_case
from hexgen2.search.layer_ranges.max_flow import FlowValue
from hexgen2.strategies.registry import RANGES

CASE = Path(__file__).parents[2] / "support" / "helix_case.json"
ARTIFACT = os.environ.get("HELIX_CASES", "")


@pytest.fixture
def case() -> dict:
    return json.loads(CASE.read_text())["cases"][0]


def run(*arguments: str) -> tuple[int, str, str]:
    ran = hexgen2_command(*arguments)
    return ran.returncode, ran.stdout, ran.stderr


def test_each_node_is_a_replica_of_one_stage(case):
    for strategy in RANGES:
        found = hexgen2.search(case=f"{CASE}#small", strategy=strategy)
        check_placement(found)
        assert found.strategy == strategy and found.throughput.total_tok_s is not None
        tokens = found.workload.isl + found.workload.osl
        assert found.throughput.total_tok_s == pytest.approx(found.throughput.req_s * tokens)
        assert found.bound.total_tok_s >= found.throughput.total_tok_s * (1 - 1e-9)
        for replica in found.replicas:
            (stage,) = replica.stages
            node = int(replica.id.removeprefix("n"))
            assert stage.gpus == [f"n{node}/0"]
            table = case["gpu"][case["types"][node]]["T_tokens_per_s"]
            assert replica.capacity_req_s * tokens == pytest.approx(table[stage.layer_count - 1])


def test_the_flow_is_that_of_the_written_ranges():
    found = hexgen2.search(case=f"{CASE}#small", strategy="helix", partial_inference=False)
    nodes = problem_of_case(load_case(str(CASE)), partial=False).range_nodes
    held = {replica.id: replica.stages[0].layers for replica in found.replicas}
    ranges = tuple(held.get(name, (0, 0)) for name in nodes.names)
    assert FlowValue(nodes.instance).flow(ranges).tok_s == pytest.approx(found.throughput.total_tok_s)
    assert not found.layer_ranges.partial_inference
    either = hexgen2.search(case=f"{CASE}#small", strategy="helix")
    assert either.throughput.total_tok_s >= found.throughput.total_tok_s * (1 - 1e-9)


def test_saved_shown_and_the_same_again(tmp_path):
    path = tmp_path / "p.json"
    arguments = ("search", "--strategy", "helix", "--case", f"{CASE}#small", "--seed", "3")
    code, out, err = run(*arguments, "-o", str(path))
    assert code == 0, err
    assert "tokens/s with prompts" in out and "activations route" in out
    loaded = hexgen2.load_placement(path)
    again = hexgen2.search(case=f"{CASE}#small", strategy="helix", seed=3)
    told = [json.loads(each.to_json()) for each in (loaded, again)]
    for each in told:
        del each["search"]["seconds"]
    assert told[0] == told[1]
    assert run("show", str(path))[0] == 0
    for command in (("export", str(path), "--format", "vllm"),):
        code, _, err = run(*command)
        assert code == 2 and "ranges of layers" in err


def test_edited_placements_are_refused(tmp_path):
    found = json.loads(hexgen2.search(case=f"{CASE}#small", strategy="helix").to_json())
    edits = {
        "layers": lambda p: p["replicas"][0]["stages"][0].update(layers=[3, 9]),
        "utilisation": lambda p: p["replicas"][0].update(utilisation=0.1),
        "routes": lambda p: p["routes"][0].update(to=p["routes"][0]["from"]),
        "capacity_req_s": lambda p: p["replicas"][0].update(capacity_req_s=1e4),
        "flow_req_s": lambda p: p["routes"][0].update(capacity_req_s=1e-9),
    }
    for key, edit in edits.items():
        changed = json.loads(json.dumps(found))
        edit(changed)
        path = tmp_path / f"{key}.json"
        path.write_text(json.dumps(changed))
        with pytest.raises(hexgen2.InputError, match=r"layers|utilisation|routes|capacity_req_s|flow_req_s"):
            hexgen2.load_placement(path)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("types", lambda c: c["types"].__setitem__(2, "unknown")),
        ("gpu", lambda c: c["gpu"]["fast"].update(max_layers=9)),
        ("gpu", lambda c: c["gpu"]["fast"].update(T_tokens_per_s=[])),
        ("links.source_MBps", lambda c: c["links"].update(source_MBps=[1.0])),
        ("links.upper_MBps", lambda c: c["links"]["upper_MBps"].pop()),
        ("links.bandwidth_Bps", lambda c: c["links"].update(uniform=True)),
        ("layers", lambda c: c.update(layers=0)),
    ],
)
def test_a_wrong_case_is_told_in_one_line(tmp_path, case, key, change):
    change(case)
    path = tmp_path / "case.json"
    path.write_text(json.dumps(case))
    code, _, err = run("search", "--strategy", "helix", "--case", str(path))
    assert code == 2 and str(path) in err and key in err and err.count("\n") == 1


def test_options_that_do_not_go_together():
    case = f"{CASE}#small"
    for wrong in (
        ("--case", case),
        ("--case", f"{CASE}#nothing", "--strategy", "helix"),
        ("--case", case, "--strategy", "helix", "--cluster", "hetis-12"),
        ("--case", case, "--strategy", "helix", "--objective", "goodput", "--ttft", "100"),
        ("--strategy", "helix", "--cluster", "hetis-12"),
        ("--partial-inference", "off", "--cluster", "hetis-12", "--model", "opt-13b", "--workload", "HPLD"),
    ):
        code, _, err = run("search", *wrong)
        assert code == 2 and err.count("\n") == 1, wrong


def test_too_few_layers_are_infeasible(tmp_path, case):
    case["layers"] = 40
    path = tmp_path / "case.json"
    path.write_text(json.dumps(case))
    for strategy in RANGES:
        code, _, err = run("search", "--strategy", strategy, "--case", str(path))
        assert code == 3 and "no feasible placement" in err


def test_a_time_limit_is_kept_and_told():
    found = hexgen2.search(case=f"{CASE}#small", strategy="helix", time_limit_s=0.05)
    assert found.throughput.req_s > 0
    assert found.search.cut == "time limit" or found.bound.gap < 1e-6


@pytest.mark.skipif(not Path(ARTIFACT).is_file(), reason="HELIX_CASES names no file of Helix's cases")
def test_stored_flows_of_the_artifact_are_reproduced():
    from benchmarks.search.helix_cases import stored_flows

    for each in json.loads(Path(ARTIFACT).read_text())["cases"]:
        count, differ = stored_flows(ARTIFACT, each)
        assert count and not differ


def test_latency_aware_keeps_up_no_less_and_simulates_as_it_says():
    """The estimate against a simulation in which everything arrives at once."""
    plain = hexgen2.search(case=f"{CASE}#small", strategy="helix", isl=100, osl=20)
    aware = hexgen2.search(case=f"{CASE}#small", strategy="helix", isl=100, osl=20, latency_aware=True)
    check_placement(aware)
    kept = [placed.layer_ranges.kept_up_req_s for placed in (plain, aware)]
    assert kept[1] >= kept[0] * (1 - 1e-9)
    assert aware.throughput.req_s <= plain.throughput.req_s * (1 + 1e-9)
    for placed, req_s in zip((plain, aware), kept, strict=True):
        found = hexgen2.simulate(placed, offline=True, num_requests=400)
        assert 0.5 < found.steady_request_throughput / req_s < 2
    wrong = "--latency-aware", "--cluster", "hetis-12", "--model", "opt-13b", "--workload", "HPLD"
    code, _, err = run("search", *wrong)
    assert code == 2 and "--latency-aware" in err and err.count("\n") == 1
