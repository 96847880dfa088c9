"""The log format of all processes: time, level, process, and the request that a line is about.

What a line is about is given as `extra=about(...)`; `request_id` is the one that the client knows, `attempt`
the one between front end and workers, which changes when a request is resumed.

Similar warnings and errors are limited, so that bad input cannot fill the log, and control characters are
escaped, so that no line can control a terminal.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from cost_model.printable import one_line, printable, printable_json

FORMATS = ("text", "json")
FORMAT_VARIABLE, LEVEL_VARIABLE = "HEXGEN2_LOG_FORMAT", "HEXGEN2_LOG"
ABOUT = ("replica", "request_id", "attempt")
EACH = "each"
"""Key in the `extra` of a line that is always written, however many are like it."""
ALIKE, WINDOW_S = 10, 10.0
"""Of similar lines, the first ALIKE within WINDOW_S seconds are written."""
KINDS = 64
"""Kinds of lines that are counted separately at a time; all others count as one more kind."""
_TEMPLATE_CHARACTERS = 200


def about(request_id: str = "", attempt: str = "", replica: str = "") -> dict[str, str]:
    """What a line is about."""
    return {"request_id": request_id, "attempt": attempt, "replica": replica}


class _Lines(logging.Formatter):
    """One event a line. The process names itself, and the replica that it belongs to."""

    def __init__(self, form: str, process: str, replica: str) -> None:
        super().__init__()
        self._json, self._process, self._replica = form == "json", process, replica

    def format(self, record: logging.LogRecord) -> str:
        fields = {"time": _time(record), "level": record.levelname, "process": self._process}
        subjects = {key: getattr(record, key, "") for key in ABOUT}
        subjects["replica"] = subjects["replica"] or self._replica
        subjects = {key: value for key, value in subjects.items() if value}
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        if self._json:
            return printable_json(
                json.dumps({**fields, **subjects, "logger": record.name, "message": message})
            )
        shown = " ".join(f"{key}={one_line(value)}" for key, value in subjects.items())
        message = printable(message).replace("\n", "\n  ")
        return " ".join([*fields.values(), f"{record.name}:", message, shown]).rstrip()


def _time(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03d}Z"


_Kind = tuple[str, int, str]
"""Logger, level and template of a line."""


@dataclass
class _Window:
    """Lines of one kind since the first of them, and how many of these were held back."""

    ends_s: float
    lines: int = 0
    held_back: int = 0


def _in_background(seconds: float, function: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()


class LimitedHandler(logging.StreamHandler):
    """Writes all lines below WARNING, and of others at most ALIKE of a kind within WINDOW_S, but for those
    with EACH set in their `extra`. When that time is over, one line says how many more there were.

    Parameters
    ----------
    clock : seconds
    later : calls a function after so many seconds, on any thread
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], None] = _in_background,
    ) -> None:
        super().__init__(stream)
        self._clock, self._later = clock, later
        self._windows: OrderedDict[_Kind, _Window] = OrderedDict()  # the one that ends first comes first
        self._will_settle = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line or count it. `handle` has the lock."""
        self._settle(self._clock())
        if record.levelno < logging.WARNING or getattr(record, EACH, False):
            super().emit(record)
            return
        window = self._window_of(record)
        window.lines += 1
        if window.lines <= ALIKE:
            super().emit(record)
            return
        window.held_back += 1
        self._settle_later()

    def close(self) -> None:
        """Say of all that was held back how much it was."""
        with self._locked():
            self._settle(float("inf"))
        super().close()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def _window_of(self, record: logging.LogRecord) -> _Window:
        kind = (record.name, record.levelno, str(record.msg)[:_TEMPLATE_CHARACTERS])
        if kind not in self._windows and len(self._windows) >= KINDS:
            kind = (__name__, logging.WARNING, "lines of many kinds")
        return self._windows.setdefault(kind, _Window(self._clock() + WINDOW_S))

    def _settle(self, now_s: float) -> None:
        """End the windows whose time is over."""
        while self._windows and next(iter(self._windows.values())).ends_s <= now_s:
            (logger, level, template), window = self._windows.popitem(last=False)
            if window.held_back:
                text = f"... and {window.held_back} more like it within {WINDOW_S:g} s: {template}"
                super().emit(logging.LogRecord(logger, level, "", 0, text, None, None))

    def _settle_later(self) -> None:
        """See to it that what is held back is said even if nothing else is logged; one timer at a time."""
        if self._will_settle:
            return
        self._will_settle = True
        first = next(window for window in self._windows.values() if window.held_back)
        self._later(max(0.0, first.ends_s - self._clock()), self._time_is_over)

    def _time_is_over(self) -> None:
        with self._locked():
            self._will_settle = False
            self._settle(self._clock())
            if any(window.held_back for window in self._windows.values()):
                self._settle_later()


def set_up(process: str, replica: str = "") -> None:
    """Log to stderr in the form and from the level that the environment names (default: text, WARNING)."""
    handler = LimitedHandler()
    handler.setFormatter(_Lines(os.environ.get(FORMAT_VARIABLE, FORMATS[0]), process, replica))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(os.environ.get(LEVEL_VARIABLE, "WARNING").upper())
