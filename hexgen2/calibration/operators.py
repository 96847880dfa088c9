"""Numbers of operators from a folder of measured times, with their errors before and after."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from cost_model.errors import InputError
from cost_model.hardware import CATALOGUE
from cost_model.operators import Choice, choose
from cost_model.operators.numbers import Fitted, OperatorFits, shipped
from hexgen2.calibration.fit import error_of, fit, held_back
from hexgen2.calibration.tables import OperatorTable
from hexgen2.calibration.tasks import TASKS, Found, Task, find_tables, groups

PARTS = 3
"""One in so many shapes is held back."""
FEWEST = 6
"""Rows of a format that are enough for a fit."""
_SPREAD = 1.0


class Outcome(NamedTuple):
    """How well held-back rows of one operator, GPU and format are predicted.

    rows, held : measured, and of these held back
    before, after : mean relative errors of the held-back rows, by the numbers that ship (`origin` says for
        which card) and by numbers fitted to the other rows
    """

    operator: str
    gpu: str
    form: str
    rows: int
    held: int
    before: float
    origin: str
    after: float


def fit_operators(
    folder: Path, source: str, seed: int = 0, progress: Callable[[Outcome], None] | None = None
) -> tuple[OperatorFits, list[str]]:
    """Numbers fitted to all tables of a folder, and the names of its CSV files that are no tables.

    Fits start from the numbers that would be used without them, and stay near them where rows say little.

    Parameters
    ----------
    folder : GPU_OPERATOR.csv or .csv.gz files (hexgen2/calibration/tasks.py)
    source : who measured
    seed : for the choice of rows that are held back
    progress : called with each outcome

    Raises
    ------
    InputError : no tables, too few rows, or rows that are wrong or contradict each other
    """
    tables, others = find_tables(folder)
    known = ", ".join(task.ending for task in TASKS)
    if not tables:
        remedy = f"name its files GPU_OPERATOR.csv.gz, for example H100_gemm.csv.gz (operators: {known})"
        raise InputError(str(folder), "", "has no tables of operators", remedy)
    found: dict[str, dict[str, dict[str, Fitted[Any]]]] = {}
    for table in tables:
        several = 0
        for form, rows in groups(table):
            several += 1
            fitted, outcome = _fitted(table, form, rows, seed)
            found.setdefault(table.task.operator, {}).setdefault(table.gpu, {})[form] = fitted
            if progress is not None:
                progress(outcome)
        if not several:
            remedy = "see docs/simulate.md for the formats and sizes that count"
            raise InputError(str(table.path), "", "has no rows that can be used", remedy)
    operators: dict[str, Any] = found
    return OperatorFits(source=source, **operators), others


def _fitted(table: Found, form: str, rows: OperatorTable, seed: int) -> tuple[Fitted[Any], Outcome]:
    """Numbers for one format, and how well they do."""
    task, count = table.task, len(rows.seconds)
    if count < FEWEST:
        problem = f"has {count} rows of {form} that can be used"
        raise InputError(str(table.path), "", problem, f"measure at least {FEWEST}, better 50")
    card, start = CATALOGUE[table.gpu], _start(task, table.gpu, form)
    mask = held_back(task, rows, PARTS, seed)
    held = rows.where(mask)
    tried = fit(task, card, form, rows.where(~mask), start.numbers, _SPREAD)
    before, after = (
        error_of(task.predict(numbers, card, form, held), held.seconds) for numbers in (start.numbers, tried)
    )
    numbers = fit(task, card, form, rows, tried if after <= before else start.numbers, _SPREAD)
    outcome = Outcome(task.operator, table.gpu, form, count, int(mask.sum()), before, start.origin, after)
    return Fitted(numbers=numbers, rows=count, error=round(after, 4)), outcome


def _start(task: Task, gpu: str, form: str) -> Choice:
    """The numbers that ship for the GPU, or are scaled to it."""
    try:
        return choose(getattr(shipped(), task.operator), CATALOGUE[gpu], form, 0.0)
    except KeyError:
        return Choice(task.numbers(), "not fitted", 0.0)
