"""Measured operator times: CSV files, one per GPU and operator, with AIConfigurator's columns."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cost_model.errors import InputError
from cost_model.measurements import disagree

ENDINGS = (".csv.gz", ".csv")
TIME = "latency_ms"
_KERNEL = "kernel_source"
_LARGEST = 1e12
_MOST_MS = 1e9
_MAX_CHARACTERS = 1 << 30


@dataclass(frozen=True)
class OperatorTable:
    """One file's measurements: columns of equally many rows, numbers where all entries are numbers.

    seconds : of each row; repeated measurements of one shape have become their median
    """

    columns: dict[str, np.ndarray]
    seconds: np.ndarray

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def where(self, mask: np.ndarray) -> OperatorTable:
        """The rows that a mask, or an array of row numbers, selects."""
        columns = {name: values[mask] for name, values in self.columns.items()}
        return OperatorTable(columns, self.seconds[mask])


def read_table(
    path: Path, sizes: Collection[str] = (), labels: Collection[str] = (), may_be_zero: Collection[str] = ()
) -> OperatorTable:
    """The table in a CSV file (.csv, or .csv.gz) with a column latency_ms.

    Parameters
    ----------
    sizes, labels : columns that it must have, of numbers and of text
    may_be_zero : those columns of numbers, if it has them, of which 0 is one; others start at 1

    Raises
    ------
    InputError : unreadable, a column is missing, a number is not one, a time is not above 0, or rows alike in
        everything (the kernel too) have times that differ too much (cost_model.measurements.disagree)
    """
    header, rows, lines = _cells(path)
    for name in (TIME, *sizes, *labels):
        if name not in header:
            needed = ", ".join((*labels, *sizes, TIME))
            raise InputError(str(path), name, "is missing", f"give the columns {needed}")
    texts = {name: [row[k] for row in rows] for k, name in enumerate(header)}
    milliseconds = _numbers(path, TIME, texts[TIME], lines, 0.0, _MOST_MS, "a time above 0")
    columns = {name: _values(entries) for name, entries in texts.items()}
    for name in dict.fromkeys((*sizes, *(name for name in may_be_zero if name in header))):
        least = -1e-9 if name in may_be_zero else 1 - 1e-9
        columns[name] = _numbers(path, name, texts[name], lines, least, _LARGEST, "a size")
    for name in labels:
        columns[name] = np.array(texts[name])
    same = [name for name in header if name != TIME]
    codes = np.stack([np.unique(columns[name], return_inverse=True)[1].reshape(-1) for name in same])
    _check_repeats(path, codes, milliseconds, lines)
    shapes = codes[[k for k, name in enumerate(same) if name != _KERNEL]]
    first, groups, counts = _groups(shapes)
    seconds = milliseconds[first] / 1e3
    for group in np.flatnonzero(counts > 1):
        seconds[group] = np.median(milliseconds[groups == group]) / 1e3
    return OperatorTable({name: values[first] for name, values in columns.items()}, seconds)


def _cells(path: Path) -> tuple[list[str], list[list[str]], list[int]]:
    """The header, the rows, and the line that each ends on."""
    source, remedy = str(path), "give a folder of .csv or .csv.gz files"
    try:
        with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else open(path, newline="") as file:
            if len(text := file.read(_MAX_CHARACTERS + 1)) > _MAX_CHARACTERS:
                raise ValueError(f"is longer than {_MAX_CHARACTERS} characters")
        reader = csv.reader(text.splitlines())
        numbered = [(reader.line_num, row) for row in reader if row]
    except (OSError, EOFError, ValueError, zlib.error, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(source, "", f"cannot be read ({reason})", remedy) from None
    if len(numbered) < 2:
        raise InputError(source, "", "has no rows", remedy)
    (_, header), *rows = numbered
    for line, row in rows:
        if len(row) != len(header):
            problem = f"has {len(row)} cells for {len(header)} columns"
            raise InputError(source, f"line {line}", problem, "correct the CSV")
    return [name.strip() for name in header], [row for _, row in rows], [line for line, _ in rows]


def _values(entries: list[str]) -> np.ndarray:
    """A column as numbers, or as text."""
    try:
        return np.array(entries, float)
    except ValueError:
        return np.array(entries)


def _numbers(
    path: Path, name: str, entries: list[str], lines: list[int], above: float, most: float, what: str
) -> np.ndarray:
    """A column as numbers; each must be above one bound and at most another."""
    values = _values(entries)
    if values.dtype.kind != "f":
        values = np.array([_number(entry) for entry in entries])
    wrong = np.flatnonzero(~((values > above) & (values <= most)))
    if len(wrong):
        key, problem = f"line {lines[wrong[0]]}, {name}", f"is {entries[wrong[0]][:40]!r}"
        raise InputError(str(path), key, problem, f"give {what}, at most {most:g}")
    return values


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return np.nan


def _groups(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of columns [columns, rows]: the first row of each distinct one, each row's number of its kind, and how
    many rows each kind has."""
    if not len(codes):
        codes = np.arange(codes.shape[1])[None]
    _, first, groups, counts = np.unique(
        codes, axis=1, return_index=True, return_inverse=True, return_counts=True
    )
    return first, groups.reshape(-1), counts


def _check_repeats(path: Path, codes: np.ndarray, milliseconds: np.ndarray, lines: list[int]) -> None:
    """Refuse rows that are alike and whose times contradict each other."""
    _, groups, counts = _groups(codes)
    repeated: Iterable[int] = np.flatnonzero(counts > 1)
    for group in repeated:
        rows = np.flatnonzero(groups == group)
        low, high = rows[milliseconds[rows].argmin()], rows[milliseconds[rows].argmax()]
        if disagree(milliseconds[low] / 1e3, milliseconds[high] / 1e3):
            a, b = sorted((low, high))
            problem = f"the same inputs took {milliseconds[a]:g} and {milliseconds[b]:g} ms"
            remedy = "measure again, and leave the wrong row out"
            raise InputError(str(path), f"lines {lines[a]} and {lines[b]}", problem, remedy)
