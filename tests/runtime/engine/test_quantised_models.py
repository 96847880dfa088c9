"""Quantised checkpoints of every format against the same weights in float32 in `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import WRITERS
from quantised import FORMATS, quantise
from test_engine_models import PROMPTS, reference, run, whole_model

from runtime import native

MODELS = {name: "llama" for name in FORMATS} | {
    "AWQ": "mixtral",
    "GPTQ 8 bits": "qwen2",
    "compressed-tensors int8, zeros": "opt",
    "fp8 by blocks": "qwen3",
    "compressed-tensors fp8": "mistral",
}
"""Each format with one family."""


def written(folder: Path, family: str, name: str) -> tuple[Path, Path]:
    """The folders of a quantised model and of the same weights in float32."""
    quantise(WRITERS[family](folder / "original"), name, folder / "quantised", folder / "plain")
    return folder / "quantised", folder / "plain"


@pytest.mark.parametrize("kernel", ["compiled", "torch"])
@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_weights_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kernel: str
) -> None:
    if kernel == "torch":
        monkeypatch.setattr(native, "serves", lambda dtype, device: False)
    quantised, plain = written(tmp_path, MODELS[name], name)
    with torch.inference_mode():
        found, expected = run(whole_model(quantised), PROMPTS), reference(plain, PROMPTS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
