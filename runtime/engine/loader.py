"""Checkpoints: a config.json and safetensors files, of which each worker reads only its slices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from cost_model.errors import InputError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_REMEDY = "download the checkpoint again"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class CheckpointConfig:
    """The values of a checkpoint's config.json, checked as they are read."""

    def __init__(self, source: str, values: dict[str, Any]) -> None:
        self.source = source
        self.values = values

    @classmethod
    def load(cls, folder: str) -> CheckpointConfig:
        path = Path(folder, "config.json")
        values = _read_json(path, "name a folder with a Hugging Face checkpoint")
        return cls(str(path), values)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.error(key, f"is {value!r}, not a positive whole number", _REMEDY)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """A value; the default also where the file says null."""
        value = self.values.get(key)
        return default if value is None else value

    def require(self, key: str, expected: Any, default: Any) -> None:
        """Refuse a variant of the model that the engine doesn't compute."""
        if (value := self.get(key, default)) != expected:
            raise self.error(
                key, f"is {value!r}, the engine supports {expected!r}", "choose another checkpoint"
            )

    def error(self, key: str, problem: str, remedy: str) -> InputError:
        return InputError(self.source, key, problem, remedy)


class Checkpoint:
    """Tensors of a checkpoint by name, read in slices, converted to one type on one device.

    Parameters
    ----------
    folder : with model.safetensors, or model.safetensors.index.json and its shards
    dtype : "float32", "float16", "bfloat16", or "auto" for the type that config.json names
    device : where tensors go
    prefixes : spellings that stored names may begin with, tried in order
    """

    def __init__(self, folder: str, dtype: str, device: torch.device, prefixes: tuple[str, ...]) -> None:
        self.folder = Path(folder)
        self.config = CheckpointConfig.load(folder)
        self.dtype = self._resolve_dtype(dtype)
        self.device = device
        self.bytes_read = 0
        self._prefixes = prefixes
        self._open_files: dict[Path, Any] = {}
        self._files = self._locate()

    def has(self, name: str) -> bool:
        return self._stored(name) is not None

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """A tensor, or the slice [rows first:end, columns first:end] of it.

        Raises
        ------
        InputError : missing, of another shape than `shape` (the whole tensor's), or unreadable
        """
        stored = self._stored(name)
        if stored is None:
            raise InputError(str(self.folder), name, "the checkpoint has no such tensor", _REMEDY)
        path = self._files[stored]
        try:
            part = self._file(path).get_slice(stored)
            found = tuple(part.get_shape())
            if found == shape:
                tensor = part[
                    tuple(slice(*cut) if cut else slice(None) for cut in (rows, columns)[: len(shape)])
                ]
        except (SafetensorError, OSError) as error:
            raise InputError(str(path), stored, f"cannot be read ({error})", _REMEDY) from error
        if found != shape:
            problem = f"has the shape {found}, config.json implies {shape}"
            raise InputError(str(path), stored, problem, "make config.json and weights match")
        tensor = tensor.to(device=self.device, dtype=self.dtype).contiguous()
        self.bytes_read += tensor.nbytes
        return tensor

    def close(self) -> None:
        """Unmap the files."""
        self._open_files.clear()

    def _resolve_dtype(self, name: str) -> torch.dtype:
        if name == "auto":
            name = str(self.config.get("dtype", self.config.get("torch_dtype", "float32"))).removeprefix(
                "torch."
            )
        if name not in DTYPES:
            raise self.config.error("dtype", f"{name!r} is unknown", f"choose one of {', '.join(DTYPES)}")
        return DTYPES[name]

    def _stored(self, name: str) -> str | None:
        candidates = (name, *(prefix + name for prefix in self._prefixes))
        return next((candidate for candidate in candidates if candidate in self._files), None)

    def _locate(self) -> dict[str, Path]:
        """The file of each stored tensor."""
        index = self.folder / _INDEX
        if index.exists():
            weight_map = _read_json(index, _REMEDY).get("weight_map")
            if not isinstance(weight_map, dict):
                raise InputError(str(index), "weight_map", "is missing", _REMEDY)
            return {name: self.folder / file for name, file in weight_map.items()}
        path = self.folder / _SINGLE
        if not path.exists():
            remedy = "convert the weights to safetensors"
            raise InputError(str(self.folder), "", f"has neither {_SINGLE} nor {_INDEX}", remedy)
        return dict.fromkeys(self._file(path).keys(), path)

    def _file(self, path: Path) -> Any:
        if path not in self._open_files:
            try:
                self._open_files[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                problem = f"is missing, truncated or damaged ({error})"
                raise InputError(str(path), "", problem, _REMEDY) from error
        return self._open_files[path]


def _read_json(path: Path, remedy: str) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(str(path), "", f"cannot be read ({error})", remedy) from error
    if not isinstance(values, dict):
        raise InputError(str(path), "", "is not a JSON object", remedy)
    return values
