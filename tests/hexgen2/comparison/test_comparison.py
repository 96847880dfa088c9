"""Comparisons: which strategies take part, the reference of SLO scales, and the files written."""

import csv
import json

import numpy as np
import pytest
from pytest import approx

from cost_model.errors import InputError
from cost_model.lengths import RequestLengths
from cost_model.models import find_model
from cost_model.registry import make_cost_model
from hexgen2.comparison.contenders import parse_contenders
from hexgen2.comparison.phases import WithinTarget, where_splitting_pays
from hexgen2.comparison.reference import Reference
from hexgen2.comparison.report import print_comparison, write_comparison
from hexgen2.comparison.run import SLO_SCALES, Settings, compare
from hexgen2.report.placement import make_console
from hexgen2.workload.arrivals import LengthSource


def test_contenders_have_the_engine_and_the_cluster_that_are_asked_for():
    found = parse_contenders("hexgen2, hexgen,vllm:prefill-first@b,vllm@b", "a")
    assert [(one.strategy, one.policy, one.cluster) for one in found] == [
        ("hexgen2", "mixed", "a"),
        ("hexgen", "prefill-first", "a"),
        ("vllm", "prefill-first", "b"),
        ("vllm", "chunked", "b"),
    ]
    assert [one.name for one in found] == ["hexgen2@a", "hexgen@a", "vllm:prefill-first@b", "vllm@b"]


def test_a_contender_may_choose_its_phases():
    found = parse_contenders("hexgen2:colocated:chunked,hexgen2:disaggregated,exact:flexible@b", "a")
    assert [(one.phases, one.policy) for one in found] == [
        ("colocated", "chunked"),
        ("disaggregated", "mixed"),
        ("flexible", "mixed"),
    ]
    assert found[0].name == "hexgen2:colocated:chunked@a"


@pytest.mark.parametrize("text", ["", "nobody", "vllm:sometimes", "vllm:colocated", "vllm,vllm"])
def test_wrong_contenders_are_refused(text):
    with pytest.raises(InputError):
        parse_contenders(text, "a")


def test_the_reference_adds_up_the_steps_of_a_request_alone():
    model = find_model("llama-2-70b")
    reference = Reference.of(make_cost_model("calibrated", model, RequestLengths.fixed(500, 30)))
    assert reference is not None and reference.name == "2xH100"
    step_by_step = 0.0
    for made in range(30):
        costs = make_cost_model("calibrated", model, RequestLengths.fixed(max(1, 500 + made - 0.5), 1))
        if made == 0:
            costs = make_cost_model("calibrated", model, RequestLengths.fixed(500, 1))
        phase = "decode" if made else "prefill"
        step_by_step += 80 * costs.layer_s(phase, reference.group, 1)
        step_by_step += costs.edge_s(phase, reference.group, 1, True)
    found = reference.e2el_s(np.array([500]), np.array([30]))
    assert found[0] == approx(step_by_step, rel=1e-6)


def test_a_comparison_plans_simulates_and_writes_everything(tmp_path, capsys):
    settings = Settings("llama-2-13b", seconds=20.0)
    small = tmp_path / "small.yaml"
    small.write_text("name: small\nnodes: [{name: a, accelerators: 'T4:1', interconnect: pcie3}]\n")
    contenders = parse_contenders(f"hexgen2,vllm,hexgen@{small}", "hexgen2-case-study")
    comparison = compare(contenders, ["LPLD"], settings, lambda text: None)
    hexgen2, vllm, hexgen = comparison.entries
    assert hexgen.why and not hexgen.offline
    for entry in (hexgen2, vllm):
        assert entry.peak_req_s == approx(entry.placement.throughput.req_s, rel=0.25)
        assert len(entry.attainment) == len(SLO_SCALES)
        assert entry.attainment == sorted(entry.attainment)
        assert entry.online.completed == max(1000, int(0.75 * 20 * entry.peak_req_s))
    print_comparison(comparison, make_console())
    assert "has no placement: " in capsys.readouterr().out
    written = write_comparison(comparison, tmp_path / "out")
    assert all(path.exists() for path in written)
    with (tmp_path / "out" / "comparison.csv").open() as stream:
        table = list(csv.DictReader(stream))
    assert [row["strategy"] for row in table] == ["hexgen2", "vllm", "hexgen"]
    assert float(table[0]["peak_req_s"]) == approx(hexgen2.peak_req_s)
    results = json.loads((tmp_path / "out" / "LPLD-vllm@hexgen2-case-study.results.json").read_text())
    assert results["offline"]["completed"] == vllm.offline.completed >= 1000
    assert comparison.rows()[2]["infeasible"]


def test_requests_keep_the_means_of_their_class():
    isl, osl = LengthSource.load("HPHD").sample(np.random.default_rng(0), 4000)
    assert isl.mean() == approx(1104.2, abs=0.1) and osl.mean() == approx(397.6, abs=0.1)


def test_where_splitting_pays_is_found_and_said(capsys, tmp_path):
    settings = Settings("llama-2-13b", seconds=5.0, ttft_ms=2000.0, tpots_ms=(100.0, 1.0))
    nodes = "[{name: a, accelerators: 'H100:2'}, {name: b, accelerators: 'A100-80GB:2'}]"
    small = tmp_path / "small.yaml"
    small.write_text(f"name: small\nnodes: {nodes}\n")
    comparison = compare(parse_contenders("hexgen2", str(small)), ["LPLD"], settings, lambda text: None)
    within = {each.tpot_ms: each.goodput_req_s for each in comparison.within}
    assert list(within) == [1.0, 100.0]
    assert not any(within[1.0].values())  # No replica is so fast.
    assert within[100.0]["flexible"] >= 0.98 * max(within[100.0].values())
    print_comparison(comparison, make_console())
    assert where_splitting_pays(comparison.within) in capsys.readouterr().out
    write_comparison(comparison, tmp_path / "out")
    with (tmp_path / "out" / "phases.csv").open() as stream:
        assert [float(row["tpot_ms"]) for row in csv.DictReader(stream)] == [1.0, 100.0]


@pytest.mark.parametrize(
    ("split", "both", "words"),
    [
        ([1, 1, 1], [2, 2, 2], "at least as much within every target"),
        ([3, 3, 3], [2, 2, 2], "one phase each serve more within every target"),
        ([3, 3, 1], [2, 2, 2], "up to 20 ms per output token, those that do both from 30 ms"),
        ([1, 3, 1], [2, 2, 2], "serve more at 20 ms"),
    ],
)
def test_crossings_in_words(split, both, words):
    within = [
        WithinTarget("x", tpot, {"disaggregated": s, "colocated": b, "flexible": max(s, b)})
        for tpot, s, b in zip((10.0, 20.0, 30.0), split, both, strict=True)
    ]
    assert words in where_splitting_pays(within)
