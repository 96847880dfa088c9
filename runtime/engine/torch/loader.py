"""Reads checkpoints: config.json, and of the safetensors files only the slices that a worker needs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from cost_model.config import text_part
from cost_model.config_keys import ConfigKeys
from cost_model.errors import InputError
from runtime import native
from runtime.engine.torch.stored import REMEDY, Reader, Stored, stored_tensors

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
FLOATS = ("F32", "F16", "BF16", "F64")
"""Types of tensors that are not quantised, in safetensors' names."""
_HALVES = {"F16": torch.float16, "BF16": torch.bfloat16}
_WITH_TEXT_PART = ("gemma3",)  # models that also see, of which the engine runs the text part

Cut = tuple[int, int, int]
"""A part [first, end) of a dimension: (size of the whole dimension, first, end)."""

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
        if values.get("model_type") in _WITH_TEXT_PART:
            values = text_part(ConfigKeys(values, str(path))).raw
        return cls(str(path), values)

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number, at least `least`; InputError if it is anything else."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(key, f"is {value!r}, not a whole number from {least}", REMEDY)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """A value, or the default if it is missing or null."""
        value = self.values.get(key)
        return default if value is None else value

    def require(self, key: str, expected: Any, default: Any) -> None:
        """Raise InputError for a variant of the model that the engine doesn't support."""
        if (value := self.get(key, default)) != expected:
            raise self.error(
                key, f"is {value!r}, the engine supports {expected!r}", "choose another checkpoint"
            )

    def error(self, key: str, problem: str, remedy: str) -> InputError:
        return InputError(self.source, key, problem, remedy)


class Checkpoint:
    """Tensors of a checkpoint by name, read in slices, on one device, and in one type unless they are `kept`
    in the one that they are stored in.

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
        self._prefixes, self._reader = prefixes, Reader()
        self._tensors = dict[Path, dict[str, Stored]]()
        self._files = self._locate()

    def stored_type(self, name: str) -> str | None:
        """The type of a tensor in its file, in safetensors' names; None: there is no such tensor."""
        return None if self._stored(name) is None else self._find(name)[0].type

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor in its file."""
        return self._find(name)[0].shape

    def read_stored(
        self,
        name: str,
        shape: tuple[int, ...],
        types: Sequence[str],
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """A tensor, or the slice [rows first:end, columns first:end] of it, in the type that it is stored in.

        Raises
        ------
        InputError : the tensor is missing, unreadable, has another shape, or none of these types
        """
        tensor, stored = self._find(name)
        _check(tensor, stored, shape, types)
        with _reading(tensor, stored):
            return self._reader.whole(tensor, rows, columns).to(self.device)

    def kept(self, *names: str) -> torch.dtype:
        """The type in which memory keeps tensors that are multiplied together: the engine's; but one that
        computes in float32 on a CPU keeps what is stored in 16 bits as it is, which loses nothing."""
        found = {self.stored_type(name) for name in names}
        stored = _HALVES.get(found.pop() or "") if len(found) == 1 else None
        if stored is None or self.dtype != torch.float32 or self.device.type != "cpu":
            return self.dtype
        return stored

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An uninitialised tensor on the checkpoint's device; None: of its type."""
        if self.device.type != "cpu":
            return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return native.mapped(shape, dtype or self.dtype)

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """A tensor, or the slice [rows first:end, columns first:end] of it, in a type (None: the engine's);
        see `read_into`."""
        cuts = (rows, columns, *([None] * len(shape)))
        sizes = (cut[1] - cut[0] if cut else size for cut, size in zip(cuts, shape, strict=False))
        target = self.empty(*sizes, dtype=dtype)
        self.read_into(target, name, shape, rows, columns)
        return target

    def read_into(
        self,
        target: torch.Tensor,
        name: str,
        shape: tuple[int, ...],
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> None:
        """Fill `target` with a tensor, or a slice of it; see `chunks`."""
        for start, chunk in self.chunks(name, shape, rows, columns, target.dtype):
            target[start : start + len(chunk)].copy_(chunk)

    def chunks(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """A tensor, or the slice [rows first:end, columns first:end] of it, some rows at a time.

        Parameters
        ----------
        dtype : in which memory keeps it, which `bytes_read` counts; None: the checkpoint's

        Yields
        ------
        the number of the chunk's first row in the slice, and the rows on the CPU in the type that they are
        stored in, valid until the next chunk

        Raises
        ------
        InputError : the tensor is missing, unreadable, or its whole shape is not `shape`
        """
        tensor, stored = self._find(name)
        _check(tensor, stored, shape, FLOATS)
        with _reading(tensor, stored):
            for start, chunk in self._reader.chunks(tensor, rows, columns):
                self.bytes_read += chunk.numel() * (dtype or self.dtype).itemsize
                yield start, chunk

    def rest(self) -> None:
        """Free the buffers for reading, once all weights are there."""
        self._reader.rest()

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

    def _find(self, name: str) -> tuple[Stored, str]:
        """Where a tensor is, and its name there."""
        stored = self._stored(name)
        if stored is None:
            raise InputError(str(self.folder), name, "the checkpoint has no such tensor", REMEDY)
        path = self._files[stored]
        if path not in self._tensors:
            self._tensors[path] = stored_tensors(path)
        if stored not in self._tensors[path]:
            raise InputError(str(path), stored, "the file has no such tensor", REMEDY)
        return self._tensors[path][stored], stored

    def _locate(self) -> dict[str, Path]:
        """The file of each stored tensor."""
        index = self.folder / _INDEX
        if index.exists():
            weight_map = _read_json(index, REMEDY).get("weight_map")
            if not isinstance(weight_map, dict):
                raise InputError(str(index), "weight_map", "is missing", REMEDY)
            return {name: self.folder / file for name, file in weight_map.items()}
        path = self.folder / _SINGLE
        if not path.exists():
            remedy = "convert the weights to safetensors"
            raise InputError(str(self.folder), "", f"has neither {_SINGLE} nor {_INDEX}", remedy)
        self._tensors[path] = stored_tensors(path)
        return dict.fromkeys(self._tensors[path], path)


@contextmanager
def _reading(tensor: Stored, name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(str(tensor.path), name, f"cannot be read ({error})", REMEDY) from error


def _check(tensor: Stored, name: str, shape: tuple[int, ...], types: Sequence[str]) -> None:
    path = str(tensor.path)
    if tensor.shape != shape:
        problem = f"has the shape {tensor.shape}, config.json implies {shape}"
        raise InputError(path, name, problem, "make config.json and weights match")
    if tensor.type not in types:
        problem = f"holds {tensor.type}, the engine reads {', '.join(types)} here"
        remedy = "make config.json, with its quantization_config, and weights match"
        raise InputError(path, name, problem, remedy)


def _read_json(path: Path, remedy: str) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(str(path), "", f"cannot be read ({error})", remedy) from error
    if not isinstance(values, dict):
        raise InputError(str(path), "", "is not a JSON object", remedy)
    return values
