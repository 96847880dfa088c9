"""Slices of safetensors files, against what safetensors itself reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from cost_model.errors import InputError
from runtime import native
from runtime.engine.torch import stored
from runtime.engine.torch.stored import TYPES, Reader, stored_tensors

KINDS = [kind for kind in TYPES.values() if kind != torch.bool]


@st.composite
def spans(draw: st.DrawFn, size: int) -> tuple[int, int] | None:
    """A part of a dimension, or None for all of it."""
    if draw(st.booleans()):
        return None
    first = draw(st.integers(0, size))
    return first, draw(st.integers(first, size))


@settings(deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("is_compiled", [False, True])
def test_any_slice_of_any_tensor(
    is_compiled: bool, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("tensors") / "model.safetensors"
    shapes = data.draw(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=4))
    tensors = {
        f"tensor.{number}": torch.randint(0, 250, shape, dtype=torch.uint8).to(
            data.draw(st.sampled_from(KINDS))
        )
        for number, shape in enumerate(shapes)
    }
    save_file(tensors, path, metadata={"format": "pt"})
    expected, found, reader = load_file(path), stored_tensors(path), Reader()
    assert set(found) == set(expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored, "CHUNK_BYTES", data.draw(st.sampled_from([1, 40, 1 << 20])))
        if not is_compiled:
            patch.setattr(native.library, "loaded", lambda: None)
        for name, tensor in found.items():
            rows = data.draw(spans(tensor.shape[0])) if tensor.shape else None
            columns = data.draw(spans(tensor.shape[1])) if len(tensor.shape) > 1 else None
            cuts = tuple(slice(*cut) if cut else slice(None) for cut in (rows, columns)[: len(tensor.shape)])
            wanted = expected[name][cuts].contiguous()
            whole = reader.whole(tensor, rows, columns)
            assert whole.dtype == wanted.dtype and whole.shape == wanted.shape
            parts = [(first, chunk.clone()) for first, chunk in reader.chunks(tensor, rows, columns)]
            assert [first for first, _ in parts] == [
                sum(len(before) for _, before in parts[:number]) for number in range(len(parts))
            ]
            joined = parts[0][1] if not tensor.shape else torch.cat([chunk for _, chunk in parts])
            for each in (whole, joined):
                assert torch.equal(each.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8))


def test_an_abandoned_read_leaves_the_reader_usable(tmp_path: Path) -> None:
    """A model that fails half-way, say; the thread must not write to buffers of the next read."""
    values = torch.arange(3 << 20).view(-1, 64)
    save_file({"values": values}, tmp_path / "model.safetensors")
    tensor, reader = stored_tensors(tmp_path / "model.safetensors")["values"], Reader()
    for _ in range(3):
        for first, _ in reader.chunks(tensor):
            if first:
                break
        assert all(
            torch.equal(chunk, values[first : first + len(chunk)]) for first, chunk in reader.chunks(tensor)
        )


def test_a_file_that_shrinks_is_not_read_further(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"values": torch.zeros(1 << 20)}, path)
    tensor = stored_tensors(path)["values"]
    with path.open("r+b") as file:
        file.truncate(1 << 20)
    with pytest.raises(OSError, match="too short"):
        Reader().whole(tensor)
    with pytest.raises(OSError, match="too short"):
        list(Reader().chunks(tensor))


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}},
        {"a": 5},
        [],
        None,
    ],
)
def test_a_damaged_header_is_one_line(tmp_path: Path, header: object) -> None:
    path = tmp_path / "model.safetensors"
    text = b"{" if header is None else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(InputError, match=r"model\.safetensors: is missing, truncated or damaged"):
        stored_tensors(path)
