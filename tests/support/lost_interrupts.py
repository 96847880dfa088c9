"""Ctrl-C at a moment when Python drops the KeyboardInterrupt."""

from __future__ import annotations

import signal


class _Interrupted:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def press_ctrl_c_in_vain() -> None:
    """Its KeyboardInterrupt is raised in a __del__, from which nothing is raised. Python tells
    sys.unraisablehook, and pytest warns about that."""
    _Interrupted()
