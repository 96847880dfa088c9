"""Estimates of many steps: a CSV file with one on each line."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

from cost_model.dtypes import in_formats
from cost_model.measurements import read_rows, step_of
from hexgen2.estimation.coefficients import named_coefficients


def estimate_table(
    path: Path,
    weights: str | None = None,
    kv: str | None = None,
    engine: str | None = None,
    cost_model: str | Path | None = None,
) -> str:
    """The CSV file's rows with predicted_ms added, as CSV.

    Without `engine`, a row's own engine (or source) counts if the coefficients know it.

    Raises
    ------
    InputError
    """
    coefficients = named_coefficients(cost_model, engine)
    header, rows = read_rows(path)
    written = io.StringIO()
    columns = [*header, *(["predicted_ms"] if "predicted_ms" not in header else [])]
    writer = csv.DictWriter(written, columns, lineterminator="\n", restval="")
    writer.writeheader()
    for row in rows:
        step = step_of(row)
        step = replace(step, model=in_formats(step.model, weights, kv))
        known = step.engine if step.engine in coefficients.engines else None
        milliseconds = 1e3 * step.seconds_by(coefficients, engine or known)
        writer.writerow({**row.cells, "predicted_ms": f"{milliseconds:.6g}"})
    return written.getvalue()
