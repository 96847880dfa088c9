"""Reads request traces: arrival times and lengths, from Azure CSV, Mooncake JSONL or ShareGPT JSON."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from cost_model.errors import InputError
from cost_model.fields import checked_name
from cost_model.files import read_text
from hexgen2.workload.lengths import MAX_TOKENS
from hexgen2.workload.requests import Requests

MAX_BYTES = 2 << 30
_LATEST = 1e18  # seconds or milliseconds; large enough for Unix time in nanoseconds
_CHARACTERS_PER_TOKEN = 4  # typical of English text with byte-pair tokenizers


_Row = tuple[float, int, int]


def read_trace(path: Path) -> Requests:
    """Read a trace. The format is detected from the content, not from the file name.

    Known formats: Azure CSV (`TIMESTAMP,ContextTokens,GeneratedTokens`), Mooncake JSONL (`timestamp` in
    milliseconds, `input_length`, `output_length`) and ShareGPT JSON (`conversations`; no arrival times, and
    lengths estimated at four characters per token, as `source` notes). Requests are sorted by time, and the
    first one arrives at 0.

    Raises
    ------
    InputError : names the line (for ShareGPT, the entry) that is wrong
    """
    file = str(path)
    checked_name(path.name, file)
    text = read_text(path, MAX_BYTES)
    start = text.lstrip()[:1]
    note = ""
    if not start:
        raise InputError(file, "", "is empty", "give a trace with at least one request")
    if start == "[":
        rows = list(_sharegpt(text, file))
        note = f", lengths estimated at {_CHARACTERS_PER_TOKEN} characters per token, no arrival times"
    elif start == "{":
        rows = list(_mooncake(text, file))
    else:
        rows = list(_azure(text, file))
    if not rows:
        raise InputError(file, "", "has no requests", "give a trace with at least one request")
    arrival_s, isl, osl = (np.array(column) for column in zip(*rows, strict=True))
    order = np.argsort(arrival_s, kind="stable")
    arrival_s = arrival_s[order].astype(float)
    return Requests(arrival_s - arrival_s[0], isl[order], osl[order], f"trace {path.name}{note}")


def _azure(text: str, file: str) -> Iterator[_Row]:
    columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    lines = csv.reader(io.StringIO(text, newline=""))
    try:
        header = [name.strip().lower() for name in next(lines, [])]
        for column in columns:
            if column.lower() not in header:
                problem = f"there is no column {column}"
                raise InputError(file, "line 1", problem, f"give a CSV with {', '.join(columns)}")
        at = [header.index(column.lower()) for column in columns]
        for cells in lines:
            if not any(map(str.strip, cells)):
                continue
            where = f"line {lines.line_num}"
            if len(cells) <= max(at):
                raise InputError(file, where, f"has {len(cells)} columns", f"it needs {len(header)}")
            time, isl, osl = [cells[i].strip() for i in at]
            yield (
                _seconds(time, file, where),
                _tokens(isl, "ContextTokens", file, where),
                _tokens(osl, "GeneratedTokens", file, where),
            )
    except csv.Error as error:
        raise InputError(file, f"line {lines.line_num}", str(error), "correct the CSV") from None


def _mooncake(text: str, file: str) -> Iterator[_Row]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"line {number}"
        entry = _json(line, file, where)
        if not isinstance(entry, dict):
            raise InputError(file, where, "is not a JSON object", "give one request per line")
        for key in ("timestamp", "input_length", "output_length"):
            if key not in entry:
                raise InputError(file, where, f"there is no {key}", "give it for every request")
        milliseconds = _number(entry["timestamp"], "timestamp", file, where, _LATEST)
        isl, osl = (_tokens(entry[key], key, file, where) for key in ("input_length", "output_length"))
        yield milliseconds / 1e3, isl, osl


def _sharegpt(text: str, file: str) -> Iterator[_Row]:
    """Each answer in a conversation is a request; its prompt is everything said before."""
    entries = _json(text, file, "")
    for index, entry in enumerate(entries):
        where = f"[{index}].conversations"
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(turns, list):
            remedy = "give a list of objects with conversations, as ShareGPT has"
            raise InputError(file, where, "is missing or not a list", remedy)
        said = 0
        for position, turn in enumerate(turns):
            value = turn.get("value") if isinstance(turn, dict) else None
            if not isinstance(value, str):
                raise InputError(
                    file, f"{where}[{position}].value", "is not text", "give the text of the turn"
                )
            if turn.get("from") in {"gpt", "assistant", "chatgpt", "bard", "bing"} and said and value.strip():
                yield 0.0, max(1, round(said / _CHARACTERS_PER_TOKEN)), _estimate(value)
            said += len(value)


def _estimate(text: str) -> int:
    return max(1, round(len(text) / _CHARACTERS_PER_TOKEN))


def _json(text: str, file: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = where or f"line {error.lineno}"
        raise InputError(file, line, f"is not JSON ({error.msg})", "correct it") from None
    except (RecursionError, ValueError):
        raise InputError(file, where, "is not a trace", "use shorter numbers and less nesting") from None


def _seconds(text: str, file: str, where: str) -> float:
    """Seconds from a date and time (UTC unless it has an offset) or from a plain number."""
    try:
        value = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text)
            value = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            value = math.nan
    if not abs(value) <= _LATEST:
        remedy = "write 2023-11-16 18:15:46.68 or seconds"
        raise InputError(file, where, f"TIMESTAMP {text[:40]!r} is not a time", remedy)
    return value


def _number(value: Any, name: str, file: str, where: str, most: float = sys.float_info.max) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= most:
        remedy = f"give a number up to {most:g}"
        raise InputError(file, where, f"{name} {str(value)[:40]!r} is not a number", remedy)
    return number


def _tokens(value: Any, name: str, file: str, where: str) -> int:
    number = _number(value, name, file, where)
    if number != int(number) or not 1 <= number <= MAX_TOKENS:
        remedy = f"give whole tokens from 1 to {MAX_TOKENS}"
        raise InputError(file, where, f"{name} is {number:g}", remedy)
    return int(number)
