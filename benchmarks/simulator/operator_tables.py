"""Measured operator times: tables of AIConfigurator as CSV files, one per GPU and operator."""

from __future__ import annotations

import csv
import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cost_model.errors import InputError

GPUS = ("A100-80GB", "B200", "H100", "H200", "L40S")


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


def read_table(path: Path) -> OperatorTable:
    """The table in a .csv.gz file with a column latency_ms.

    Raises
    ------
    InputError : unreadable, or without that column
    """
    try:
        with gzip.open(path, "rt", newline="") as file:
            header, *rows = csv.reader(file)
    except (OSError, EOFError, ValueError, csv.Error) as error:
        raise InputError(
            str(path), "", f"cannot be read ({error})", "give a folder of .csv.gz files"
        ) from None
    if "latency_ms" not in header:
        raise InputError(str(path), "latency_ms", "is missing", "name the column of times so")
    ignored = {"latency_ms", "kernel_source"}
    texts = {name: [row[k] for row in rows] for k, name in enumerate(header)}
    milliseconds = np.array(texts["latency_ms"], float)
    columns = {name: _values(entries) for name, entries in texts.items()}
    codes = [np.unique(columns[name], return_inverse=True)[1] for name in header if name not in ignored]
    _, first, groups, counts = np.unique(
        np.stack(codes), axis=1, return_index=True, return_inverse=True, return_counts=True
    )
    groups = groups.reshape(-1)
    seconds = milliseconds[first] / 1e3
    for group in np.flatnonzero(counts > 1):
        seconds[group] = np.median(milliseconds[groups == group]) / 1e3
    return OperatorTable({name: values[first] for name, values in columns.items()}, seconds)


def _values(entries: list[str]) -> np.ndarray:
    """A column as numbers, or as text."""
    try:
        return np.array(entries, float)
    except ValueError:
        return np.array(entries)
