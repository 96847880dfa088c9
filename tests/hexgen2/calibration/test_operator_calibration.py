"""Calibration to tables of operators: it finds what made them, says how far off it is, and refuses rows that
cannot be."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest
from commands import hexgen2 as run
from commands import refused
from hypothesis import HealthCheck, given, settings
from mutations import mutated_bytes

from cost_model.errors import InputError
from cost_model.hardware import CATALOGUE
from cost_model.operators.attention import decode_attention_s
from cost_model.operators.cards import card_of
from cost_model.operators.gemm import gemm_s
from cost_model.operators.numbers import DecodeNumbers, GemmNumbers
from cost_model.registry import CostSource, load_calibration
from hexgen2.calibration.operators import Outcome, fit_operators
from hexgen2.calibration.tables import read_table
from hexgen2.calibration.tasks import find_tables

CARD = card_of(CATALOGUE["RTX4090"], "bf16")
GEMM = GemmNumbers(
    launch_us=4.0, compute=0.35, memory=0.5, overlap=0.9, stepped=0.5, small_tile=0.7, fill=300.0
)
DECODE = DecodeNumbers(
    launch_us=7.0, compute=0.2, memory=0.4, overlap=0.6, few=0.01, tile_us=2.0, stepped=0.3
)
NOISE = 0.03
GEMM_HEADER = ("gemm_dtype", "kernel_source", "m", "n", "k", "latency_ms")


def write(path: Path, header: tuple[str, ...], rows: list[list[object]]) -> Path:
    with gzip.open(path, "wt", newline="") if path.suffix == ".gz" else open(path, "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def gemm_rows(noise: float = NOISE) -> list[list[object]]:
    random = np.random.default_rng(3)
    return [
        ["bfloat16", "x", m, n, k, 1e3 * gemm_s(GEMM, CARD, m, n, k) * np.exp(noise * random.normal())]
        for n in (1024, 4096, 6144, 14336)
        for k in (2048, 8192, 12288)
        for m in (1, 16, 64, 200, 512, 1024, 4096)
    ]


def decode_rows(noise: float = NOISE) -> list[list[object]]:
    random, rows = np.random.default_rng(4), []
    for heads, kv_heads in ((8, 1), (32, 8), (64, 8), (32, 4)):
        for batch in (1, 4, 16, 64, 256):
            for context in (128, 512, 2048, 16384):
                seconds = decode_attention_s(DECODE, CARD, 2.0, batch, batch * context, heads, kv_heads, 128)
                shape: list[object] = [batch, context - 1, heads, kv_heads, 128]
                rows.append(["bfloat16", *shape, 1e3 * seconds * np.exp(noise * random.normal())])
    return rows


DECODE_HEADER = (
    *("kv_cache_dtype", "batch_size", "step", "num_heads", "num_key_value_heads", "head_dim", "latency_ms"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Noisy tables of a card that no numbers ship for."""
    made = tmp_path_factory.mktemp("tables")
    write(made / "RTX4090_gemm.csv.gz", GEMM_HEADER, gemm_rows())
    write(made / "RTX4090_decode_attention.csv", DECODE_HEADER, decode_rows())
    write(made / "notes.csv", ("a",), [["b"]])
    return made


def test_what_made_the_tables_is_found_below_their_noise(folder):
    outcomes: list[Outcome] = []
    found, others = fit_operators(folder, "made up", progress=outcomes.append)
    assert others == ["notes.csv"]
    assert [(o.operator, o.gpu, o.form) for o in outcomes] == [
        ("gemm", "RTX4090", "bf16"),
        ("decode_attention", "RTX4090", "bf16"),
    ]
    for outcome in outcomes:
        assert outcome.origin == "scaled from L40S" and outcome.before > 0.1
        assert outcome.after < 1.5 * NOISE and 0.2 < outcome.held / outcome.rows < 0.4
    numbers = found.gemm["RTX4090"]["bf16"]
    assert numbers.rows == len(gemm_rows()) and numbers.error == pytest.approx(outcomes[0].after, abs=1e-4)
    off = [
        gemm_s(numbers.numbers, CARD, *row[2:5]) / gemm_s(GEMM, CARD, *row[2:5]) - 1 for row in gemm_rows()
    ]
    assert np.abs(off).mean() < NOISE
    own, made = found.decode_attention["RTX4090"]["bf16"].numbers, DECODE
    shapes = [(row[1], row[1] * (row[2] + 1), *row[3:6]) for row in decode_rows()]
    off = [
        decode_attention_s(own, CARD, 2.0, *s) / decode_attention_s(made, CARD, 2.0, *s) - 1 for s in shapes
    ]
    assert np.abs(off).mean() < NOISE


def test_few_rows_stay_near_what_ships(tmp_path):
    """Eight small products say nothing about large ones."""
    small = [row for row in gemm_rows() if row[2] == 1][:8]
    write(tmp_path / "RTX4090_gemm.csv", GEMM_HEADER, small)
    outcomes: list[Outcome] = []
    found, _ = fit_operators(tmp_path, "few", progress=outcomes.append)
    assert found.gemm["RTX4090"]["bf16"].numbers.compute > 0.5
    assert outcomes[0].after < outcomes[0].before


def test_the_command_prints_errors_and_writes_a_cost_model(folder, tmp_path):
    path = tmp_path / "mine.json"
    done = run("calibrate", "--operators", str(folder), "-o", str(path))
    assert done.returncode == 0, done.stderr
    assert "gemm RTX4090 bf16: 84 rows; mean error of 28 held back" in done.stderr
    assert "(scaled from L40S), fitted to the others" in done.stderr and "notes.csv" in done.stderr
    found = load_calibration(path)
    assert found.name == folder.name and set(found.operators.gemm) == {"RTX4090"}
    one = ("estimate", "--gpu", "RTX4090", "--model", "llama-3-8b", "--isl", "500", "--batch", "4", "--json")
    plain, mine = (run(*one, "--cost-model", asked).stdout for asked in ("vllm", str(path)))
    assert plain != mine
    assert CostSource("vllm", engines=found)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"latency_ms": 0}, "line 2, latency_ms: is '0'"),
        ({"latency_ms": -1.5}, "line 2, latency_ms: is '-1.5'"),
        ({"latency_ms": "nan"}, "line 2, latency_ms: is 'nan'"),
        ({"latency_ms": "inf"}, "line 2, latency_ms: is 'inf'"),
        ({"latency_ms": ""}, "line 2, latency_ms: is ''"),
        ({"n": "wide"}, "line 2, n: is 'wide'"),
        ({"m": 0}, "line 2, m: is '0'"),
        ({"k": "1e300"}, "line 2, k: is '1e300'"),
    ],
)
def test_wrong_rows_are_named(tmp_path, changed, complaint):
    first, *rest = gemm_rows()
    first = [changed.get(name, value) for name, value in zip(GEMM_HEADER, first, strict=True)]
    write(tmp_path / "RTX4090_gemm.csv", GEMM_HEADER, [first, *rest])
    assert complaint in refused(run("calibrate", "--operators", str(tmp_path)))


def test_contradictions_are_named_by_line(tmp_path):
    """Times over 50 us of the same work by the same kernel may differ by half, not by more."""
    rows = [*gemm_rows(), ["bfloat16", "x", 1, 128, 512, 0.012]]
    slow, quick = len(rows) - 2, len(rows) - 1

    def read(place: int, factor: float, kernel: str = "x") -> int:
        repeated = [*rows[place][:-1], float(rows[place][-1]) * factor]
        repeated[1] = kernel
        path = write(tmp_path / "RTX4090_gemm.csv", GEMM_HEADER, [*rows, repeated])
        return len(read_table(path).seconds)

    with pytest.raises(InputError, match=f"lines {slow + 2} and {len(rows) + 2}: the same inputs took"):
        read(slow, 1.6)
    assert read(slow, 1.4) == read(slow, 1.6, "another") == read(quick, 3.0) == len(rows)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("H900_gemm.csv", "m\n1\n", "unknown accelerator 'H900'"),
        ("RTX4090_gemm.csv", "", "has no rows"),
        ("RTX4090_gemm.csv", "m,n\n1,2\n", "latency_ms: is missing"),
        ("RTX4090_gemm.csv", "gemm_dtype,m,n,latency_ms\nbfloat16,1,2,3\n", "k: is missing"),
        ("RTX4090_gemm.csv", "gemm_dtype,m,n,k,latency_ms\nbfloat16,1,2,3\n", "line 2: has 4 cells"),
        ("RTX4090_gemm.csv", "gemm_dtype,m,n,k,latency_ms\nbfloat16,1,2,3,4\n", "has 1 rows of bf16"),
        ("RTX4090_gemm.csv", "gemm_dtype,m,n,k,latency_ms\nfloat7,1,2,3,4\n", "has no rows that can be used"),
        ("RTX4090_gemm.csv.gz", "m,n\n1,2\n", "cannot be read"),
        ("other.csv", "m\n1\n", "has no tables of operators"),
    ],
)
def test_wrong_tables_are_one_line(tmp_path, name, text, complaint):
    (tmp_path / name).write_text(text)
    assert complaint in refused(run("calibrate", "--operators", str(tmp_path)))


def test_one_table_of_an_operator_and_gpu(tmp_path):
    for ending in ("csv", "csv.gz"):
        write(tmp_path / f"RTX4090_gemm.{ending}", GEMM_HEADER, gemm_rows())
    with pytest.raises(InputError, match="second table of gemm on RTX4090"):
        find_tables(tmp_path)


def test_steps_or_operators(folder):
    assert "is missing" in refused(run("calibrate"))
    assert "does not go with --operators" in refused(run("calibrate", "x.csv", "--operators", str(folder)))
    assert "cannot be read" in refused(run("calibrate", "--operators", "/nonexistent"))


SMALL = "gemm_dtype,m,n,k,latency_ms\n" + "".join(
    f"bfloat16,{m},{n},4096,{1e3 * gemm_s(GEMM, CARD, m, n, 4096):.5g}\n"
    for m in (1, 64, 1024)
    for n in (1024, 4096)
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(raw=mutated_bytes(SMALL.encode()))
def test_mutated_tables_are_read_or_refused_in_one_line(tmp_path, raw):
    path = tmp_path / "RTX4090_gemm.csv"
    path.write_bytes(raw)
    try:
        fit_operators(tmp_path, "mutated")
    except InputError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)


def test_steps_that_contradict_each_other_are_named(tmp_path):
    path = tmp_path / "steps.csv"
    header, step = "gpu,model,tp,phase,batch,input_len_or_context,measured_ms", "L4,llama-3-8b,1,decode,4,512"
    path.write_text(f"{header}\n# ours\n{step},60\nL4,llama-3-8b,1,decode,8,512,61\n{step},95\n")
    assert "lines 3 and 5: the same step took 60 and 95 ms" in refused(run("calibrate", str(path)))
    path.write_text(f"{header}\n{step},60\n{step},85\n{step},70\n")
    assert run("calibrate", str(path)).returncode == 0
