"""Work in another process, on another core, while this one goes on.

A forked process has all that this one knows, so that nothing has to be passed but the result. The answer is
the same wherever the work is done: where no process can be forked, or no core is free, it is done here once
its result is asked for.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

T = TypeVar("T")

POLL_S = 0.02
"""Seconds after which somebody who waits looks at the clock."""

Report = Callable[[Any], None]
"""Takes what the work has found so far, in case that it is not let to its end."""


class _Running:
    """How many processes work in the background, and whether this is one of them."""

    count = 0
    here = False


def free_cores() -> int:
    """Cores on which more work could run at once: none in a process that works in the background itself."""
    if _Running.here or not sys.platform.startswith("linux") or threading.active_count() > 1:
        return 0
    if current_process().daemon:  # A worker of a pool, for example: it may have no processes of its own.
        return 0
    return max(0, len(os.sched_getaffinity(0)) - 1 - _Running.count)


class Background(Generic[T]):
    """A function that runs in the background, if a core is free when it is made, or asked to begin.

    Parameters
    ----------
    work : given a function that takes what is found so far; that and the result must be picklable
    """

    def __init__(self, work: Callable[[Report], T]) -> None:
        self._work, self._latest = work, None
        self._error: Exception | None = None
        self._results: Connection | None = None
        self._found: list[T] = []
        self.begin()

    def begin(self) -> None:
        """Begin, if a core is free by now."""
        if self._results is not None or self._found or free_cores() < 1:
            return
        context = get_context("fork")
        self._results, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(self._work, theirs), daemon=True)
        self._process.start()
        theirs.close()
        _Running.count += 1

    @property
    def elsewhere(self) -> bool:
        """Whether another process does the work, or did."""
        return self._results is not None

    def result(self) -> T:
        """What the work gives, once it is done.

        Raises
        ------
        Exception : what the work raised
        RuntimeError : its process died
        """
        self.wait()
        return self._found[0]

    @property
    def done(self) -> bool:
        """Whether the result is there."""
        return bool(self._found)

    def wait(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Wait until the work is done, or, if another process does it, until it is time to stop; then it is
        cancelled. Errors are those of `result`."""
        if self._error is not None:
            raise self._error
        if self._results is None and not self._found:
            self._found.append(self._work(self._keep))
        if self._results is None or self._results.closed:
            return
        try:
            while not (self._found or stop()):
                if self._results.poll(POLL_S):
                    self._receive()
        finally:
            self.cancel()

    def first_report(self, stop: Callable[[], bool] = lambda: False) -> Any:
        """What the work reports first, waiting for it; None if it ends without, or if it is time to stop.
        Errors are those of `result`."""
        while self.latest() is None and not (self.done or stop()):
            if self._results is None or self._results.closed:
                break
            self._results.poll(POLL_S)
        return self._latest

    def latest(self) -> Any:
        """What the work has reported last; None if nothing. Errors are those of `result`: who looks again and
        again would wait for ever for work that has failed."""
        self._drain()
        if self._error is not None:
            raise self._error
        return self._latest

    def _drain(self) -> None:
        """Take what has come; an error is kept."""
        while self._results is not None and not self._results.closed and not self._error:
            if self._found or not self._results.poll():
                break
            with contextlib.suppress(Exception):
                self._receive()

    def _receive(self) -> None:
        """Take the next thing that the process sends; raises the error, if it is one."""
        assert self._results is not None
        try:
            kind, value = self._results.recv()
        except EOFError:
            kind, value = "error", RuntimeError("a process that searched in the background died")
        if kind == "report":
            self._latest = value
        elif kind == "result":
            self._found.append(value)
        else:
            self._error = value
            raise value

    def cancel(self) -> None:
        """End the work if it is still under way."""
        if self._results is None or self._results.closed:
            return
        self._drain()  # It may have ended just when nobody wanted to wait any more.
        self._results.close()
        self._process.kill()
        self._process.join()
        self._process.close()
        _Running.count -= 1

    def _keep(self, found: Any) -> None:
        self._latest = found


def gather(works: Sequence[Background[Any]], stop: Callable[[], bool] = lambda: False) -> None:
    """Let all of them end: while some run elsewhere, do here what no core was free for. Once it is time to
    stop, those that are not done are left so. Errors are those of Background.result."""
    for work in works:
        work.begin()
        if not (work.elsewhere or stop()):
            work.wait()
    for work in works:
        if work.elsewhere:
            work.wait(stop)


class Ahead(Generic[T]):
    """Works whose results are asked for in order, or skipped: while one is waited for, those after it begin,
    as far as cores are free. To be closed in the end.

    Parameters
    ----------
    works : each looks at the clock by itself
    stop : whether to wait no longer for other processes, which know nothing of Ctrl-C
    """

    def __init__(self, works: Sequence[Callable[[], T]], stop: Callable[[], bool] = lambda: False) -> None:
        self._works, self._stop = works, stop
        self._begun: dict[int, Background[T]] = {}

    def result(self, number: int) -> T:
        """The result of one of the works; errors are those of Background.result."""
        for k in range(number + 1, len(self._works)):
            if free_cores() < 1:
                break
            if k not in self._begun:
                self._begun[k] = Background(partial(_without_reports, self._works[k]))
        known = self._begun.get(number)
        if known is not None:
            known.wait(self._stop)
        return known.result() if known is not None and known.done else self._works[number]()

    def __enter__(self) -> Ahead[T]:
        return self

    def __exit__(self, *error: object) -> None:
        for each in self._begun.values():
            each.cancel()


def _without_reports(work: Callable[[], T], report: Report) -> T:
    return work()


def _run(work: Callable[[Report], T], results: Connection) -> None:
    """The whole life of a process in the background. Ctrl-C goes to all processes of a terminal; the one that
    waits for this one decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _Running.here = True
    message: tuple[str, object]
    try:
        message = "result", work(lambda found: results.send(("report", found)))
    except Exception as error:
        message = "error", error
    try:
        results.send(message)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        results.send(("error", RuntimeError(f"a result of the background cannot be sent: {error}")))
    except BrokenPipeError:  # Nobody waits any more.
        pass
