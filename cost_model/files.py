"""Reading and writing the user's text files, with one-line errors."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from cost_model.errors import InputError


def read_text(path: Path, max_bytes: int) -> str:
    """The text of a UTF-8 file of at most `max_bytes`.

    Raises
    ------
    InputError : missing, a directory, unreadable, too large, not UTF-8
    """
    source = str(path)
    try:
        with open(path, "rb") as file:
            raw = file.read(max_bytes + 1)
    except IsADirectoryError:
        raise InputError(source, "", "is a directory", "name a file inside it") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(source, "", f"cannot be read ({reason})", "check the path") from None
    if len(raw) > max_bytes:
        raise InputError(source, "", f"is larger than {max_bytes} bytes", "give a smaller file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(source, f"byte {error.start}", "is not UTF-8 text", "save it as UTF-8") from None


@contextmanager
def written(path: Path) -> Iterator[TextIO]:
    """Open a text file for writing: it appears complete at the end, or not at all.

    Raises
    ------
    InputError : its folder is missing or cannot be written to
    """
    try:
        handle, temporary = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise InputError(str(path), "", problem, "choose a writable path") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as stream:
            yield stream
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file, completely or not at all. Raises InputError as `written` does."""
    with written(path) as stream:
        stream.write(text)
