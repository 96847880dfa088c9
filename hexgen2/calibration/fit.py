"""Fits the numbers of an operator to measured times."""

from __future__ import annotations

import numpy as np
from pydantic import BaseModel
from scipy.optimize import least_squares

from cost_model.hardware import Accelerator
from hexgen2.calibration.tables import OperatorTable
from hexgen2.calibration.tasks import Task

COUNTED_S = 10e-6
"""Errors are means over times of at least this."""
_FIT_ROWS = 4000
_OUTLIER = 0.1
"""Errors beyond this share count linearly."""


def held_back(task: Task, rows: OperatorTable, parts: int, seed: int = 0) -> np.ndarray:
    """A mask of the rows of one in `parts` shapes, chosen at random; of single rows if there are fewer
    shapes."""
    columns = [rows[name] for name in task.shape if name in rows.columns]
    shape = np.unique(np.stack(columns), axis=1, return_inverse=True)[1].reshape(-1)
    if shape.max() + 1 < parts:
        shape = np.arange(len(rows.seconds))
    count = shape.max() + 1
    return np.asarray(np.random.default_rng(seed).permutation(count)[shape] < max(1, count // parts))


def free_fields(task: Task, form: str) -> list[str]:
    """The numbers that a format's rows can tell: launches of the host's hide those of blocks of fp8."""
    names = list(task.numbers.model_fields)
    if task.operator != "gemm":
        return [name for name in names if (task.operator, name) != ("mla_prefill", "few")]
    fixed = {"bf16": {"row_ns", "host_us"}, "fp8_block": {"launch_us", "row_ns"}}
    return [name for name in names if name not in fixed.get(form, {"host_us"})]


def fit(
    task: Task,
    card: Accelerator,
    form: str,
    rows: OperatorTable,
    start: BaseModel,
    spread: float | None = None,
) -> BaseModel:
    """Numbers fitted to rows: least squares of log errors, with little weight on outliers.

    Parameters
    ----------
    start : numbers that the fit starts from
    spread : if given, numbers are drawn towards the start: one that is off by a factor of e to the power of
        this counts as much as one row that is off by 10 %
    """
    if len(rows.seconds) > _FIT_ROWS:
        chosen = np.random.default_rng(1).choice(len(rows.seconds), _FIT_ROWS, replace=False)
        rows = rows.where(chosen)
    names = free_fields(task, form)
    limits = [_limits(task.numbers, name) for name in names]
    low, high = (np.log([max(limit[side], 1e-6) for limit in limits]) for side in (0, 1))
    fixed = {name: getattr(start, name) for name in task.numbers.model_fields}
    target = np.log(rows.seconds)

    def numbers(vector: np.ndarray) -> BaseModel:
        free = dict(zip(names, np.exp(vector).tolist(), strict=True))
        return task.numbers.model_construct(**{**fixed, **free})

    def residuals(vector: np.ndarray) -> np.ndarray:
        off = np.asarray(np.log(task.predict(numbers(vector), card, form, rows)) - target)
        return off if spread is None else np.concatenate([off, _OUTLIER * (vector - first) / spread])

    first = np.clip(np.log([max(getattr(start, name), 1e-6) for name in names]), low + 1e-6, high - 1e-6)
    found = least_squares(
        residuals, first, bounds=(low, high), loss="soft_l1", f_scale=_OUTLIER, diff_step=1e-4
    )
    values = {**fixed, **dict(zip(names, np.exp(found.x).tolist(), strict=True))}
    return task.numbers(**{name: _rounded(task.numbers, name, value) for name, value in values.items()})


def error_of(predicted: np.ndarray, seconds: np.ndarray) -> float:
    """Mean relative error of times of at least COUNTED_S; of all, if all are shorter."""
    counted = seconds >= COUNTED_S
    if not counted.any():
        counted[:] = True
    return float(np.abs(predicted / seconds - 1)[counted].mean())


def _limits(numbers: type[BaseModel], name: str) -> tuple[float, float]:
    bounds = numbers.model_fields[name].metadata
    least = next(bound.ge for bound in bounds if hasattr(bound, "ge"))
    most = next(bound.le for bound in bounds if hasattr(bound, "le"))
    return float(least), float(most)


def _rounded(numbers: type[BaseModel], name: str, value: float) -> float:
    """Four digits, within the limits."""
    least, most = _limits(numbers, name)
    return min(max(float(f"{value:.4g}"), least), most)
