"""Numbers of engines are found again from runs that were made with them."""

from __future__ import annotations

import csv

import numpy as np
import pytest
from commands import hexgen2 as run
from commands import refused

from cost_model.engines.numbers import EngineFits, EngineNumbers, FittedEngine, HostNumbers, shipped
from cost_model.errors import InputError
from hexgen2.calibration.engines import (
    MeasuredRun,
    all_linear_times,
    fit_engine,
    linear_times,
    seconds_with,
)
from hexgen2.calibration.runs import calibrate_runs, measured_runs
from hexgen2.estimation.run import run_of

TRUE = FittedEngine(
    numbers=EngineNumbers(
        products=1.2, decodes=0.8, step_us=1500.0, first_token_us=54e3, first_layer_us=540.0
    ),
    hosts={"H100": HostNumbers(steps=1.3)},
)


def rows_of(fitted, noise=0.02, seed=3):
    """Rows of runs that an engine with these numbers would have measured."""
    rng = np.random.default_rng(seed)
    rows = []
    for model in ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B"):
        for tp in (1, 2, 4):
            for isl, osl, clients in (
                (512, 32, 1),
                (2048, 16, 4),
                (256, 64, 16),
                (1024, 32, 6),
                (128, 32, 2),
            ):
                row = {
                    "backend": "vllm",
                    "model_path": model,
                    "system": "h100_sxm",
                    "precision": "fp8",
                    "isl": isl,
                    "osl": osl,
                    "tp_size": tp,
                    "concurrency": clients,
                }
                row = {key: str(cell) for key, cell in row.items()}
                run = run_of(row)
                times = 1e3 * seconds_with(run, fitted) * rng.normal(1, noise, 2)
                rows.append(row | dict(zip(("measured_ttft_ms", "measured_tpot_ms"), times, strict=True)))
    return rows


def written(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture(scope="module")
def rows():
    return rows_of(TRUE)


def test_runs_are_predicted_well_after_the_fit(rows, tmp_path):
    known = EngineFits(source="", engines={"vllm": FittedEngine()})
    found, improved = calibrate_runs(written(tmp_path / "runs.csv", rows), known, "mine", jobs=1)
    fitted = found.engines["vllm"]
    assert (found.name, fitted.rows) == ("mine", len(rows))
    off = []
    for measured in measured_runs(rows):
        times = seconds_with(measured.run, fitted)
        off.append(np.abs(times / (measured.ttft_s, measured.tpot_s) - 1))
    assert np.mean(off) < 0.06
    assert np.max(off) < 0.2
    (held_back,) = improved
    assert (held_back.engine, held_back.gpu, held_back.runs) == ("vllm", "H100", len(rows) // 3)
    assert held_back.after[1] < 0.6 * held_back.before[1]
    assert held_back.after[0] < held_back.before[0]


def test_times_are_linear_in_the_numbers(rows):
    """Predictions from slopes equal simulations under other numbers."""
    start, run = FittedEngine(), run_of(rows[5])
    times = linear_times(run, start)
    names = list(EngineNumbers.model_fields)
    ratios = {"products": 1.3, "prompts": 0.8, "layer_us": 3.0, "step_us": 0.5, "first_token_us": 2.0}
    numbers = {name: getattr(start.numbers, name) * ratio for name, ratio in ratios.items()}
    changed = start.model_copy(update={"numbers": start.numbers.model_copy(update=numbers)})
    change = sum(times.slopes[:, names.index(name)] * (ratio - 1) for name, ratio in ratios.items())
    exact = seconds_with(run, changed)
    assert times.seconds + change == pytest.approx(exact, rel=0.01)


def test_versions_that_predict_several_tokens_at_a_time_are_found():
    """Half of the runs are twice as fast per token as steps of that length can be, all of one version."""
    row = {"backend": "trtllm", "model_path": "deepseek-ai/DeepSeek-R1", "system": "b200", "precision": "fp8"}
    row |= {"tp_size": "8", "isl": "256", "stream_interval": "1"}
    measured = []
    for version, tokens in (("1.0", "1"), ("1.1", "2")):
        for osl, clients in ((32, 1), (16, 2), (24, 4), (48, 2), (16, 8)):
            cells = row | {"osl": str(osl), "concurrency": str(clients), "backend_version": version}
            ttft_s, tpot_s = seconds_with(run_of(cells | {"tokens_per_step": tokens}), TRUE)
            measured.append(MeasuredRun(run_of(cells), ttft_s, tpot_s))
    linear = all_linear_times([one.run for one in measured], FittedEngine(), jobs=1)
    found = fit_engine(measured, linear, FittedEngine())
    assert found.speculative == {"1.1": {"deepseek-v3": pytest.approx(2.0, rel=0.25)}}
    again = fit_engine(measured, all_linear_times([one.run for one in measured], found, jobs=1), found)
    assert again.speculative == {"1.1": {"deepseek-v3": pytest.approx(2.0, rel=0.2)}}


def test_runs_that_contradict_each_other_are_named(rows, tmp_path):
    twice = [*rows, rows[2] | {"measured_tpot_ms": 2 * rows[2]["measured_tpot_ms"]}]
    with pytest.raises(InputError, match=r"line 4: the same run as line 32 .*leave out the wrong one"):
        calibrate_runs(written(tmp_path / "runs.csv", twice), shipped(), "mine", jobs=1)


def test_files_without_measured_runs_are_refused(rows, tmp_path):
    plain = [{key: row[key] for key in row if key != "measured_tpot_ms"} for row in rows]
    with pytest.raises(InputError, match="measured_tpot_ms: is missing"):
        calibrate_runs(written(tmp_path / "runs.csv", plain), shipped(), "mine")
    with pytest.raises(InputError, match="has 2 measured runs"):
        calibrate_runs(written(tmp_path / "runs.csv", rows[:2]), shipped(), "mine")


def test_the_command_writes_engines_that_estimate_takes(rows, tmp_path):
    path, mine = written(tmp_path / "runs.csv", rows[::4]), tmp_path / "mine.json"
    done = run("calibrate", "--runs", path, "-o", mine)
    assert done.returncode == 0, done.stderr
    assert "vllm on H100: mean error of 2 held-back runs: TPOT" in done.stderr
    by_mine = run("estimate", "--runs", path, "--cost-model", mine).stdout
    assert by_mine != run("estimate", "--runs", path).stdout
    first = next(csv.DictReader(by_mine.splitlines()))
    assert float(first["predicted_tpot_ms"]) == pytest.approx(float(first["measured_tpot_ms"]), rel=0.2)


def test_one_source_of_measurements_at_a_time(rows, tmp_path):
    path = written(tmp_path / "runs.csv", rows)
    assert "does not go with --operators and --runs" in refused(run("calibrate", path, "--runs", path))
    assert "CSV|URL: is missing" in refused(run("calibrate"))
