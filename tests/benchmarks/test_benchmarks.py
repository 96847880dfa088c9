"""The benchmarks of the simulator run, and recover known step times from a profile."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from pytest import approx

from benchmarks.simulator.step_profile import (
    BATCHES,
    CONTEXTS,
    LENGTHS,
    MIXED_PROMPT,
    SHORT,
    STEPS,
    Contention,
    Profiled,
    Speed,
    StepTimes,
    fit_decode,
    fit_mixed,
    fit_prefill,
)
from cost_model.base import Work
from cost_model.lengths import RequestLengths, attended_tokens
from cost_model.models import find_model
from hexgen2.search.problem import make_problem
from hexgen2.simulator.run import simulate
from hexgen2.strategies.base import SearchOptions
from hexgen2.strategies.registry import find_strategy
from hexgen2.workload.requests import Requests

PROMPTS = (10.0, 110.0), (0.024, 0.124), 2e-7
TIMES = StepTimes(*PROMPTS, 0.0015, (1.0, 2.0, 8.0), (0.01, 0.02, 0.032), 1e-6, 0.005)


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


def test_prompt_steps_are_fitted():
    bare = {length: 0.01 + 0.001 * length + 0.002 * (length % 3) for length in LENGTHS}
    slope = 3e-7
    alone = [seconds + slope * attended_tokens(length) for length, seconds in bare.items()]
    bursts = [(3, 64), (2, 128), (4, 96), (2, 256)]
    rows = [(n, tokens, bare[n * tokens] + slope * n * attended_tokens(tokens)) for n, tokens in bursts]
    lengths, seconds, found = fit_prefill(alone, rows)
    assert found == approx(slope)
    assert dict(zip(lengths, seconds, strict=True)) == approx(bare)


def test_decodes_beside_a_prompt_are_fitted():
    alone = TIMES.prefill(MIXED_PROMPT, attended_tokens(MIXED_PROMPT))
    context = SHORT + STEPS
    rows = [(count, alone + count * (0.0025 + 1e-6 * context)) for count in (1, 4, 9)]
    assert fit_mixed(TIMES, rows) == approx(0.0025)


def test_a_step_with_prompts_and_decodes_takes_its_own_time():
    costs = Profiled(find_model("llama-2-13b"), RequestLengths.of([(100, 30, 1)]), TIMES)

    def seconds(*work: float) -> float:
        return costs.layer_work_s(None, Work(*work)) * costs.model.layers

    assert seconds(100, 5000, 0, 0, 1) == approx(0.114 + 0.001)
    assert seconds(0, 0, 2, 300, 2) == approx(0.02 + 0.0003)
    assert seconds(100, 5000, 2, 300, 3) == approx(0.114 + 0.001 + 2 * 0.0015 + 0.0003)


def test_steps_are_slowed_as_much_as_the_other_replica_works():
    slowed = Contention(prompt=1.2, decode=1.5).slowed(TIMES, prefilling=0.4, decoding=0.5)
    assert slowed.prefill(100, 5000) == approx(1.1 * TIMES.prefill(100, 5000))
    assert slowed.decode(2, 300) == approx(1.2 * TIMES.decode(2, 300))
    assert Contention(1.2, 1.5).slowed(TIMES, 0, 0) == TIMES


def test_a_profile_follows_the_speed_of_the_machine():
    now = Speed(2.0, 1.0).over(Speed(2.0, 1.2), Speed(2.4, 1.4), TIMES)
    assert now.prefill(100, 5000) == approx(1.1 * TIMES.prefill(100, 5000))
    assert now.mixed(100, 5000, 2, 300) == approx(1.1 * (0.114 + 0.001) + 1.3 * (2 * 0.0015 + 0.0003))


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
