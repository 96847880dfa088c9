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


@pytest.mark.parametrize("text", ["", "nobody", "vllm:sometimes", "vllm,vllm"])
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
