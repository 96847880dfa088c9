"""Quantised checkpoints of every format against the same weights in float32 in `transformers`."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from checkpoints import LAYERS, WRITERS, greedy
from engine_harness import Cluster, Shape
from quantised import FORMATS, quantise
from test_engine_models import PROMPTS, reference, run, whole_model

from runtime import native
from runtime.protocol.message import Sampling

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


SHAPES: dict[str, Shape] = {"tp2-tp1": [(2, 0, 2), (1, 2, LAYERS)], "pp2": [(1, 0, 3), (1, 3, LAYERS)]}
TOKENS = 24


@pytest.mark.parametrize(
    ("name", "family"),
    [("AWQ", "mixtral"), ("GPTQ 4 bits, desc_act, zeros", "qwen2"), ("fp8 by blocks", "llama")],
)
def test_replicas_of_any_shape_give_the_tokens_of_the_weights_in_float32(
    tmp_path: Path, name: str, family: str
) -> None:
    """Colocated, and with the KV cache moved between uneven pipelines."""
    quantised, plain = written(tmp_path, family, name)
    expected = greedy(plain, PROMPTS, TOKENS)
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
    with Cluster(quantised, SHAPES) as cluster:
        for source, target in product(SHAPES, SHAPES):
            for number, prompt in enumerate(PROMPTS):
                cluster.submit(f"{source}>{target}#{number}", prompt, sampling, source, target)
        for source, target in product(SHAPES, SHAPES):
            for number, tokens in enumerate(expected):
                outcome = cluster.finish(f"{source}>{target}#{number}")
                assert outcome.tokens == tokens, (source, target, number)
