"""A checkpoint's digest: two machines that have the same are taken to hold the same model."""

from __future__ import annotations

import hashlib
from pathlib import Path

from cost_model.errors import InputError

WHOLE = ("*.json", "*.jinja", "*.model", "*.txt")
WEIGHTS = "*.safetensors"
LONGEST_HEADER_BYTES = 100_000_000  # the format's own limit


def checkpoint_digest(folder: Path) -> str:
    """SHA-256 over the checkpoint's small files and, of each file of weights, its size and header: the names,
    shapes, types and places of its tensors. Their values are not read, so that it takes no time.

    Raises
    ------
    InputError : the folder or a file in it cannot be read
    """
    digest = hashlib.sha256()
    try:
        if not folder.is_dir():
            raise NotADirectoryError("it is not a folder")
        for path in sorted({path for pattern in WHOLE for path in folder.glob(pattern)}):
            _add(digest, path, path.read_bytes())
        for path in sorted(folder.glob(WEIGHTS)):
            _add(digest, path, _header(path))
    except OSError as error:
        problem = f"the checkpoint {folder} cannot be read ({error.strerror or error})"
        raise InputError("--model-path", "", problem, "give the folder of the model") from error
    return digest.hexdigest()


def _header(path: Path) -> bytes:
    """The beginning of a safetensors file (8 bytes of length, then that much JSON), and the file's size."""
    with path.open("rb") as file:
        head = file.read(8)
        length = min(int.from_bytes(head, "little"), LONGEST_HEADER_BYTES)
        return path.stat().st_size.to_bytes(8, "little") + head + file.read(length)


def _add(digest: hashlib._Hash, path: Path, content: bytes) -> None:
    name = path.name.encode()
    digest.update(len(name).to_bytes(8, "little") + name + len(content).to_bytes(8, "little") + content)
