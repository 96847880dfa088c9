"""The benchmark that holds predictions against measured runs, on runs whose measurements are made up."""

from __future__ import annotations

import math
from itertools import product

import pytest

from benchmarks.simulator.serving_accuracy import Compared, accuracy, errors_of, pairs, ranking
from hexgen2.estimation.prediction import Prediction
from hexgen2.estimation.run import run_of


def row(tp: int, clients: int, measured: tuple[float, float], predicted: tuple[float, float]) -> Compared:
    """One run of a model on TP GPUs, with its (TTFT, TPOT) in ms."""
    cells = {"backend": "vllm", "model_path": "Qwen/Qwen3-32B", "system": "h100_sxm", "isl": "512"}
    cells |= {"osl": "200", "tp_size": str(tp), "concurrency": str(clients), "gemm_quant_mode": "fp8"}
    return Compared(cells, run_of(cells), Prediction(*predicted), *measured)


def tpot(tp: int, clients: int, base: float = 10.0) -> float:
    """A step on more GPUs is quicker, but not in proportion; more clients slow it down."""
    return base * (1 + clients / 8) / tp**0.5


SHAPES = list(product((1, 2, 4), (1, 4, 8, 16, 32)))


def test_errors_have_size_and_sign():
    rows = [row(1, 4, (100, 10), (50, 12)), row(2, 4, (100, 10), (150, 8)), row(2, 8, (100, 10), (100, 13))]
    assert errors_of(rows) == ["3", "23.3", "20.0", "+20", "33.3", "50.0", "+0"]
    assert accuracy(rows).row_count == 1 + 1 + 1 + 1 + 1 + 1 + 2 + 1


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_a_constant_factor_does_not_change_the_ranking(factor):
    rows = [row(tp, n, (50, tpot(tp, n)), (50 * factor, factor * tpot(tp, n))) for tp, n in SHAPES]
    found = list(pairs(rows))
    assert {pair.names for pair in found} == {(a, b) for a in NAMES for b in NAMES if a < b}
    assert all(pair.predicted == pytest.approx(pair.measured) for pair in found)
    assert "9 comparisons" in ranking(rows) and "100.0% as measured, 100.0% weighted" in ranking(rows)


NAMES = [f"1 x Shape(tp={tp}, pp=1, attention_dp=1, expert_parallel=1)" for tp in (1, 2, 4)]


def test_predictions_that_prefer_the_other_deployment_are_wrong():
    """Measured, a second GPU gains nothing; predicted, two GPUs serve four times as many clients."""
    rows = [row(1, n, (5, ms), (5, ms)) for n, ms in ((1, 10), (4, 20), (16, 40))]
    rows += [row(2, n, (5, ms), (5, ms / 2)) for n, ms in ((1, 10), (4, 20), (16, 40))]
    found = list(pairs(rows))
    assert [pair.measured for pair in found] == pytest.approx([math.log(2)] * 3)
    assert all(pair.predicted < 0 for pair in found)
    assert "3 comparisons of deployments at equal time per token: 0.0% as measured" in ranking(rows)


def test_one_deployment_has_nothing_to_be_ranked_with():
    assert ranking([row(1, n, (50, tpot(1, n)), (50, 9)) for n in (1, 2, 4)]).startswith("no pairs")
