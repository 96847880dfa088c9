"""The digest of a checkpoint, by which head and nodes check that they hold the same model."""

from __future__ import annotations

import hashlib
from pathlib import Path

from cost_model.errors import InputError

WHOLE = ("*.json", "*.jinja", "*.model", "*.txt")
WEIGHTS = "*.safetensors"
LONGEST_HEADER_BYTES = 100_000_000  # the format's own limit


def checkpoint_digest(folder: Path) -> str:
    """SHA-256 over the checkpoint's small files and the size and header of each weight file.

    The headers hold the names, shapes, types and offsets of all tensors. The values are not read, which keeps
    this fast.

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
    """The size of a safetensors file and its header: 8 bytes of length, then that many bytes of JSON."""
    with path.open("rb") as file:
        head = file.read(8)
        length = min(int.from_bytes(head, "little"), LONGEST_HEADER_BYTES)
        return path.stat().st_size.to_bytes(8, "little") + head + file.read(length)


def _add(digest: hashlib._Hash, path: Path, content: bytes) -> None:
    name = path.name.encode()
    digest.update(len(name).to_bytes(8, "little") + name + len(content).to_bytes(8, "little") + content)
