"""How far the cost models are from measured times, without fitting anything to them.

    python benchmarks/cost_model_accuracy.py measured_times.csv

Each row of the file is one prefill of a whole batch, or one decode step, of a model on one tensor group.
Columns: source, gpu, model, tp, phase, batch, input_len_or_context, measured_ms, has_attention (0: the sum
of operators lacks attention and LM head, and so does the prediction then), comm (nvlink, pcie, none or
excluded).

Error is |predicted - measured| / measured, bias the same with its sign, tau Kendall's rank correlation.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.stats import kendalltau

from cost_model.architecture import ModelArchitecture
from cost_model.base import CostModel, Phase, TensorGroup
from cost_model.errors import InputError
from cost_model.hardware import NO_LINK, Accelerator, Link, find_accelerator, interconnect_link
from cost_model.lengths import RequestLengths
from cost_model.models import find_model
from cost_model.registry import COST_MODELS, make_cost_model

PCIE3_CARDS = ("T4", "V100-16GB", "V100-32GB", "P100", "P100-12GB")


@dataclass(frozen=True)
class Measurement:
    """One row of the file; tokens are those of a prompt (prefill) or of the context (decode)."""

    source: str
    group: TensorGroup
    model: ModelArchitecture
    phase: Phase
    batch: int
    tokens: int
    measured_s: float
    has_attention: bool


def link_of(comm: str, accelerator: Accelerator) -> Link:
    """The link that a row's all-reduces used (no time at all where the row leaves them out)."""
    if comm in ("none", "excluded"):
        return NO_LINK
    pcie = "pcie3" if accelerator.name in PCIE3_CARDS else "pcie4"
    return interconnect_link(pcie if comm == "pcie" else comm, accelerator)[0]


def read_measurements(path: Path) -> tuple[list[Measurement], Counter[str]]:
    """The rows of known accelerators and models, and how many others there are of each name."""
    rows, skipped = [], Counter[str]()
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            try:
                accelerator, model = find_accelerator(row["gpu"]), find_model(row["model"])
            except InputError:
                skipped[f"{row['model']} on {row['gpu']}"] += 1
                continue
            rows.append(
                Measurement(
                    source=row["source"],
                    group=TensorGroup(accelerator, int(row["tp"]), link_of(row["comm"], accelerator)),
                    model=model,
                    phase="prefill" if row["phase"] == "prefill" else "decode",
                    batch=int(row["batch"]),
                    tokens=int(row["input_len_or_context"]),
                    measured_s=float(row["measured_ms"]) / 1e3,
                    has_attention=row["has_attention"] == "1",
                )
            )
    return rows, skipped


def predict_s(name: str, row: Measurement) -> float:
    """Seconds of the row's prefill or decode step, all layers on its one tensor group.

    The context of a decode step is isl + osl / 2, so osl is 0 here. Without attention, the prompts of a
    prefill become as many prompts of one token each, and the head is left out.
    """
    batch, isl = row.batch, row.tokens
    if row.phase == "prefill" and not row.has_attention:
        batch, isl = row.batch * row.tokens, 1
    costs: CostModel = make_cost_model(name, row.model, RequestLengths.fixed(isl, 0))
    layers_s = row.model.layers * costs.layer_s(row.phase, row.group, batch)
    return layers_s + costs.edge_s(row.phase, row.group, batch, last=row.has_attention)


def groups_of(rows: list[Measurement]) -> Iterator[tuple[str, str, str, list[int]]]:
    """(attention, source, phase, row numbers): per source and phase, then over all sources."""
    for has_attention in (True, False):
        chosen = [k for k, row in enumerate(rows) if row.has_attention == has_attention]
        label = "yes" if has_attention else "no"
        for source in [*sorted({rows[k].source for k in chosen}), "all"]:
            of_source = [k for k in chosen if source in (rows[k].source, "all")]
            for phase in ("prefill", "decode"):
                yield label, source, phase, [k for k in of_source if rows[k].phase == phase]
            if source == "all":
                yield label, source, "both", of_source
    yield "either", "all", "both", list(range(len(rows)))


def summary(measured: np.ndarray, predicted: np.ndarray) -> list[str]:
    """Mean and median error, bias (per cent) and Kendall's tau."""
    off = predicted / measured - 1
    tau = kendalltau(measured, predicted).statistic if len(measured) > 1 else float("nan")
    return [
        f"{100 * np.abs(off).mean():.1f}",
        f"{100 * np.median(np.abs(off)):.1f}",
        f"{100 * off.mean():+.1f}",
        f"{tau:.2f}",
    ]


def accuracy_table(rows: list[Measurement], names: Iterable[str]) -> Table:
    """One line per source, phase and cost model."""
    measured = np.array([row.measured_s for row in rows])
    predicted = {name: np.array([predict_s(name, row) for row in rows]) for name in names}
    table = Table(title="Cost models against measured times (nothing fitted)")
    for heading in ("attention", "source", "phase"):
        table.add_column(heading)
    for heading in ("rows", "cost model", "mean error %", "median error %", "bias %", "tau"):
        table.add_column(heading, justify="left" if heading == "cost model" else "right")
    for attention, source, phase, at in groups_of(rows):
        for name, times in predicted.items():
            if at:
                table.add_row(attention, source, phase, str(len(at)), name, *summary(measured[at], times[at]))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy of the cost models against measured times.")
    parser.add_argument("csv", type=Path, help="measured times, see the head of this file")
    rows, skipped = read_measurements(parser.parse_args().csv)
    Console(width=120).print(accuracy_table(rows, COST_MODELS))
    names = ", ".join(f"{name} ({count})" for name, count in skipped.items())
    print(f"{len(rows)} rows, {skipped.total()} skipped{': ' + names if names else ''}")


if __name__ == "__main__":
    main()
