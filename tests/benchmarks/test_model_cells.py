"""What `benchmarks.engine.model_matrix` calls equal, tied and wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB, write_llama

from benchmarks.engine import model_cells
from benchmarks.engine.model_cells import Truth


def test_a_token_that_does_not_nearly_tie_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cells, "TOKENS", 10)
    folder = write_llama(tmp_path / "model")
    exact, rounded = Truth(folder, torch.float32), Truth(folder, torch.bfloat16)
    assert exact.verdict(exact.tokens) == rounded.verdict(rounded.tokens) == "equal"
    assert rounded.verdict(exact.tokens) in ("equal", "ties")
    for truth, wrong in ((exact, 1), (rounded, 8)):
        answers = [list(tokens) for tokens in truth.tokens]
        answers[2][1 : 1 + wrong] = [(token + 7) % VOCAB for token in answers[2][1 : 1 + wrong]]
        assert truth.verdict(answers) == "WRONG"
        assert truth.verdict([tokens[:-1] for tokens in truth.tokens]) == "WRONG"
