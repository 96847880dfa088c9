"""When a search stops: at a time limit, on Ctrl-C, after an effort, or once the result is good enough."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import FrameType

INTERRUPTED = "interrupted"
GRACE_S = 0.3
"""Seconds after the time limit within which a first answer may still be found."""


class _CtrlC:
    """Whether Ctrl-C was pressed since `ctrl_c_ends_searches` began, and whether that is only noted."""

    pressed = noted = False


@contextlib.contextmanager
def ctrl_c_ends_searches() -> Iterator[None]:
    """Within this, Ctrl-C ends every search, even if its KeyboardInterrupt is lost.

    Python drops an exception that is raised in a __del__ or in a callback of a C library. So the handler
    also sets a mark, which every Stopping looks at. Does nothing where Ctrl-C is ignored (as in a background
    job of a shell), has another handler, or outside of the main thread, where no handler can be set.
    """
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    _CtrlC.pressed = False
    signal.signal(signal.SIGINT, _on_ctrl_c)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _CtrlC.pressed = False


@contextlib.contextmanager
def ctrl_c_is_noted() -> Iterator[None]:
    """Within this, the first Ctrl-C raises nothing, so that nothing is lost: what looks at a Stopping ends as
    if time were over. A second one raises KeyboardInterrupt."""
    _CtrlC.noted = True
    try:
        yield
    finally:
        _CtrlC.noted = False


def _on_ctrl_c(number: int, frame: FrameType | None) -> None:
    first, _CtrlC.pressed = not _CtrlC.pressed, True
    if not (first and _CtrlC.noted):
        raise KeyboardInterrupt


@dataclass
class Stopping:
    """The one clock of a search and its limits.

    Attributes
    ----------
    time_limit_s : seconds from the start
    effort_limit : effort (see Params) at which the search ends
    stale_effort : effort without an improvement after which it ends
    close_gap : gap to the upper bound that is good enough
    target_req_s : throughput that is good enough, requests/s
    cut : why the search ended before it was done, if it did; then the same seed may give another placement
    hurried : whether a part of the search ended early, to leave time to others
    """

    time_limit_s: float | None = None
    effort_limit: float = math.inf
    stale_effort: float = math.inf
    close_gap: float = 0.0
    target_req_s: float = math.inf
    cut: str | None = None
    hurried: bool = False
    _started_s: float = field(default_factory=lambda: time.monotonic())

    def again(self) -> Stopping:
        """For a search within this one: the same clock and time limit, nothing else."""
        return Stopping(self.time_limit_s, _started_s=self._started_s)

    def of_which(self, kept: float) -> Stopping:
        """For the part of this search that leaves a share of the time limit to what follows."""
        limit_s = self.time_limit_s
        return Stopping(None if limit_s is None else limit_s * (1 - kept), _started_s=self._started_s)

    def of_what_is_left(self, share: float) -> Stopping:
        """For a part that begins now, by a clock of its own, and may take this share of the time left."""
        left_s = self.time_left_s
        return Stopping(None if left_s is None else share * left_s)

    def only_until(self, share: float) -> Stopping:
        """All the same, but until this share of the time limit."""
        limit_s = self.time_limit_s
        return replace(self, time_limit_s=None if limit_s is None else limit_s * share)

    def after(self, part: Stopping) -> None:
        """Take over how such a part ended: Ctrl-C ends the whole, a shorter time limit does not."""
        self.hurried = self.hurried or part.hurried or part.cut is not None
        if part.cut == INTERRUPTED:
            self.interrupt()

    @property
    def cut_anywhere(self) -> str | None:
        """Why the whole or a part of it ended before it was done."""
        return self.cut or ("time limit" if self.hurried else None)

    def with_target(self, req_s: float = math.inf) -> Stopping:
        """The same limits with another target."""
        return replace(self, target_req_s=req_s)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_s

    @property
    def time_left_s(self) -> float | None:
        """Seconds until the time limit, if there is one."""
        return None if self.time_limit_s is None else max(0.0, self.time_limit_s - self.elapsed_s)

    @property
    def spent_share(self) -> float:
        """The share of the time limit that has passed; 0 if there is none."""
        return min(1.0, self.elapsed_s / self.time_limit_s) if self.time_limit_s else 0.0

    def out_of_time(self) -> bool:
        """Whether the time limit has passed or the search was cut otherwise."""
        if self.time_limit_s is not None and self.elapsed_s > self.time_limit_s:
            self.cut = "time limit"
        return self._cut_short()

    def too_late(self) -> bool:
        """Whether even a first answer would come too late, or the search was cut otherwise."""
        over = self.time_limit_s is not None and self.elapsed_s > self.time_limit_s + GRACE_S
        return (over and self.out_of_time()) or _CtrlC.pressed

    def spent(self, share: float) -> bool:
        """Whether this share of the time limit has passed, or the search was cut."""
        if self.time_limit_s is not None and self.elapsed_s > share * self.time_limit_s:
            self.hurried = True
            return True
        return self._cut_short()

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.cut = INTERRUPTED

    def raise_if_interrupted(self) -> None:
        """For a search that has found nothing: raise KeyboardInterrupt if Ctrl-C is what ended it."""
        if self.cut == INTERRUPTED:
            raise KeyboardInterrupt

    def _cut_short(self) -> bool:
        if _CtrlC.pressed:
            self.interrupt()
        return self.cut is not None
