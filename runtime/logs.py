"""Logs of all processes in one form: who, when, how bad, and about which request.

What a line is about is given as `extra=about(...)`; `request_id` is the one that the client knows, `attempt`
the one between front end and workers, which changes when a request is resumed.
"""

from __future__ import annotations

import json
import logging
import os
import time

FORMATS = ("text", "json")
FORMAT_VARIABLE, LEVEL_VARIABLE = "HEXGEN2_LOG_FORMAT", "HEXGEN2_LOG"
ABOUT = ("replica", "request_id", "attempt")


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
            return json.dumps({**fields, **subjects, "logger": record.name, "message": message})
        shown = " ".join(f"{key}={value}" for key, value in subjects.items())
        return " ".join([*fields.values(), f"{record.name}:", message.replace("\n", "\n  "), shown]).rstrip()


def _time(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03d}Z"


def set_up(process: str, replica: str = "") -> None:
    """Log to stderr in the form and from the level that the environment names (default: text, WARNING)."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines(os.environ.get(FORMAT_VARIABLE, FORMATS[0]), process, replica))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(os.environ.get(LEVEL_VARIABLE, "WARNING").upper())
