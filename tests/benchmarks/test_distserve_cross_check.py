"""distserve_cross_check.py without DistServe: with step times made by hand, and files written here."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pytest import approx

from benchmarks.simulator.distserve_cross_check import measured_files, ours, place, read_measured, row_of
from benchmarks.simulator.distserve_profile import DistServeProfile, read_fits
from cost_model.errors import InputError
from hexgen2.workload.requests import Requests

MODEL = "facebook/opt-13b"
FIT = {
    "prefill": [10.0, 0.1, 1e-5],
    "decoding_smallbs": [20.0, 1e-3, 0.5],
    "decoding_largebs": [5.0, 1e-3, 0.7],
    "decoding_large_small_bs_threshold": 3,
}


def requests_of(*rows: tuple[float, int, int]) -> Requests:
    arrival_s, isl, osl = (np.array(column) for column in zip(*rows, strict=True))
    return Requests(arrival_s.astype(float), isl, osl, "by hand")


def simulated(requests: Requests):
    placement = place("distserve", 2, requests)
    costs = DistServeProfile(placement.model, placement.workload.lengths, {"1": FIT})
    return ours("ours", placement, requests, costs).figures


def test_a_request_alone_takes_what_the_fits_add_up_to():
    figures = simulated(requests_of((0.0, 100, 11)))
    # Added to the fit: 3 ms per prefill, 2 ms per decode step, and 0.1 us per token of context.
    assert figures["mean_ttft_ms"] == approx(10 + 0.1 * 100 + 1e-5 * 100**2 + 3 + 1e-4 * 100)
    steps = [20 + 1e-3 * (101 + made) + 0.5 + 2 + 1e-4 * (100 + made) for made in range(10)]
    # The KV transfer adds less than 5 ms.
    assert np.mean(steps) <= figures["mean_tpot_ms"] <= np.mean(steps) + 0.5


def test_prompts_of_a_step_are_squared_one_by_one_and_many_decodes_have_a_fit_of_their_own():
    figures = simulated(requests_of(*[(0.0, 50, 101)] * 4))
    together = 10 + 0.1 * 150 + 1e-5 * 3 * 50**2 + 3 + 1e-4 * 150
    alone = 10 + 0.1 * 50 + 1e-5 * 50**2 + 3 + 1e-4 * 50
    assert figures["mean_ttft_ms"] == approx(alone + 3 / 4 * together)
    steps = [5 + 1e-3 * 4 * (51 + made) + 0.7 * 4 + 2 + 1e-4 * 4 * (50 + made) for made in range(100)]
    assert figures["mean_tpot_ms"] == approx(np.mean(steps), rel=0.03)


def test_profiles_are_found_in_a_checkout_or_missed_in_words(tmp_path):
    folder = tmp_path / "simdistserve" / "estimators" / "profile_data"
    folder.mkdir(parents=True)
    (folder / "profiler-a100-80g.vllm.json").write_text(json.dumps({MODEL: {"1": FIT}}))
    assert read_fits(tmp_path, "vllm", MODEL) == {"1": FIT}
    for backend, model in (("vllm", "facebook/opt-66b"), ("distserve", MODEL)):
        with pytest.raises(InputError, match="LLMServe/DistServe"):
            read_fits(tmp_path, backend, model)


def test_measured_runs_are_read_by_arrival_and_summed_up_as_simulated_ones(tmp_path):
    late = {"prompt_len": 7, "output_len": 3, "issue_time": 101.0, "first_token_time": 101.5}
    early = {"prompt_len": 9, "output_len": 11, "issue_time": 100.0, "first_token_time": 100.1}
    listed = [late | {"complete_time": 101.9}, early | {"complete_time": 102.1}]
    path = tmp_path / "distserve-2-1.exp"
    path.write_text(f"{listed}\n{{\n\tnum_requests: 2\n}}\n")
    run = read_measured(path)
    assert run.requests.arrival_s.tolist() == [0.0, 1.0]
    assert run.requests.isl.tolist() == [9, 7] and run.requests.osl.tolist() == [11, 3]
    figures = row_of("measured", run.requests, run.first_s, run.end_s).figures
    assert figures["mean_ttft_ms"] == approx((100 + 500) / 2)
    # Both take 200 ms per output token, twice the target.
    assert figures["mean_tpot_ms"] == approx(200) and figures["attainment"] == 0.0


@pytest.mark.parametrize("text", ["", "[]", "[1]", "{'a': 1}", "[{'prompt_len': 1}]", "no list"])
def test_other_files_are_no_measured_runs(text, tmp_path):
    path = tmp_path / "other.exp"
    path.write_text(text)
    with pytest.raises(InputError, match="lists no requests"):
        read_measured(path)


def test_of_a_folder_only_runs_of_the_backend_at_its_degrees_are_taken(tmp_path):
    for name in ("distserve-300-10", "distserve-c21d11-300-9", "distserve-c21d12-600-6", "vllm-100-1.5"):
        (tmp_path / f"{name}.exp").touch()
    found = [path.stem for path in measured_files([tmp_path], "distserve")]
    assert found == ["distserve-c21d11-300-9", "distserve-300-10"]
    assert [path.stem for path in measured_files([tmp_path], "vllm")] == ["vllm-100-1.5"]
    assert measured_files([tmp_path / "any"], "vllm") == [tmp_path / "any"]


def test_without_distserve_the_script_says_what_it_needs():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.simulator.distserve_cross_check"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "github.com/LLMServe/DistServe" in done.stderr
