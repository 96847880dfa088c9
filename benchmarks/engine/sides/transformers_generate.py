"""A side of benchmarks/engine/engine_speed.py: transformers' generate.

PYTHONPATH=. python benchmarks/engine/sides/transformers_generate.py CHECKPOINT DTYPE CACHE
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from benchmarks.engine.sides.protocol import Channel


class Watch(StoppingCriteria):
    """A stopping criterion that records the time of every step and never stops."""

    def __init__(self) -> None:
        self.begun = time.perf_counter()
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self.times_s.append(time.perf_counter() - self.begun)
        return torch.zeros(len(input_ids), dtype=torch.bool)


@torch.inference_mode()
def main(checkpoint: str, dtype: str, cache: str) -> None:
    """Answer cases; `cache` is "dynamic" or "static"."""
    channel = Channel()
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    model.generation_config.eos_token_id = None
    channel.ready()
    for case in channel:
        watch, ids = Watch(), torch.tensor(case["prompts"])
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=case["new_tokens"],
            pad_token_id=0,
            cache_implementation=cache,
            stopping_criteria=StoppingCriteriaList([watch]),
        )
        channel.send({"times_s": [watch.times_s] * len(ids)})


if __name__ == "__main__":
    main(*sys.argv[1:])
