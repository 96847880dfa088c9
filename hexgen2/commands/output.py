"""Files that commands write: whole at the end, or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from cost_model.errors import InputError


def check_folder(path: Path | None) -> None:
    """Complain early about an output file (None: none) whose folder is missing.

    Raises
    ------
    InputError
    """
    if path is not None and not path.absolute().parent.is_dir():
        raise InputError(str(path), "", "its folder does not exist", "create it first")


@contextmanager
def written(path: Path | None) -> Iterator[TextIO | None]:
    """A file to write that appears whole at the end, or not at all; None for no file.

    Raises
    ------
    InputError : it cannot be written
    """
    if path is None:
        yield None
        return
    try:
        handle, temporary = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    except OSError as error:
        raise InputError(
            str(path), "", f"cannot be written ({error.strerror})", "choose a writable path"
        ) from error
    try:
        with os.fdopen(handle, "w", newline="") as stream:
            yield stream
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write(path: Path | None, text: str) -> None:
    """Write a text; nothing for no file. Raises InputError as `written` does."""
    with written(path) as stream:
        if stream is not None:
            stream.write(text)
