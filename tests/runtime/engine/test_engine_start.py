"""engine_start.py shows that a worker takes little more memory than its rank holds."""

from __future__ import annotations

import subprocess
import sys

import pytest

SIZES = {"hidden": 1024, "ffn": 2816, "layers": 5, "vocab": 16000}


BYTES = {"float32": 4, "bfloat16": 2}


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def rows(dtype: str) -> list[list[float]]:
    """Seconds, MB held, peak MB and their ratio, by load."""
    options = [part for name, size in SIZES.items() for part in (f"--{name}", str(size))]
    command = [
        sys.executable,
        "-m",
        "benchmarks.engine.engine_start",
        *options,
        "--dtype",
        dtype,
        "--repeats",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [[float(value) for value in line.split()[-4:]] for line in done.stdout.splitlines()[1:]]


def test_each_rank_holds_its_share(rows: list[list[float]], dtype: str) -> None:
    hidden, ffn, layers, vocab = SIZES.values()
    layer = hidden * (2 * hidden + 2 * hidden // 4) + 3 * hidden * ffn + 2 * hidden
    matrices = layers * (layer - 2 * hidden) + 2 * vocab * hidden
    norms = (2 * layers + 1) * hidden
    whole, half, stage, transformers, read, _ = (row[1] for row in rows)
    assert whole == transformers == pytest.approx(BYTES[dtype] * (matrices + norms) / 1e6, abs=0.51)
    assert half == pytest.approx(BYTES[dtype] * (matrices / 2 + norms) / 1e6, abs=0.51)
    assert stage == pytest.approx(BYTES[dtype] * (layer * 3 + vocab * hidden + hidden) / 1e6, abs=0.51)
    assert read == pytest.approx(whole, abs=0.51)


def test_the_peak_is_below_what_stays_and_one_tensor(rows: list[list[float]], dtype: str) -> None:
    largest_mb = BYTES[dtype] * SIZES["vocab"] * SIZES["hidden"] / 1e6
    for _, held_mb, peak_mb, _ in rows[:3]:
        assert 0.9 * held_mb < peak_mb < held_mb + largest_mb
