"""Coefficients from measured times.

There are few coefficients, bounded and drawn towards known values: eight for all rows, two factors for each
GPU and six for each engine, each with a spread around the set that the fit starts from (penalised least
squares on the error of the logarithm). Errors above about 8 % count linearly instead of quadratically, so
that rows which the model cannot explain do not distort the rest. The formulas are the ones that predict
(cost_model/roofline.py)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from cost_model.coefficients import Base, Coefficients, CoefficientSet, EngineFactors, GpuFactors
from cost_model.measurements import Measurement, Step
from cost_model.roofline import EdgeWork, LayerWork, edge_s, layer_s

_LOG_ERROR = 0.08
_CONFIDENCE = 1.5
"""The factor by which the spreads below are narrowed; chosen by the error on left-out models and GPUs."""

# Per coefficient: the start if the set has none, the spread of its logarithm, least and most.
_BASE = {
    "compute_efficiency": (0.5, 0.3, 0.05, 1.0),
    "memory_efficiency": (0.8, 0.2, 0.1, 1.0),
    "attention_efficiency": (1.0, 0.7, 0.05, 2.0),
    "overlap": (3.0, 0.3, 1.0, 10.0),
    "layer_overhead_s": (15e-6, 0.7, 1e-7, 1e-2),
    "all_reduce_overhead_s": (10e-6, 0.7, 1e-7, 1e-2),
    "step_overhead_s": (1e-3, 1.5, 1e-6, 1.0),
    "request_overhead_s": (20e-6, 1.5, 1e-8, 1e-2),
}
_GPU = {"compute": 0.25, "memory": 0.15}
_ENGINE = {
    "compute": 0.1,
    "memory": 0.1,
    "layer_overhead": 0.7,
    "nvlink_share": 0.7,
    "step_overhead": 1.0,
    "request_overhead": 1.0,
}
_LARGEST_FACTOR = 20.0


@dataclass(frozen=True)
class CountedRows:
    """Measured rows as arrays, with the work of each."""

    steps: tuple[Step, ...]
    log_s: np.ndarray
    layer: LayerWork
    edge: EdgeWork
    layers: np.ndarray
    whole: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Measurement]) -> CountedRows:
        steps = tuple(row.step for row in rows)
        layer, edge = zip(*(step.amounts() for step in steps), strict=True)
        return cls(
            steps,
            np.log([row.seconds for row in rows]),
            LayerWork(*np.array(layer, dtype=float).T),
            EdgeWork(*np.array(edge, dtype=float).T),
            np.array([step.model.layers for step in steps]),
            np.array([step.has_attention for step in steps]),
        )

    def at(self, chosen: np.ndarray) -> CountedRows:
        """Only these rows."""
        return CountedRows(
            tuple(step for step, kept in zip(self.steps, chosen, strict=True) if kept),
            self.log_s[chosen],
            LayerWork(*(amount[chosen] for amount in self.layer)),
            EdgeWork(*(amount[chosen] for amount in self.edge)),
            self.layers[chosen],
            self.whole[chosen],
        )

    def seconds(self, k: Coefficients) -> np.ndarray:
        """Predicted seconds; coefficients are numbers, or arrays with one element per row."""
        edge = np.where(self.whole, edge_s(self.edge, k), 0.0)
        return np.asarray(self.layers * layer_s(self.layer, k) + edge)


class _Layout:
    """The positions of a set's coefficients in the vector of logarithms that is fitted."""

    def __init__(self, rows: CountedRows, start: CoefficientSet) -> None:
        self.rows, self.start = rows, start
        gpus = [step.group.accelerator.name for step in rows.steps]
        engines = [step.engine for step in rows.steps]
        self.gpus, self.engines = sorted(set(gpus)), sorted(set(engines))
        self.gpu_of = np.array([self.gpus.index(name) for name in gpus])
        self.engine_of = np.array([self.engines.index(name) for name in engines])
        if len(self.engines) == 1:
            self.engines = []
        centre, spread, low, high = [], [], [], []
        for figure, (fallback, width, least, most) in _BASE.items():
            centre.append(min(max(getattr(start.base, figure) or fallback, least), most))
            spread.append(width)
            low.append(least)
            high.append(most)
        for names, known, factors, plain in (
            (self.gpus, start.gpus, _GPU, GpuFactors()),
            (self.engines, start.engines, _ENGINE, EngineFactors()),
        ):
            for name in names:
                centre += [getattr(known.get(name, plain), factor) for factor in factors]
                spread += factors.values()
                low += [1 / _LARGEST_FACTOR] * len(factors)
                high += [_LARGEST_FACTOR] * len(factors)
        self.centre, self.low, self.high = np.log(centre), np.log(low), np.log(high)
        self.spread = np.array(spread) / _CONFIDENCE

    def base(self, logs: np.ndarray) -> dict[str, float]:
        """The coefficients of the base, by name."""
        return dict(zip(_BASE, np.exp(logs[: len(_BASE)]).tolist(), strict=True))

    def gpu_factors(self, logs: np.ndarray) -> np.ndarray:
        """[gpus, factors]"""
        end = len(_BASE) + len(self.gpus) * len(_GPU)
        return np.exp(logs[len(_BASE) : end]).reshape(-1, len(_GPU))

    def engine_factors(self, logs: np.ndarray) -> np.ndarray:
        """[engines, factors]"""
        begin = len(_BASE) + len(self.gpus) * len(_GPU)
        return np.exp(logs[begin:]).reshape(-1, len(_ENGINE))

    def coefficients(self, logs: np.ndarray) -> Coefficients:
        """The coefficients of all rows: arrays [rows] where rows differ."""
        base = self.base(logs)
        gpu = dict(zip(_GPU, self.gpu_factors(logs)[self.gpu_of].T, strict=True))
        engine: dict[str, Any] = dict.fromkeys(_ENGINE, 1.0)
        if self.engines:
            engine = dict(zip(_ENGINE, self.engine_factors(logs)[self.engine_of].T, strict=True))
        return Coefficients(
            compute_efficiency=base["compute_efficiency"] * gpu["compute"] * engine["compute"],  # type: ignore[arg-type]
            memory_efficiency=base["memory_efficiency"] * gpu["memory"] * engine["memory"],  # type: ignore[arg-type]
            attention_efficiency=base["attention_efficiency"],
            overlap=base["overlap"],
            layer_overhead_s=base["layer_overhead_s"] * engine["layer_overhead"],
            all_reduce_overhead_s=base["all_reduce_overhead_s"],
            nvlink_share=engine["nvlink_share"],
            step_overhead_s=base["step_overhead_s"] * engine["step_overhead"],
            request_overhead_s=base["request_overhead_s"] * engine["request_overhead"],
        )

    def residuals(self, logs: np.ndarray) -> np.ndarray:
        """Residuals for least squares: robust errors of the rows, then distances from the start."""
        off = (np.log(self.rows.seconds(self.coefficients(logs))) - self.rows.log_s) / _LOG_ERROR
        robust = np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1))
        return np.concatenate([robust, (logs - self.centre) / self.spread])

    def as_set(self, logs: np.ndarray, name: str, source: str) -> CoefficientSet:
        """The fitted set; coefficients that no row depends on stay as in the set that the fit started
        from."""
        gpu_rows = Counter(self.gpu_of.tolist())
        gpus = {
            gpu: GpuFactors(**_named(_GPU, factors), rows=gpu_rows[k])
            for k, (gpu, factors) in enumerate(zip(self.gpus, self.gpu_factors(logs), strict=True))
        }
        engine_rows = Counter(self.engine_of.tolist())
        engines = {
            engine: EngineFactors(**_named(_ENGINE, factors), rows=engine_rows[k])
            for k, (engine, factors) in enumerate(zip(self.engines, self.engine_factors(logs), strict=True))
        }
        base = {figure: five_digits(value) for figure, value in self.base(logs).items()}
        return CoefficientSet(
            name=name,
            source=source,
            base=Base(**{**self.start.base.model_dump(), **base}),
            gpus={**self.start.gpus, **gpus},
            engines=engines,
        )


def fit(rows: CountedRows, start: CoefficientSet, name: str, source: str) -> CoefficientSet:
    """The set that fits the rows best.

    Parameters
    ----------
    rows : at least one
    start : what figures are drawn towards; those of GPUs that no row has are kept
    name, source : what the set is called and where its rows come from
    """
    layout = _Layout(rows, start)
    low = np.minimum(layout.low, layout.centre - 1e-6)
    high = np.maximum(layout.high, layout.centre + 1e-6)
    found = least_squares(layout.residuals, layout.centre, bounds=(low, high), max_nfev=100)
    return layout.as_set(found.x, name, source)


def _named(names: Iterable[str], values: np.ndarray) -> dict[str, Any]:
    return {name: five_digits(value) for name, value in zip(names, values.tolist(), strict=True)}


def five_digits(value: float) -> float:
    """Rounded to five digits, which is more than measurements justify."""
    return value if value == 0 or not math.isfinite(value) else float(f"{value:.5g}")
