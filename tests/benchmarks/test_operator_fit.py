"""The fit of operator times: it finds the numbers that made a table, and its tables are read as they are."""

from __future__ import annotations

import csv
import gzip
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulator import operator_fit
from cost_model.errors import InputError
from cost_model.hardware import CATALOGUE
from cost_model.operators.attention import decode_attention_s
from cost_model.operators.cards import card_of
from cost_model.operators.gemm import gemm_s
from cost_model.operators.numbers import DecodeNumbers, GemmNumbers, load_fits
from hexgen2.calibration.tables import read_table
from hexgen2.calibration.tasks import TASKS

H100 = card_of(CATALOGUE["H100"], "bf16")
GEMM = GemmNumbers(
    launch_us=4.0, compute=0.6, memory=0.7, overlap=0.9, stepped=0.5, small_tile=0.7, fill=300.0
)
DECODE = DecodeNumbers(
    launch_us=7.0, compute=0.2, memory=0.75, overlap=0.6, few=0.01, tile_us=2.0, stepped=0.3
)


def write(path: Path, header: list[str], rows: list[list[object]]) -> None:
    """A table as measured ones are kept."""
    with gzip.open(path, "wt", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def gemm_table(folder: Path) -> None:
    rows: list[list[object]] = []
    for n in (128, 1024, 4096, 6144, 14336):
        for k in (512, 2048, 8192, 12288):
            for m in (1, 16, 64, 128, 200, 256, 512, 1024, 4096):
                seconds = gemm_s(GEMM, H100, m, n, k)
                rows += [["bfloat16", "x", m, n, k, 1e3 * seconds]]
    write(folder / "H100_gemm.csv.gz", ["gemm_dtype", "kernel_source", "m", "n", "k", "latency_ms"], rows)


def decode_table(folder: Path) -> None:
    rows: list[list[object]] = []
    for heads, kv_heads in ((8, 1), (32, 8), (40, 8), (64, 8), (16, 2), (32, 4)):
        for batch in (1, 4, 16, 64, 256):
            for context in (128, 512, 2048, 16384):
                seconds = decode_attention_s(DECODE, H100, 2.0, batch, batch * context, heads, kv_heads, 128)
                shape = [batch, context - 1, heads, kv_heads, 128]
                rows += [["bfloat16", *shape, 1e3 * seconds]]
    names = [
        "kv_cache_dtype",
        "batch_size",
        "step",
        "num_heads",
        "num_key_value_heads",
        "head_dim",
        "latency_ms",
    ]
    write(folder / "H100_decode_attention.csv.gz", names, rows)


def test_it_recovers_the_numbers_that_made_the_tables(tmp_path, monkeypatch, capsys):
    gemm_table(tmp_path)
    decode_table(tmp_path)
    output = tmp_path / "fitted.json"
    monkeypatch.setattr(sys, "argv", ["operator_fit", "--tables", str(tmp_path), "-o", str(output)])
    operator_fit.main()
    fits = load_fits(output)
    for numbers, made in (
        (fits.gemm["H100"]["bf16"], GEMM),
        (fits.decode_attention["H100"]["bf16"], DECODE),
    ):
        assert numbers.error < 0.01
        for name in ("launch_us", "compute", "memory"):
            assert getattr(numbers.numbers, name) == pytest.approx(getattr(made, name), rel=0.05)
    assert "gemm" in capsys.readouterr().out


def test_repeated_measurements_become_their_median(tmp_path):
    path = tmp_path / "H100_gemm.csv.gz"
    write(path, ["m", "kernel_source", "latency_ms"], [[1, "a", 5], [2, "a", 7], [1, "b", 1], [1, "c", 2]])
    table = read_table(path)
    assert dict(zip(table["m"], table.seconds, strict=True)) == {1.0: 0.002, 2.0: 0.007}


@pytest.mark.parametrize("content", [b"no gzip", gzip.compress(b"m,n\n1,2\n"), gzip.compress(b"")])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "H100_gemm.csv.gz"
    path.write_bytes(content)
    with pytest.raises(InputError):
        read_table(path)


def test_whole_shapes_are_held_back(tmp_path):
    gemm_table(tmp_path)
    table = read_table(tmp_path / "H100_gemm.csv.gz")
    held = operator_fit.held_back(TASKS[0], table, 5)
    shapes = np.stack([table["n"], table["k"]], axis=1)
    out, kept = ({tuple(shape) for shape in shapes[mask]} for mask in (held, ~held))
    assert len(out) == 4
    assert not out & kept


def test_an_empty_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["operator_fit", "--tables", str(tmp_path)])
    with pytest.raises(InputError, match="tables"):
        operator_fit.main()
