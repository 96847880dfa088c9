"""Predictions of whole servers stay as close to what was measured as they are, for each engine and GPU, and
those of single steps for each source.

HEXGEN2_MEASUREMENTS names the folder with serving_measured.csv.gz and measured_times.csv.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulator.cost_model_accuracy import read_measurements
from benchmarks.simulator.serving_accuracy import compared
from benchmarks.simulator.serving_runs import for_fitting
from cost_model.coefficients import fitted
from hexgen2.calibration.runs import measured_runs
from hexgen2.estimation.runs import read_runs

FOLDER = os.environ.get("HEXGEN2_MEASUREMENTS", "")
RUNS, STEPS = (Path(FOLDER, name) for name in ("serving_measured.csv.gz", "measured_times.csv"))
MOST_CLIENTS = 64
EVERY = 3
LINES = {
    ("sglang", "B200"): (0.025, 0.28),
    ("sglang", "H200"): (0.11, 0.1),
    ("trtllm", "B200"): (0.11, 0.135),
    ("trtllm", "H100"): (0.055, 0.13),
    ("trtllm", "H200"): (0.17, 0.325),
    ("vllm", "B200"): (0.08, 0.165),
    ("vllm", "H200"): (0.105, 0.145),
}
"""Most that the median error of TPOT and of TTFT may be, for runs that no number was fitted to: a fifth above
what they are."""
STEP_LINES = {
    "aic-kernels": 0.265,
    "distserve-distserve": 0.07,
    "distserve-vllm": 0.085,
    "helix": 0.11,
    "splitwise": 0.115,
    "vidur": 0.08,
}
"""The same for the mean error of steps under the coefficients that ship, by the engine that a row names."""


@pytest.mark.skipif(not FOLDER, reason="HEXGEN2_MEASUREMENTS names no folder")
def test_errors_of_servers_stay_below_their_lines():
    rows = []
    for row in read_runs(RUNS)[1]:
        known = measured_runs([row])
        if known and not for_fitting(known[0]) and known[0].run.concurrency <= MOST_CLIENTS:
            rows.append(row)
    off = defaultdict(list)
    for row in compared(rows[::EVERY], jobs=1):
        off[row.run.engine, row.run.gpu.name].append((abs(row.error("tpot")), abs(row.error("ttft"))))
    medians = {group: np.median(errors, axis=0) for group, errors in off.items() if len(errors) >= 5}
    assert medians.keys() == LINES.keys()
    assert not {group: found for group, found in medians.items() if (found > LINES[group]).any()}


@pytest.mark.skipif(not FOLDER, reason="HEXGEN2_MEASUREMENTS names no folder")
def test_errors_of_steps_stay_below_their_lines():
    known, off = fitted(), defaultdict(list)
    for row in read_measurements(STEPS)[0]:
        engine = row.step.engine if row.step.engine in known.engines else None
        off[row.step.engine].append(abs(row.step.seconds_by(known, engine) / row.seconds - 1))
    means = {source: float(np.mean(errors)) for source, errors in off.items()}
    assert means.keys() == STEP_LINES.keys()
    assert not {source: mean for source, mean in means.items() if mean > STEP_LINES[source]}
