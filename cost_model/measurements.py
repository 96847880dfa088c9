"""Engine steps as rows of a CSV file: to be predicted, or with a measured time.

Columns: gpu, model, tp, phase (prefill or decode), batch, input_len_or_context (tokens of each prompt, or of
each request's context). Optional: engine (or source): who was measured; interconnect (or comm): nvlink, pcie,
pcie3, pcie4, pcie5 or shared-memory, none for one GPU, or excluded where all-reduces are left out;
has_attention: 0 where a sum of operators lacks attention, LM head and the fixed cost of a step. A measured
row has measured_ms. Other columns are the user's own. Lines that start with # are comments.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cost_model.architecture import ModelArchitecture
from cost_model.base import CostModel, Phase, TensorGroup, Work
from cost_model.calibrated import Calibrated
from cost_model.coefficients import CoefficientSet
from cost_model.errors import InputError
from cost_model.files import read_text
from cost_model.hardware import (
    INTERCONNECT_CLASSES,
    NO_LINK,
    Accelerator,
    Link,
    find_accelerator,
    interconnect_link,
    pcie_class,
    usual_interconnect,
)
from cost_model.lengths import RequestLengths
from cost_model.models import find_model
from cost_model.printable import has_control_characters
from cost_model.roofline import EdgeWork, LayerWork

COLUMNS = ("gpu", "model", "tp", "phase", "batch", "input_len_or_context")
_MAX_BYTES = 64 << 20
_LARGEST = 10**7
MOST_APART = 1.5
"""The factor by which times of the same work may differ,"""
ALIKE_BELOW_S = 50e-6
"""unless both are shorter than this."""


@dataclass(frozen=True)
class Row:
    """One line of a file, by column name."""

    source: str
    line: int
    cells: dict[str, str]

    def error(self, column: str, problem: str, remedy: str) -> InputError:
        """What is wrong with a cell, naming the file, the line and the column."""
        return InputError(self.source, f"line {self.line}, {column}", problem, remedy)

    def text(self, *columns: str, default: str = "") -> str:
        """The first of these columns that is not empty."""
        return next((self.cells[c].strip() for c in columns if self.cells.get(c, "").strip()), default)

    def count(self, column: str, least: int = 1) -> int:
        """A whole number (written 4 or 4.0)."""
        try:
            value = float(self.text(column))
        except ValueError:
            value = math.nan
        if not least <= value <= _LARGEST or value != int(value):
            problem = f"is {self.text(column)[:40]!r}"
            raise self.error(column, problem, f"give a whole number from {least} to {_LARGEST}")
        return int(value)


@dataclass(frozen=True)
class Step:
    """One prefill of a batch of prompts, or one decode step, of a model on one tensor group.

    tokens : of each prompt, or of each request's context
    has_attention : False where the time lacks attention, LM head and the fixed cost of a step
    """

    engine: str
    group: TensorGroup
    model: ModelArchitecture
    phase: Phase
    batch: int
    tokens: int
    has_attention: bool = True

    def seconds_by(self, coefficients: CoefficientSet, engine: str | None = None) -> float:
        """Seconds predicted with these coefficients, for that engine (None: a mean one)."""
        return self.seconds_of(Calibrated(self.model, self.lengths, coefficients=coefficients, engine=engine))

    def seconds_of(self, costs: CostModel) -> float:
        """Seconds predicted by a cost model for its model and lengths."""
        whole = self.model.layers * costs.layer_work_s(self.group, self._work(costs))
        return whole + (costs.edge_work_s(self.group, self.batch, last=True) if self.has_attention else 0.0)

    def amounts(self) -> tuple[LayerWork, EdgeWork]:
        """The work of a layer and of the stage's edge, before any coefficient."""
        costs = Calibrated(self.model, self.lengths)
        edge = costs.edge_work(self.group, self.batch, last=self.has_attention)
        return costs.layer_work(self.group, self._work(costs)), edge

    @property
    def lengths(self) -> RequestLengths:
        """Requests of which this is the prefill, or a mean decode step."""
        return RequestLengths.fixed(self.tokens, 0)

    def _work(self, costs: CostModel) -> Work:
        """The work of the step, without attention if its time lacks it."""
        work = costs.work(self.phase, self.batch)
        return work if self.has_attention else work._replace(prompt_attended=0.0, context=0.0)


@dataclass(frozen=True)
class Measurement:
    """A step and the seconds that it took."""

    step: Step
    seconds: float


def read_rows(path: Path, required: tuple[str, ...] = COLUMNS) -> tuple[list[str], list[Row]]:
    """Column names and rows of a CSV file.

    Raises
    ------
    InputError : unreadable, a required column is missing, or a line has too many cells
    """
    source = str(path)
    lines = []
    for number, line in enumerate(read_text(path, _MAX_BYTES).splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            lines.append((number, _cells(line, source, number)))
    if not lines:
        raise InputError(source, "", "has no rows", f"give columns {', '.join(required)} and rows")
    header = [name.strip() for name in lines[0][1]]
    missing = [column for column in required if column not in header]
    if missing:
        raise InputError(source, missing[0], "is missing", f"needed columns: {', '.join(required)}")
    rows = []
    for number, cells in lines[1:]:
        if len(cells) > len(header):
            problem = f"has {len(cells)} cells for {len(header)} columns"
            raise InputError(source, f"line {number}", problem, "quote cells that contain commas")
        rows.append(Row(source, number, dict(zip(header, cells, strict=False))))
    return header, rows


def _cells(line: str, source: str, number: int) -> list[str]:
    """The cells of a line."""
    if has_control_characters(line, layout=True):
        raise InputError(source, f"line {number}", "has control characters", "leave them out")
    try:
        return next(csv.reader([line]))
    except csv.Error as error:
        raise InputError(source, f"line {number}", str(error), "correct the CSV") from None


def step_of(row: Row) -> Step:
    """The step that a row describes.

    Raises
    ------
    InputError : unknown GPU, model, phase or interconnect; a number that is not one; heads that do not divide
    """
    where = f"line {row.line}, gpu"
    accelerator = find_accelerator(row.text("gpu"), source=row.source, key=where)
    try:
        model = find_model(row.text("model"))
    except InputError as error:
        raise row.error("model", f"{row.text('model')[:60]!r} {error.problem}", error.remedy) from None
    phase = row.text("phase").lower()
    if phase not in ("prefill", "decode"):
        raise row.error("phase", f"is {phase[:40]!r}", "write prefill or decode")
    degree = row.count("tp")
    if degree not in model.tensor_degrees(degree):
        problem = f"is {degree}, which does not split the {model.heads} heads of {model.name} evenly"
        raise row.error("tp", problem, f"use one of {model.tensor_degrees(16)}")
    return Step(
        engine=row.text("engine", "source"),
        group=TensorGroup(accelerator, degree, _link(row, accelerator, degree)),
        model=model,
        phase="prefill" if phase == "prefill" else "decode",
        batch=row.count("batch"),
        tokens=row.count("input_len_or_context", least=1 if phase == "prefill" else 0),
        has_attention=row.text("has_attention", default="1") != "0",
    )


def measurements(rows: list[Row]) -> Iterator[Measurement]:
    """Rows as measurements.

    Raises
    ------
    InputError : as `step_of`, or measured_ms is not a time
    """
    for row in rows:
        try:
            milliseconds = float(row.text("measured_ms"))
        except ValueError:
            milliseconds = math.nan
        if not 0 < milliseconds < 1e9:
            problem = f"is {row.text('measured_ms')[:40]!r}"
            raise row.error("measured_ms", problem, "give a time above 0, in ms")
        yield Measurement(step_of(row), milliseconds / 1e3)


def disagree(one_s: float, other_s: float) -> bool:
    """Whether two times of the same work contradict each other: they differ by more than MOST_APART, and not
    only by the noise of very short ones."""
    return max(one_s, other_s) > max(ALIKE_BELOW_S, MOST_APART * min(one_s, other_s))


def check_repeats(rows: Sequence[Row], measured: Sequence[Measurement]) -> None:
    """Refuse rows of the same step whose times contradict each other.

    Raises
    ------
    InputError : names the two lines
    """
    lowest: dict[Step, tuple[float, Row]] = {}
    highest: dict[Step, tuple[float, Row]] = {}
    for row, measurement in zip(rows, measured, strict=True):
        timed = measurement.seconds, row
        low, high = lowest.get(measurement.step, timed), highest.get(measurement.step, timed)
        lowest[measurement.step] = low = min(low, timed, key=lambda pair: pair[0])
        highest[measurement.step] = high = max(high, timed, key=lambda pair: pair[0])
        if disagree(low[0], high[0]):
            first, second = sorted((low, high), key=lambda pair: pair[1].line)
            problem = f"the same step took {1e3 * first[0]:g} and {1e3 * second[0]:g} ms"
            key, remedy = (
                f"lines {first[1].line} and {second[1].line}",
                "measure again, and leave the wrong row out",
            )
            raise InputError(row.source, key, problem, remedy)


def _link(row: Row, accelerator: Accelerator, degree: int) -> Link:
    """The link between the group's devices: as the row says, or the usual one."""
    name = row.text("interconnect", "comm").lower()
    if name in ("none", "excluded"):
        return NO_LINK
    if degree == 1 or not name:
        name = usual_interconnect(accelerator)
    if name == "pcie":
        name = pcie_class(accelerator)
    if name not in INTERCONNECT_CLASSES:
        known = ", ".join((*INTERCONNECT_CLASSES, "pcie", "none", "excluded"))
        raise row.error("interconnect", f"is {name[:40]!r}", f"use one of {known}")
    return interconnect_link(name, accelerator)[0]
