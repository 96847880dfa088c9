"""The installed command line, in a process of its own, as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HEXGEN2 = str(Path(sys.executable).with_name("hexgen2"))


def hexgen2(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HEXGEN2, *arguments], capture_output=True, text=True, timeout=120)


def refused(result: subprocess.CompletedProcess[str], code: int = 2) -> str:
    """The one line of an error; nothing on stdout, no traceback."""
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("hexgen2: ")
    return lines[0]
