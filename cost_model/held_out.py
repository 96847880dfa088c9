"""The error of a calibration on rows, GPUs, models or engines that were left out of the fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cost_model.calibration import CountedRows, fit, five_digits
from cost_model.coefficients import Coefficients, CoefficientSet, HeldOut
from cost_model.measurements import Measurement

FOLDS = 5

LEFT_OUT: dict[str, Callable[[Measurement], str]] = {
    "gpu": lambda row: row.step.group.accelerator.name,
    "model": lambda row: row.step.model.name,
    "engine": lambda row: row.step.engine,
}
"""Ways to group rows: each group is predicted by a fit to all other rows."""


def calibrate(
    rows: Sequence[Measurement], start: CoefficientSet, name: str, source: str, seed: int = 0
) -> CoefficientSet:
    """The set fitted to all rows (see `fit`), with the errors of fits on the rows that they left out.

    Errors are those of whole steps: rows without attention count only if there are no others.
    """
    whole = fit(CountedRows.of(rows), start, name, source)
    predicted = {"rows": left_out_predictions(rows, random_folds(len(rows), seed), start)}
    for kind, label in LEFT_OUT.items():
        labels = [label(row) for row in rows]
        if len(set(labels)) > 1:
            predicted[kind] = left_out_predictions(rows, labels, start)
    counted = np.array([row.step.has_attention for row in rows])
    if not counted.any():
        counted[:] = True
    measured = np.array([row.seconds for row in rows])
    errors = {kind: _error(measured[counted], times[counted]) for kind, times in predicted.items()}

    gpus, named = dict(whole.gpus), np.array([LEFT_OUT["gpu"](row) for row in rows])
    best = predicted.get("model", predicted["rows"])
    for gpu in np.unique(named).tolist():
        here = counted & (named == gpu)
        error = _error(measured[here], best[here])
        gpus[gpu] = gpus[gpu].model_copy(update={"error": error})
    return whole.model_copy(update={"gpus": gpus, "held_out": HeldOut(**errors)})


def left_out_predictions(
    rows: Sequence[Measurement], labels: Sequence[str], start: CoefficientSet
) -> np.ndarray:
    """Seconds of each row, by a fit to the rows with other labels (nan where there are none).

    A GPU that the fit has not seen has the factors of `start`, if any, and an engine those of a mean one.
    """
    counted, named = CountedRows.of(rows), np.array(labels)
    predicted = np.full(len(named), np.nan)
    for label in np.unique(named):
        out = named == label
        if not out.all():
            fitted = fit(counted.at(~out), start, "without", str(label))
            predicted[out] = predictions(counted.at(out), fitted)
    return predicted


def predictions(rows: CountedRows, coefficients: CoefficientSet) -> np.ndarray:
    """Predicted seconds of each row; an engine that the set does not know counts as a mean one."""
    each = [
        coefficients.of(step.group.accelerator, step.engine if step.engine in coefficients.engines else None)
        for step in rows.steps
    ]
    figures = {
        field: np.array([getattr(k, field) for k in each])
        for field in Coefficients.__dataclass_fields__
        if field != "overlap"
    }
    return rows.seconds(Coefficients(**figures, overlap=each[0].overlap))  # type: ignore[arg-type]


def random_folds(count: int, seed: int = 0) -> list[str]:
    """A random label for each row: FOLDS different ones, equally often."""
    order = np.random.default_rng(seed).permutation(count)
    return [str(place % FOLDS) for place in order]


def _error(measured: np.ndarray, predicted: np.ndarray) -> float | None:
    """The mean relative error over rows that could be predicted; None if there are none."""
    off = np.abs(predicted / measured - 1)
    off = off[~np.isnan(off)]
    return five_digits(float(off.mean())) if len(off) else None
