"""What transformers generates from a model folder, as a reference for tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Reference:
    """A model and its tokenizer, with greedy sampling."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.generation_config.eos_token_id = None
        self.text = cache(self._text)

    @torch.inference_mode()
    def greedy(self, ids: list[int], count: int = 24, **options: float) -> list[int]:
        """Tokens of `generate` with these options."""
        prompt = torch.tensor([ids])
        mask = torch.ones_like(prompt)
        output = self.model.generate(
            prompt,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=count,
            pad_token_id=0,
            **options,
        )
        return output[0, len(ids) :].tolist()

    @torch.inference_mode()
    def changed(
        self, ids: list[int], change: Callable[[torch.Tensor, list[int]], torch.Tensor], count: int = 24
    ) -> list[int]:
        """The most likely token after change(logits, tokens so far), token by token."""
        output: list[int] = []
        for _ in range(count):
            logits = self.model(torch.tensor([[*ids, *output]])).logits[0, -1].clone()
            output.append(int(change(logits, output).argmax()))
        return output

    def _text(self, prompt: str, count: int = 24) -> str:
        answer = self.greedy(self.tokenizer(prompt).input_ids, count)
        return self.tokenizer.decode(answer, skip_special_tokens=True)

    @torch.inference_mode()
    def logprobs(self, ids: list[int]) -> torch.Tensor:
        return torch.log_softmax(self.model(torch.tensor([ids])).logits[0].float(), -1)
