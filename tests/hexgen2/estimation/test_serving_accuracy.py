"""The benchmark that holds predictions against measured runs, on runs whose measurements are made up."""

from __future__ import annotations

import csv
import math
from itertools import product

import pytest

from benchmarks.simulator.accuracy_report import picture, report
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


STEPS = """\
source,gpu,model,tp,phase,batch,input_len_or_context,measured_ms,kind,has_attention,comm,note
lab,A100-80G,llama2-70b,2,prefill,1,1024,380,direct,1,nvlink,
lab,A100-80G,llama2-70b,2,prefill,1,2048,690,direct,1,nvlink,
lab,A100-80G,llama2-70b,2,decode,1,576,55,direct,1,nvlink,
lab,A100-80G,llama2-70b,2,decode,4,576,57,direct,1,nvlink,
lab,A40,opt-30b,2,decode,4,64,60,direct,1,pcie,
"""


def test_the_report_has_every_part(tmp_path):
    cells = [row(tp, n, (50.0 + n, tpot(tp, n)), (1, 1)).cells for tp, n in product((1, 2), (1, 2, 4, 6))]
    measured = [{"measured_ttft_ms": f"{50 + k}", "measured_tpot_ms": f"{9 + k}"} for k in range(len(cells))]
    with (tmp_path / "runs.csv").open("w") as file:
        writer = csv.DictWriter(file, [*cells[0], *measured[0]])
        writer.writeheader()
        writer.writerows(own | times for own, times in zip(cells, measured, strict=True))
    (tmp_path / "steps.csv").write_text(STEPS)
    text, known = report(tmp_path / "runs.csv", tmp_path / "steps.csv", jobs=1)
    assert 0 < len(known) <= len(cells)
    assert f"| vLLM, H100 | {len(known)} |" in text
    for heading in ("Whole servers", "Where it is bad", "Does it rank?", "Operators", "engines of 2023"):
        assert heading in text
    assert "nan" not in text
    picture(known, tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
