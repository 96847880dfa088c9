"""Estimates of many steps: a CSV file with one on each line."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

from cost_model.dtypes import in_formats
from cost_model.measurements import read_rows, step_of
from cost_model.registry import cost_models_of_engines, find_cost_model


def estimate_table(
    path: Path,
    weights: str | None = None,
    kv: str | None = None,
    engine: str | None = None,
    cost_model: str | Path | None = None,
) -> str:
    """The CSV file's rows with predicted_ms added, as CSV.

    Without `engine`, a row's own engine (or source) counts if the cost model knows it; where none is asked
    for, today's engines and those of 2023 are known.

    Raises
    ------
    InputError
    """
    usual, sources = find_cost_model(cost_model, engine), cost_models_of_engines(cost_model, engine)
    header, rows = read_rows(path)
    written = io.StringIO()
    columns = [*header, *(["predicted_ms"] if "predicted_ms" not in header else [])]
    writer = csv.DictWriter(written, columns, lineterminator="\n", restval="")
    writer.writeheader()
    for row in rows:
        step = step_of(row)
        step = replace(step, model=in_formats(step.model, weights, kv))
        costs = sources.get(step.engine, usual).costs(step.model, step.lengths)
        milliseconds = 1e3 * step.seconds_of(costs)
        writer.writerow({**row.cells, "predicted_ms": f"{milliseconds:.6g}"})
    return written.getvalue()
