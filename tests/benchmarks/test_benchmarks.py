"""The benchmarks of the simulator run, and recover known step times from a profile."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from pytest import approx

from benchmarks.simulator.step_profile import BATCHES, CONTEXTS, SHORT, STEPS, Profiled, StepTimes, fit_decode
from cost_model.lengths import RequestLengths, attended_tokens
from cost_model.models import find_model
from hexgen2.search.problem import make_problem
from hexgen2.simulator.run import simulate
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy
from hexgen2.workload.requests import Requests

TIMES = StepTimes(0.01, 0.001, 2e-7, 0.004, (1.0, 2.0, 8.0), (0.01, 0.02, 0.032), 1e-6, 0.005)


@pytest.mark.slow
def test_the_speed_is_measured(tmp_path):
    trace = tmp_path / "trace.csv"
    rows = "".join(f"2023-11-16 18:00:{second:02d},700,200\n" for second in range(40))
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    command = [sys.executable, "-m", "benchmarks.simulator.simulator_speed", "--trace", str(trace)]
    done = subprocess.run([*command, "--requests", "150"], capture_output=True, text=True, check=True)
    counts = [int(line[24:].split()[0]) for line in done.stdout.splitlines()[1:]]
    assert counts == [40, 150]


def test_decode_steps_are_fitted():
    bare = {batch: 0.01 + 0.002 * batch + 0.004 * (batch % 4) for batch in BATCHES}
    slope = 3e-6
    rows = [
        (b, n, bare[b] + slope * b * (n + STEPS / 2)) for b, n in [*((b, SHORT) for b in BATCHES), *CONTEXTS]
    ]
    batches, seconds, found = fit_decode(rows)
    assert found == approx(slope)
    assert dict(zip(batches, seconds, strict=True)) == approx(bare)


@pytest.mark.parametrize(("requests", "seconds"), [(1, 0.01), (1.5, 0.015), (5, 0.026), (10, 0.036)])
def test_batches_between_and_beyond_are_linear(requests, seconds):
    assert TIMES.decode(requests, 0) == approx(seconds)
    assert TIMES.decode(requests, 1000) == approx(seconds + 0.001)


def test_a_lone_request_takes_the_profiled_steps():
    placement = find_strategy("hexgen2")(
        make_problem("hexgen2-case-study", "llama-2-13b", "HPLD"), SearchOptions()
    )
    lone = {r.id for r in placement.replicas if len(r.stages) == 1}
    route = next(r for r in placement.routes if {r.from_, r.to} <= lone)
    placement = placement.model_copy(update={"routes": [route]})
    costs = Profiled(find_model("llama-2-13b"), RequestLengths.of([(100, 30, 1)]), TIMES)
    asked = Requests(np.zeros(1), np.array([100]), np.array([30]), "by hand")
    found = simulate(placement, asked, costs=costs)
    assert found.mean_ttft_ms == approx(1e3 * (0.014 + 0.1 + 2e-7 * attended_tokens(100, None)))
    steps = sum(0.01 + 1e-6 * (100 + made) for made in range(1, 30))
    waited = found.routes[0]["mean_after_prefill_ms"]
    assert found.mean_tpot_ms * 29 == approx(1e3 * steps + waited)
