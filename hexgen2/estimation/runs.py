"""Predictions for a CSV file with a run of a serving engine on each line."""

from __future__ import annotations

import csv
import gzip
import io
import os
import signal
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from cost_model.errors import HexGen2Error, InputError
from cost_model.printable import one_line
from cost_model.registry import CostSource, cost_models_of_runs
from hexgen2.estimation.prediction import SHIPPED, Prediction, predict
from hexgen2.estimation.run import COLUMNS, Run, run_of

ADDED = ("predicted_ttft_ms", "predicted_tpot_ms", "why_not")
"""The columns that are added, or replaced where a file has them."""
_MAX_BYTES = 256 << 20
_FEW_RUNS = 8
"""So few runs take less time than starting processes."""

Progress = Callable[[int, int], None]
Found = TypeVar("Found")


def estimate_runs(
    path: Path,
    jobs: int | None = None,
    progress: Progress | None = None,
    cost_model: str | Path | None = None,
) -> str:
    """The rows of a CSV file of runs with predicted_ttft_ms, predicted_tpot_ms and why_not added, as CSV.

    Columns are those of hexgen2/estimation/run.py; others are passed on. Each run is simulated in a closed
    loop (see hexgen2/estimation/prediction.py); rows that describe the same run are simulated once. Where a
    row cannot be predicted, why_not says why.

    Parameters
    ----------
    path : CSV, or CSV compressed with gzip (.gz)
    jobs : processes; None: one per processor
    progress : called with (runs predicted, runs in all)
    cost_model : NAME, FILE or FILE:ENGINE; each engine's own if not given, or the file's

    Raises
    ------
    InputError : unreadable, a needed column is missing, or no such cost model
    """
    sources = cost_models_of_runs(cost_model)
    header, rows = read_runs(path)
    found = predictions(rows, jobs, progress, sources)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    kept = [k for k, name in enumerate(header) if name.strip() not in ADDED]
    writer.writerow([*(header[k] for k in kept), *ADDED])
    for row, prediction in zip(rows, found, strict=True):
        cells = list(row.values())
        added = [_number(prediction.ttft_ms), _number(prediction.tpot_ms), one_line(prediction.why_not)]
        writer.writerow([*(cells[k] for k in kept), *added])
    return out.getvalue()


def predictions(
    rows: list[dict[str, str]],
    jobs: int | None = None,
    progress: Progress | None = None,
    sources: Mapping[str, CostSource] = SHIPPED,
) -> list[Prediction]:
    """The prediction for each row of cells by column name; sources are cost models by engine."""
    runs: list[Run | Prediction] = []
    for row in rows:
        try:
            runs.append(run_of(row))
        except InputError as error:
            runs.append(Prediction(None, None, str(error)))
    # Long ones first, so that no process is left with one at the end.
    distinct = sorted({run: None for run in runs if isinstance(run, Run)}, key=effort, reverse=True)
    known: dict[Run, Prediction] = {}
    found = in_processes(partial(predict, sources=sources), distinct, jobs)
    for run, prediction in zip(distinct, found, strict=True):
        known[run] = prediction
        if progress is not None:
            progress(len(known), len(distinct))
    return [known[run] if isinstance(run, Run) else run for run in runs]


def effort(run: Run) -> float:
    """Grows with the time that a simulation takes."""
    return run.concurrency * (20 + run.isl / 1024)


def in_processes(work: Callable[[Run], Found], runs: Sequence[Run], jobs: int | None) -> Iterator[Found]:
    """What `work` makes of each run, in their order; by several processes if there are many.

    Raises
    ------
    HexGen2Error : a process has ended
    """
    jobs = min(jobs or os.cpu_count() or 1, len(runs))
    if jobs <= 1 or len(runs) <= _FEW_RUNS:
        yield from map(work, runs)
        return
    # Spawned processes start without the threads and locks of this one.
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), _start, (work,))
    try:
        yield from pool.map(_work_here, runs)
    except BrokenProcessPool:
        raise HexGen2Error(
            "a process that simulates has ended; is there enough memory? Use --jobs 1"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


_here: list[Callable[[Run], Any]] = []
"""In a process that simulates, its work: sent once, so that what its cost models compute is kept."""


def _start(work: Callable[[Run], Any]) -> None:
    """Ctrl-C ends a process at once, without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _here.append(work)


def _work_here(run: Run) -> Any:
    return _here[0](run)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def read_runs(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Column names, and rows with a cell for each of them.

    Raises
    ------
    InputError : as `estimate_runs`
    """
    source = str(path)
    table = csv.reader(io.StringIO(_text(path), newline=""))
    try:
        lines = [line for line in table if line]
    except csv.Error as error:
        raise InputError(source, f"line {table.line_num}", str(error), "correct the CSV") from None
    if not lines:
        raise InputError(source, "", "has no rows", f"give columns {', '.join(COLUMNS)} and rows")
    header = [name.strip() for name in lines[0]]
    missing = [column for column in COLUMNS if column not in header]
    if missing:
        raise InputError(source, missing[0], "is missing", f"needed columns: {', '.join(COLUMNS)}")
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise InputError(source, twice[:60], "is there twice", "rename one of the columns")
    return header, [_row(header, line) for line in lines[1:]]


def _row(header: list[str], cells: list[str]) -> dict[str, str]:
    """Cells by column; missing ones are empty, and those beyond the last column are left out."""
    return dict(zip(header, [*cells, *[""] * (len(header) - len(cells))], strict=False))


def _text(path: Path) -> str:
    """The text of the file, unpacked if it is compressed."""
    source = str(path)
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else open(path, "rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except IsADirectoryError:
        raise InputError(source, "", "is a directory", "name a file inside it") from None
    except (OSError, EOFError, ValueError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(source, "", f"cannot be read ({reason})", "check the path") from None
    if len(raw) > _MAX_BYTES:
        raise InputError(source, "", f"is larger than {_MAX_BYTES} bytes", "give a smaller file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(source, f"byte {error.start}", "is not UTF-8 text", "save it as UTF-8") from None
