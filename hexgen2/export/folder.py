"""Writes a folder atomically: it appears complete, or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from cost_model.errors import InputError


def write_folder(folder: Path, files: Mapping[str, str], force: bool) -> None:
    """Write files (name -> text) into a new folder. Texts that begin with "#!" become executable.

    Parameters
    ----------
    force : replace a folder that is not empty

    Raises
    ------
    InputError : the folder is not empty, is a file, or cannot be written
    """
    occupied = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if occupied and not (force and folder.is_dir()):
        problem = "is not empty" if folder.is_dir() else "is a file"
        raise InputError(str(folder), "", problem, "choose another -o, or replace it with --force")
    parent = folder.absolute().parent
    try:
        temporary = Path(tempfile.mkdtemp(dir=parent, prefix=f".{folder.name}."))
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise InputError(str(folder), "", problem, "choose a writable path") from error
    try:
        for name, text in files.items():
            (temporary / name).write_text(text, encoding="utf-8")
            os.chmod(temporary / name, 0o755 if text.startswith("#!") else 0o644)
        os.chmod(temporary, 0o755)
        if folder.exists():
            before = temporary.with_name(temporary.name + ".before")
            os.rename(folder, before)
            os.rename(temporary, folder)
            shutil.rmtree(before)
        else:
            os.rename(temporary, folder)
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise InputError(str(folder), "", problem, "choose a writable path") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
