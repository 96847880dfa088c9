"""Engines calibrated to a file of measured runs: what is read, refused, fitted and reported."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cost_model.engines.numbers import EngineFits, FittedEngine
from cost_model.errors import InputError
from hexgen2.calibration.engines import EngineFit, LinearTimes, MeasuredRun, all_linear_times, fit_engine
from hexgen2.estimation.run import Run, run_of
from hexgen2.estimation.runs import read_runs

MEASURED = ("measured_ttft_ms", "measured_tpot_ms")
SAME_WITHIN = 1.5
"""Runs of the same row, but for its times, that differ by more than this factor contradict each other."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Improvement:
    """Mean errors of the runs of one engine on one GPU that were held back from the fit, [TTFT, TPOT],
    before it and after it."""

    engine: str
    gpu: str
    runs: int
    before: tuple[float, float]
    after: tuple[float, float]


def calibrate_runs(
    path: Path,
    known: EngineFits,
    name: str,
    seed: int = 0,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> tuple[EngineFits, list[Improvement]]:
    """Engines fitted to the runs of a file, starting from those that are known, and what that improved on a
    third of the runs that a first fit had not seen.

    Parameters
    ----------
    path : CSV with the columns of `hexgen2 estimate --runs`, measured_ttft_ms and measured_tpot_ms; rows that
        cannot be predicted, or were not measured, are left out
    known : what fits start from; engines without runs stay
    seed : of the choice of the third
    jobs : processes; None: one per processor
    progress : called with (runs simulated, runs in all)

    Raises
    ------
    InputError : unreadable, a column is missing, too few runs, or runs that contradict each other
    """
    source = str(path)
    header, rows = read_runs(path)
    for column in MEASURED:
        if column not in header:
            raise InputError(source, column, "is missing", "give the measured mean in milliseconds")
    runs = measured_runs(rows)
    if len(runs) < 3:
        problem = f"has {len(runs)} measured runs that can be predicted"
        raise InputError(source, "", problem, "give at least 3; `hexgen2 estimate --runs` says why not")
    refuse_contradictions(runs, source)
    engines = dict(known.engines)
    improved: list[Improvement] = []
    for engine in sorted({measured.run.engine for measured in runs}):
        own = [measured for measured in runs if measured.run.engine == engine]
        start = known.engines.get(engine, FittedEngine())
        linear = all_linear_times([measured.run for measured in own], start, jobs, progress)
        improved += _improvements(engine, own, linear, start, seed)
        engines[engine] = fit_engine(own, linear, start, seed)
    text = f"{len(runs)} runs of {path.name}, starting from {known.name}"
    return known.model_copy(update={"name": name, "source": text, "engines": engines}), improved


def measured_runs(rows: Iterable[Mapping[str, str]]) -> list[MeasuredRun]:
    """The rows of a file of runs that were measured and can be predicted."""
    found = []
    for line, row in enumerate(rows, 2):
        ttft_s, tpot_s = (seconds(row.get(column, "")) for column in MEASURED)
        try:
            run = run_of(row)
        except InputError:
            continue
        if ttft_s and tpot_s:
            found.append(MeasuredRun(run, ttft_s, tpot_s, f"line {line}"))
    return found


def seconds(milliseconds: str) -> float:
    """A cell's time in seconds; 0 where there is none."""
    try:
        value = float(milliseconds) / 1e3
    except ValueError:
        return 0.0
    return value if 0 < value < math.inf else 0.0


def refuse_contradictions(runs: Sequence[MeasuredRun], source: str) -> None:
    """Refuse runs of the same row, but for its times, whose times per output token differ by more
    than SAME_WITHIN.

    Raises
    ------
    InputError : names the rows
    """
    alike: dict[Run, list[MeasuredRun]] = defaultdict(list)
    for measured in runs:
        alike[measured.run].append(measured)
    for group in alike.values():
        low, high = (choose(group, key=lambda measured: measured.tpot_s) for choose in (min, max))
        if high.tpot_s > SAME_WITHIN * low.tpot_s:
            times = f"{1e3 * low.tpot_s:.4g} and {1e3 * high.tpot_s:.4g} ms"
            problem = f"the same run as {high.label} with another time per output token ({times})"
            raise InputError(source, low.label, problem, "leave out the wrong one")


def _improvements(
    engine: str,
    runs: Sequence[MeasuredRun],
    linear: Sequence[LinearTimes | None],
    start: FittedEngine,
    seed: int,
) -> Iterator[Improvement]:
    """What a fit to two thirds of the runs makes of the last third."""
    pairs = [(run, times) for run, times in zip(runs, linear, strict=True) if times is not None]
    if len(pairs) < 3:
        return
    fit = EngineFit([run for run, _ in pairs], [times for _, times in pairs], start)
    order = np.random.default_rng(seed).permutation(len(pairs))
    held_back, seen = order[: len(pairs) // 3], order[len(pairs) // 3 :]
    measured = np.exp(fit.log_measured[held_back])
    before = np.abs(fit.seconds[held_back] / measured - 1)
    after = np.abs(fit.predicted(fit.found(seen), held_back) / measured - 1)
    for k, gpu in enumerate(fit.gpus):
        here = fit.gpu_of[held_back] == k
        if here.any():
            errors = [(float(off[here, 0].mean()), float(off[here, 1].mean())) for off in (before, after)]
            yield Improvement(engine, gpu, int(here.sum()), *errors)
