"""Memory for weights, which gets large pages later."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from runtime import native
from runtime.native import memory


def gathered() -> None:
    """Gather the pages of all mapped tensors, and wait until it is done."""
    before = set(threading.enumerate())
    native.use_large_pages()
    for thread in set(threading.enumerate()) - before:
        thread.join()


def large_kb() -> int:
    """Memory of this process in large pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))


def test_values_stay_when_pages_become_large() -> None:
    tensors = [native.mapped((3, 1000, 1001), torch.float32), native.mapped((7,), torch.uint8)]
    kept = [torch.randint(0, 100, tensor.shape).to(tensor.dtype) for tensor in tensors]
    for tensor, values in zip(tensors, kept, strict=True):
        tensor.copy_(values)
    before = large_kb()
    gathered()
    for tensor, values in zip(tensors, kept, strict=True):
        assert torch.equal(tensor, values)
    assert large_kb() >= before
    assert tensors[0].data_ptr() % (2 << 20) == 0


def test_nothing_happens_where_nobody_wants_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = tmp_path / "enabled"
    monkeypatch.setattr(memory, "_SETTING", setting)
    before = threading.active_count()
    native.use_large_pages()
    setting.write_text("always madvise [never]")
    native.use_large_pages()
    assert threading.active_count() == before


def test_memory_that_was_given_back_is_left_alone() -> None:
    held = len(memory._mappings)
    tensor = native.mapped((1 << 20,), torch.float32)
    assert len(memory._mappings) == held + 1
    del tensor
    assert len(memory._mappings) == held
    gathered()
