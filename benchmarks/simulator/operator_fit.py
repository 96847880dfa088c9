"""Fit the numbers of single operators to measured times, and say how well they predict.

    python -m benchmarks.simulator.operator_fit --tables FOLDER [-o cost_model/operators/fitted.json]

FOLDER has one GPU_OPERATOR.csv.gz per GPU and operator, as AIConfigurator's database has them. A fifth of the
shapes (weights, head configurations, expert layers; whole shapes, with all their sizes) is held back. Printed
for each operator, GPU and format: how many rows were held back, their median and mean error in per cent for
times over 10 us, and the signed median error for small, medium and large times; last, the mean error where a
GPU's numbers are those of the others. What -o writes is fitted to all shapes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from cost_model.errors import InputError
from cost_model.files import write_text
from cost_model.hardware import CATALOGUE, Accelerator
from cost_model.operators import choose
from cost_model.operators.numbers import Fitted, OperatorFits
from hexgen2.calibration.fit import COUNTED_S, error_of, fit, held_back
from hexgen2.calibration.tables import OperatorTable
from hexgen2.calibration.tasks import Task, find_tables, groups

SOURCE = "AIConfigurator 0.12 operator tables (Apache-2.0), vLLM 0.24 (A100: 0.14)"
BANDS_S = ((0.0, 30e-6), (30e-6, 300e-6), (300e-6, np.inf))
"""Small, medium and large times."""
PARTS = 5
"""One in so many shapes is held back."""


class Result(NamedTuple):
    """What was found for one operator, GPU and format."""

    task: Task
    gpu: str
    form: str
    rows: OperatorTable
    fitted: Fitted[Any]
    held: OperatorTable
    predicted: np.ndarray


def starting(task: Task, form: str, fitted: dict[str, Fitted[Any]]) -> BaseModel:
    """Where a fit starts. Blocks of fp8 were timed from the host, which hides what the GPU takes for small
    ones: that is taken from fp8."""
    if task.operator != "gemm" or form == "bf16":
        return task.numbers()
    if form == "fp8_block":
        return fitted["fp8"].numbers.model_copy(update={"host_us": 150.0})
    return task.numbers().model_copy(update={"row_ns": 3.0})


def results(folder: Path) -> list[Result]:
    """Fits to all tables of a folder."""
    found = []
    for table in find_tables(folder)[0]:
        task, card = table.task, CATALOGUE[table.gpu]
        fitted: dict[str, Fitted[Any]] = {}
        for form, rows in groups(table):
            mask = held_back(task, rows, PARTS)
            held = rows.where(mask)
            tried = fit(task, card, form, rows.where(~mask), starting(task, form, fitted))
            predicted = task.predict(tried, card, form, held)
            error = round(error_of(predicted, held.seconds), 4)
            numbers = fit(task, card, form, rows, tried)
            fitted[form] = Fitted(numbers=numbers, rows=len(rows.seconds), error=error)
            found.append(Result(task, table.gpu, form, rows, fitted[form], held, predicted))
    return found


def by_operator(found: list[Result]) -> dict[str, dict[str, dict[str, Fitted[Any]]]]:
    """Numbers by operator, GPU and format."""
    tables: dict[str, dict[str, dict[str, Fitted[Any]]]] = {}
    for result in found:
        formats = tables.setdefault(result.task.operator, {}).setdefault(result.gpu, {})
        formats[result.form] = result.fitted
    return tables


def errors_elsewhere(found: list[Result]) -> dict[str, float]:
    """By operator, the mean error on a GPU as if it had not been measured: with the numbers of another of its
    generation, or else with the mean of the others'."""
    tables, errors = by_operator(found), dict[str, list[float]]()
    for task, gpu, form, rows, *_ in found:
        card = CATALOGUE[gpu]
        others = {name: formats for name, formats in tables[task.operator].items() if name != gpu}
        same = [name for name in others if CATALOGUE[name].generation == card.generation]
        related = {name: others[name] for name in same if form in others[name]}
        if not any(form in formats for formats in others.values()):
            continue
        numbers = choose(related or others, Accelerator("", 1, 1, 1), form, 0.0).numbers
        error = error_of(task.predict(numbers, card, form, rows), rows.seconds)
        errors.setdefault(task.operator, []).append(error)
    return {operator: round(float(np.mean(several)), 4) for operator, several in errors.items()}


def printed(found: list[Result]) -> Table:
    """One line per operator, GPU and format, about held-back rows."""
    title = "Held-back shapes: error % over 10 us; bias % below 30 us, below 300 us, above"
    table = Table(title=title, padding=(0, 1))
    for heading in ("operator", "GPU", "format"):
        table.add_column(heading)
    for heading in ("rows", "median", "mean", "small", "medium", "large"):
        table.add_column(heading, justify="right")
    for task, gpu, form, _, _, held, predicted in found:
        off, counted = predicted / held.seconds - 1, held.seconds >= COUNTED_S
        bands = [(held.seconds >= low) & (held.seconds < high) for low, high in BANDS_S]
        biases = [f"{100 * np.median(off[band]):+.0f}" if band.any() else "" for band in bands]
        size = np.abs(off[counted])
        errors = [f"{100 * f(size):.1f}" if size.size else "" for f in (np.median, np.mean)]
        table.add_row(task.operator, gpu, form, str(len(off)), *errors, *biases)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit operator times, and say how well they predict.")
    parser.add_argument("--tables", type=Path, required=True, help="folder of GPU_OPERATOR.csv.gz files")
    parser.add_argument("-o", "--output", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    found = results(arguments.tables)
    if not found:
        remedy = "name its files GPU_OPERATOR.csv.gz"
        raise InputError(str(arguments.tables), "", "has no tables of operators", remedy)
    Console(width=130).print(printed(found))
    elsewhere = errors_elsewhere(found)
    for operator, error in elsewhere.items():
        print(f"{operator} on a GPU that was left out: {100 * error:.1f} %")
    if arguments.output:
        fits: dict[str, Any] = by_operator(found)
        write_text(arguments.output, OperatorFits(source=SOURCE, elsewhere=elsewhere, **fits).to_json())


if __name__ == "__main__":
    main()
