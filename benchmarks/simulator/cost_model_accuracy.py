"""Compare the cost models with measured times, both unfitted and fitted to other rows.

    python -m benchmarks.simulator.cost_model_accuracy measured_times.csv
        [--write cost_model/coefficients.json]

Each row of the file is one prefill of a whole batch, or one decode step, of a model on one tensor-parallel
group; cost_model/measurements.py describes the columns. Predictions:

    table1, zero-fit    the paper's formulas, and the default model with its priors: nothing is fitted
    left-out rows       five-fold cross-validation: coefficients fitted to four fifths predict the last fifth
    left-out gpu        coefficients fitted to the rows of all other GPUs; also left-out model and engine
    shipped             the shipped coefficients for their mean engine; these have seen the rows

The error is |predicted - measured| / measured, the bias is the same with its sign, and tau is Kendall's rank
correlation. --write fits coefficients to all rows, starting from the priors, and writes them with these
errors.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import kendalltau

from cost_model.calibration import CountedRows
from cost_model.coefficients import PRIORS, ZERO_FIT, CoefficientSet, fitted
from cost_model.errors import InputError
from cost_model.held_out import LEFT_OUT, calibrate, left_out_predictions, predictions, random_folds
from cost_model.measurements import COLUMNS, Measurement, measurements, read_rows
from cost_model.table1 import Table1

SOURCES = {
    "aic-kernels": "vLLM kernels of AIConfigurator 0.12",
    "distserve-distserve": "fits to DistServe's engine (Zhong et al., OSDI 2024)",
    "distserve-vllm": "fits to vLLM by the same authors",
    "helix": "vLLM layers of Helix (Mei et al., ASPLOS 2025)",
    "splitwise": "vLLM 2023 of Splitwise (Patel et al., ISCA 2024)",
    "vidur": "operators of Vidur (Agrawal et al., MLSys 2024)",
}


def read_measurements(path: Path) -> tuple[list[Measurement], Counter[str]]:
    """The rows with known accelerators and models, and how many other rows there are per unknown name."""
    known: list[Measurement] = []
    skipped = Counter[str]()
    for row in read_rows(path, (*COLUMNS, "measured_ms"))[1]:
        try:
            known += measurements([row])
        except InputError:
            skipped[f"{row.text('model')} on {row.text('gpu')}"] += 1
    return known, skipped


def table1_s(row: Measurement) -> float:
    """Seconds by the paper's formulas, which omit attention and the LM head."""
    step = row.step
    return step.model.layers * Table1(step.model, step.lengths).layer_s(step.phase, step.group, step.batch)


def predicted_s(rows: list[Measurement]) -> dict[str, np.ndarray]:
    """Seconds of each row, by each prediction method."""
    counted = CountedRows.of(rows)
    times = {
        "table1": np.array([table1_s(row) for row in rows]),
        "zero-fit": np.array([row.step.seconds_by(ZERO_FIT) for row in rows]),
        "left-out rows": left_out_predictions(rows, random_folds(len(rows)), PRIORS),
    }
    for kind, label in LEFT_OUT.items():
        times[f"left-out {kind}"] = left_out_predictions(rows, [label(row) for row in rows], PRIORS)
    mean_engine = fitted().model_copy(update={"engines": {}})
    return times | {"shipped": predictions(counted, mean_engine)}


def groups_of(rows: list[Measurement]) -> Iterator[tuple[str, str, list[int]]]:
    """(group name, phase, row numbers): all rows, with or without attention, per source and per GPU."""
    whole = [k for k, row in enumerate(rows) if row.step.has_attention]
    everything = range(len(rows))
    kinds: list[tuple[str, list[int]]] = [
        ("all", list(everything)),
        ("with attention", whole),
        ("without", [k for k in everything if not rows[k].step.has_attention]),
    ]
    for label in (LEFT_OUT["engine"], LEFT_OUT["gpu"]):
        names = [label(row) for row in rows]
        kinds += [(name, [k for k in everything if names[k] == name]) for name in sorted(set(names))]
    for name, at in kinds:
        if name in ("all", "with attention", "without"):
            yield name, "both", at
        for phase in ("prefill", "decode"):
            yield name, phase, [k for k in at if rows[k].step.phase == phase]


def cells(measured: np.ndarray, predicted: np.ndarray) -> str:
    """Mean error, bias (both in per cent) and Kendall's tau over the rows that could be predicted."""
    known = ~np.isnan(predicted)
    if not known.any():
        return ""
    off = predicted[known] / measured[known] - 1
    tau = kendalltau(measured[known], predicted[known]).statistic if known.sum() > 1 else float("nan")
    return f"{100 * np.abs(off).mean():.1f} {100 * off.mean():+.0f} {tau:.2f}"


def accuracy_table(rows: list[Measurement]) -> Table:
    """A table with one line per group of rows and one column per prediction."""
    measured = np.array([row.seconds for row in rows])
    times = predicted_s(rows)
    table = Table(title="Mean error %, bias %, Kendall's tau", padding=(0, 0))
    for heading in ("rows", "phase", "n", *times):
        table.add_column(heading, justify="left" if heading in ("rows", "phase") else "right")
    for name, phase, at in groups_of(rows):
        if at:
            columns = (cells(measured[at], predicted[at]) for predicted in times.values())
            table.add_row(name, phase, str(len(at)), *columns)
    return table


def shipped_set(rows: list[Measurement]) -> CoefficientSet:
    """The coefficients to ship: fitted to all rows, starting from the priors."""
    counts = Counter(row.step.engine for row in rows)
    source = "; ".join(f"{SOURCES.get(name, name)}: {count}" for name, count in sorted(counts.items()))
    return calibrate(rows, PRIORS, "fitted", f"{len(rows)} measured and derived step times ({source})")


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy of the cost models against measured times.")
    parser.add_argument(
        "csv", type=Path, help="CSV file of measured times; cost_model/measurements.py lists its columns"
    )
    parser.add_argument("--write", type=Path, help="write coefficients fitted to all rows to this file")
    arguments = parser.parse_args()
    rows, skipped = read_measurements(arguments.csv)
    if arguments.write:
        arguments.write.write_text(shipped_set(rows).to_json())
    Console(width=150).print(accuracy_table(rows))
    names = ", ".join(f"{name} ({count})" for name, count in skipped.items())
    print(f"{len(rows)} rows, {skipped.total()} skipped{': ' + names if names else ''}")


if __name__ == "__main__":
    main()
