"""A placement brings the calibration that it was planned with, and all that read it use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import hexgen2 as run
from commands import refused

import hexgen2
from cluster_specs.loader import resolve
from cost_model.coefficients import fitted
from cost_model.engines.numbers import EngineFits, EngineNumbers, FittedEngine, HostNumbers
from cost_model.errors import InputError
from cost_model.operators.numbers import Fitted, GemmNumbers, OperatorFits
from cost_model.registry import CostSource, find_cost_model, make_cost_model
from hexgen2.checks import violations
from hexgen2.cluster import Cluster
from hexgen2.placement import Placement
from hexgen2.prediction.kv_capacity import kv_capacity_tokens
from hexgen2.simulator.options import Options
from hexgen2.simulator.run import simulate
from hexgen2.workload.arrivals import LengthSource, online
from runtime.engine.emulated.engine import _times
from runtime.routing.kv_budget import kv_budgets
from runtime.routing.reflow import Reflow

ASKED = {"cluster": "hexgen2-case-study", "model": "llama-2-13b", "workload": "LPLD"}
CASE = [word for name, value in ASKED.items() for word in (f"--{name}", value)]
GEMM = Fitted[GemmNumbers](numbers=GemmNumbers(compute=0.2, memory=0.3), rows=10, error=0.03)
ENGINES = EngineFits(
    name="mine",
    source="our runs",
    engines={
        name: FittedEngine(numbers=EngineNumbers(step_us=step_us), hosts={"H100": HostNumbers(steps=2.0)})
        for name, step_us in (("vllm", 8000.0), ("sglang", 100.0))
    },
    operators=OperatorFits(source="ours", gemm={"H100": {"bf16": GEMM}}),
)
SET = fitted().model_copy(
    update={
        "name": "ours",
        "base": fitted().base.model_copy(update={"engine_bytes": 6e9, "compute_efficiency": 0.2}),
    }
)


@pytest.fixture(scope="module", params=["engines", "coefficients"])
def file(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("files") / f"{request.param}.json"
    path.write_text((ENGINES if request.param == "engines" else SET).to_json())
    return path


@pytest.fixture(scope="module")
def placement(file) -> Path:
    """Searched with the file, which is then gone."""
    path = file.parent / "placement.json"
    done = run("search", *CASE, "--cost-model", str(file), "-o", str(path))
    assert done.returncode == 0, done.stderr
    return path


def source_of(file: Path) -> CostSource:
    return find_cost_model(file)


def test_a_simulation_of_the_file_is_one_with_these_costs(file, placement):
    placed = Placement.load(placement)
    costs = source_of(file).costs(placed.model, placed.workload.lengths)
    requests = online(LengthSource(placed.workload), 4.0, 100, seed=1)
    found = simulate(placed, requests, Options())
    assert found == simulate(placed, requests, Options(), costs=costs)
    plain = make_cost_model(placed.cost_model.name, placed.model, placed.workload.lengths)
    assert found != simulate(placed, requests, Options(), costs=plain)
    assert hexgen2.simulate(placement, request_rate=4.0, num_requests=100, seed=1).mean_tpot_ms > 0


def test_it_is_what_a_search_with_these_costs_finds(file, placement):
    placed = Placement.load(placement)
    again = hexgen2.search(**ASKED, cost_model=file)
    seconds = {"search": placed.search}
    assert again.model_copy(update=seconds).to_json() == placed.to_json()
    assert again.throughput != hexgen2.search(**ASKED, cost_model=placed.cost_model.name).throughput


def test_all_that_rebuild_costs_use_the_calibration(file, placement):
    placed = Placement.load(placement)
    own = source_of(file).costs(placed.model, placed.workload.lengths)
    plain = make_cost_model(placed.cost_model.name, placed.model, placed.workload.lengths)
    name = placed.replicas[0].id
    group = _times(placed, name).groups[0]
    expected, other = (c.layer_s("decode", group, 4) for c in (own, plain))
    assert placed.costs().layer_s("decode", group, 4) == expected != other
    assert Reflow(placed)._costs.layer_s("decode", group, 4) == expected
    assert _times(placed, name).costs.layer_s("decode", group, 4) == expected
    cluster = Cluster.from_spec(resolve(placed.cluster, "cluster", Path()))
    room = kv_capacity_tokens(placed.replicas[0], cluster, own)
    assert kv_budgets(placed)[name] <= room
    assert not violations(placed)
    if placed.cost_model.coefficients:
        assert room < kv_capacity_tokens(placed.replicas[0], cluster, plain)


def test_a_re_plan_keeps_the_calibration_or_takes_another(file, placement):
    lost = Placement.load(placement).replicas[0].gpus[0]
    kept = hexgen2.replan(placement, lost=lost)
    before = Placement.load(placement).cost_model
    assert (kept.cost_model.engines, kept.cost_model.coefficients) == (before.engines, before.coefficients)
    plain = hexgen2.replan(placement, lost=lost, cost_model="calibrated").cost_model
    assert (plain.engines, plain.coefficients) == (None, None)
    assert (plain.name, plain.calibration) == ("calibrated", fitted().name)


def test_a_comparison_plans_and_simulates_with_it(file):
    found = hexgen2.compare(**ASKED, strategies="vllm", seconds=2, cost_model=file)
    record = found.entries[0].placement.cost_model
    assert record.coefficients == SET or record.engines.operators == ENGINES.operators


def test_only_the_engine_that_was_asked_for_is_kept(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(ENGINES.to_json())
    made = hexgen2.search(**ASKED, cost_model=f"{path}:sglang").cost_model
    assert (made.name, made.calibration) == ("sglang", "mine: sglang")
    assert list(made.engines.engines) == ["sglang"]


@pytest.fixture(scope="module")
def made() -> Placement:
    """Searched without a file."""
    return hexgen2.search(**ASKED)


def test_placements_without_a_calibration_have_the_bytes_that_they_had(made):
    """Their record has the keys of before, and placements of before load."""
    tree = json.loads(made.to_json())
    assert set(tree["cost_model"]) == {"name", "calibration", "error", "unmeasured", "pipeline", "links"}
    assert Placement.model_validate_json(made.to_json()).to_json() == made.to_json()
    assert made.cost_model.source.coefficients is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "vllm"},
        {"coefficients": None, "engine": "orca"},
        {"name": "sglang", "coefficients": None, "engines": json.loads(ENGINES.to_json()) | {"engines": {}}},
        {"coefficients": {"name": "x"}},
    ],
)
def test_a_calibration_of_another_kind_is_refused(tmp_path, made, wrong):
    tree = json.loads(made.to_json())
    tree["cost_model"] |= {"coefficients": json.loads(SET.to_json())} | wrong
    path = tmp_path / "p.json"
    path.write_text(json.dumps(tree))
    with pytest.raises(InputError, match="cost_model"):
        hexgen2.load_placement(path)


def test_estimates_take_names_and_files(file, tmp_path):
    one = {"gpu": "H100:1", "model": "llama-3-8b", "isl": 500, "osl": 100, "batch": 4}
    found, vllm, plain = (hexgen2.estimate(**one, cost_model=c) for c in (file, "vllm", "calibrated"))
    assert found.decode_ms > 1.2 * max(vllm.decode_ms, plain.decode_ms) or found.prefill_ms > plain.prefill_ms
    assert vllm.cost_model["engine"] == "vllm" and plain.cost_model["engine"] is None
    steps = tmp_path / "steps.csv"
    steps.write_text("gpu,model,tp,phase,batch,input_len_or_context\nH100,llama-3-8b,1,prefill,4,500\n")
    for asked, expected in ((str(file), found), ("vllm", vllm), ("calibrated", plain)):
        done = run("estimate", "--csv", str(steps), "--cost-model", asked)
        last = float(done.stdout.splitlines()[-1].split(",")[-1])
        assert last == pytest.approx(expected.prefill_ms, rel=1e-4)
    assert "there is no 'oracle'" in refused(run("compare", *CASE, "--cost-model", "oracle"))


def test_runs_are_predicted_by_the_file(tmp_path):
    """Rows of an engine that the file lacks say so; the others get its numbers."""
    runs, path = tmp_path / "runs.csv", tmp_path / "mine.json"
    row = "meta-llama/Meta-Llama-3.1-8B,h100_sxm,200,20,1,2"
    runs.write_text(
        "backend,model_path,system,isl,osl,tp_size,concurrency\n"
        + "".join(f"{engine},{row}\n" for engine in ("vllm", "sglang", "trtllm"))
    )
    path.write_text(ENGINES.to_json())

    def tpot_ms(*options: str) -> list[str]:
        done = run("estimate", "--runs", str(runs), *options)
        assert done.returncode == 0, done.stderr
        rows = [line.split(",") for line in done.stdout.splitlines()]
        place = rows[0].index("predicted_tpot_ms")
        return [cells[place] or ",".join(cells[place + 1 :]) for cells in rows[1:]]

    plain, ours, one = tpot_ms(), tpot_ms("--cost-model", str(path)), tpot_ms("--cost-model", f"{path}:vllm")
    assert float(ours[0]) > float(plain[0]) and float(ours[0]) > float(ours[1]) + 7
    assert "has no numbers of trtllm" in ours[2]
    assert one[0] == ours[0] and min(map(float, one)) > float(ours[1]) + 7
    assert "there is no 'x'" in refused(run("estimate", "--runs", str(runs), "--cost-model", "x"))
