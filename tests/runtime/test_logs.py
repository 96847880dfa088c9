"""Log lines are safe for a terminal, and repeated ones are limited."""

from __future__ import annotations

import io
import json
import logging

import pytest

from runtime.logs import ALIKE, KINDS, WINDOW_S, LimitedHandler, _Lines, about


class Log:
    """A logger with a handler whose clock and timer the test controls."""

    def __init__(self, form: str = "text") -> None:
        self.now_s, self.due = 0.0, []
        self.stream = io.StringIO()
        self.handler = LimitedHandler(self.stream, lambda: self.now_s, lambda *call: self.due.append(call))
        self.handler.setFormatter(_Lines(form, "front end", ""))
        self.logger = logging.Logger("hexgen2.test", logging.DEBUG)
        self.logger.addHandler(self.handler)

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


@pytest.fixture
def log() -> Log:
    return Log()


def test_warnings_that_are_alike_are_limited_and_counted_when_the_next_comes(log):
    for number in range(ALIKE + 123):
        log.logger.warning("garbage from %s", number)
    assert len(log.lines) == ALIKE
    log.now_s = WINDOW_S
    log.logger.warning("garbage from %s", "another")
    counted, shown = log.lines[ALIKE:]
    assert "WARNING front end hexgen2.test: ... and 123 more like it within 10 s: garbage from %s" in counted
    assert "garbage from another" in shown


def test_a_timer_says_how_many_there_were_where_nothing_follows(log):
    for number in range(ALIKE + 3):
        log.now_s = 1.0 + number / 100
        log.logger.error("no %s", number)
    ((seconds, fire),) = log.due  # one timer for any number of lines
    assert log.now_s + seconds == pytest.approx(1.0 + WINDOW_S, abs=0.1)
    log.now_s += seconds
    fire()
    assert "ERROR" in log.lines[-1] and "... and 3 more like it" in log.lines[-1]
    assert len(log.lines) == ALIKE + 1 and len(log.due) == 1


def test_the_timer_is_set_again_for_what_ends_later(log):
    for _ in range(ALIKE + 1):
        log.logger.warning("first")
    log.now_s = 5.0
    for _ in range(ALIKE + 2):
        log.logger.warning("second")
    log.now_s = WINDOW_S
    log.due.pop()[1]()
    assert "1 more like it" in log.lines[-1]
    seconds, fire = log.due.pop()
    log.now_s += seconds
    fire()
    assert "2 more like it" in log.lines[-1] and "second" in log.lines[-1] and not log.due


def test_other_lines_are_not_held_back(log):
    for _ in range(ALIKE + 5):
        log.logger.warning("this")
    log.logger.warning("that")
    log.logger.error("this")
    assert len(log.lines) == ALIKE + 2


def test_what_an_operator_asked_for_is_unlimited(log):
    for _ in range(50):
        log.logger.info("a request")
        log.logger.debug("a step")
    assert len(log.lines) == 100


def test_texts_that_all_differ_are_limited_together(log):
    for number in range(10 * KINDS):
        log.logger.warning(f"garbage {number}")
    assert len(log.lines) == KINDS + ALIKE
    assert len(log.handler._windows) == KINDS + 1
    log.now_s = WINDOW_S
    log.logger.info("later")
    assert f"... and {9 * KINDS - ALIKE} more like it" in log.lines[-2] and not log.handler._windows


def test_closing_says_what_was_held_back(log):
    for _ in range(ALIKE + 4):
        log.logger.warning("this")
    log.handler.close()
    assert "... and 4 more like it" in log.lines[-1]


HOSTILE = "a\x1b[2Jb\x9bc\x7f\u202ed\u2028e"


def test_a_line_cannot_steer_a_terminal(log):
    log.logger.warning("peer %s", HOSTILE, extra=about(request_id="r\n2026 ERROR forged \x1b]0;t\x07"))
    (line,) = log.lines
    assert r"peer a\x1b[2Jb\x9bc\x7f\u202ed\u2028e request_id=r 2026 ERROR forged \x1b]0;t\x07" in line
    assert line.isprintable()


def test_a_stack_trace_stays_several_lines(log):
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        log.logger.exception("it failed")
    first, *trace = log.lines
    assert "it failed" in first and len(trace) >= 3
    assert all(line.startswith("  ") and line.isprintable() for line in trace)


def test_json_lines_hold_the_text_itself():
    log = Log("json")
    log.logger.warning("peer %s", HOSTILE)
    (line,) = log.lines
    assert line.isprintable() and json.loads(line)["message"] == f"peer {HOSTILE}"
