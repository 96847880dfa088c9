"""The small models that chaos.py serves, plain or quantised, and what transformers answers with the same
weights."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.serving.fleet import KINDS, make_model

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import checkpoints
import quantised
from rounded_cache import ROUNDINGS, RoundedCache

PLAIN, MXFP4 = "plain", "mxfp4"
WEIGHTS = (PLAIN, MXFP4, *quantised.FORMATS)
KV_FORMATS = (PLAIN, *ROUNDINGS)
JITTERS, COPIES, ROUNDS = (1e-5, 1e-6, 1e-4), 64, 24
"""Relative noise in keys and values, that of another order of additions (1e-6) and more, by turns; in how
many copies each time; and how often, at most: what is rare needs many."""
ROWS = 64
"""Prompts that transformers answers at once."""


@dataclass(frozen=True)
class Model:
    """A small model.

    Attributes
    ----------
    folder : the checkpoint to serve
    plain : the same weights in float32
    kv : how KV caches are stored, one of KV_FORMATS
    """

    folder: Path
    plain: Path
    kv: str

    @classmethod
    def make(cls, work: Path, kind: str, weights: str, kv: str) -> Model:
        """Write a random model of a model_type (KINDS) with weights in a format (WEIGHTS).

        Raises
        ------
        SystemExit : mxfp4 weights of another model than gpt_oss
        """
        original, folder, plain = work / "original", work / "model", work / "plain"
        make_model(original, KINDS[kind], kind)
        _number_tokens(original)
        if weights == PLAIN:
            return cls(original, original, kv)
        if weights == MXFP4:
            if kind != "gpt_oss":
                raise SystemExit(f"--weights {MXFP4} is for --kind gpt_oss alone")
            shutil.copytree(original, plain)
            shutil.copytree(original, folder)
            checkpoints.into_mxfp4(plain, folder)
        else:
            quantised.quantise(original, weights, folder, plain)
        return cls(folder, plain, kv)


def _number_tokens(folder: Path) -> None:
    """Give a model a tokenizer whose texts tell the tokens: the words t0, t1 and so on."""
    size = len(PreTrainedTokenizerFast.from_pretrained(folder))
    core = Tokenizer(models.WordLevel({f"t{token}": token for token in range(size)}, unk_token="t0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder)


class Truth:
    """What transformers answers with a model's weights in float32, and keys and values rounded as in its KV
    caches."""

    def __init__(self, model: Model) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model.plain, dtype=torch.float32)
        self._model.generation_config.eos_token_id = None
        self._rounding = ROUNDINGS.get(model.kv)

    def answers(self, asked: Sequence[tuple[tuple[int, ...], int]]) -> list[str]:
        """The texts that follow prompts, each of so many greedy tokens."""
        found = [""] * len(asked)
        by_tokens = sorted(range(len(asked)), key=lambda number: asked[number][1])
        for first in range(0, len(asked), ROWS):
            numbers = by_tokens[first : first + ROWS]
            rows = self._greedy([asked[number][0] for number in numbers], asked[numbers[-1]][1])
            for number, row in zip(numbers, rows, strict=True):
                found[number] = "".join(f" t{token}" for token in row[: asked[number][1]])
        return found

    @torch.inference_mode()
    def _greedy(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        width = max(map(len, prompts))
        padded = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        output = self._model.generate(
            padded,
            attention_mask=mask,
            past_key_values=RoundedCache(self._model.config, self._rounding),
            do_sample=False,
            max_new_tokens=tokens,
            pad_token_id=0,
        )
        return output[:, width:].tolist()

    @torch.inference_mode()
    def refuses(self, prompt: tuple[int, ...], tokens: int, text: str) -> str:
        """Why a text is no answer of so many tokens each of which scores highest after those before it, or
        does so when the last bits of keys and values change: there, scores (or those of experts) nearly tie.
        "" if it is one."""
        words = text.split()
        if len(words) != tokens or not all(word[:1] == "t" and word[1:].isdecimal() for word in words):
            return f"{len(words)} tokens instead of {tokens}"
        answer = torch.tensor([int(word[1:]) for word in words])
        whole = torch.cat([torch.tensor(prompt), answer[:-1]]).repeat(COPIES, 1)
        short = torch.full((tokens,), torch.inf)
        for number in range(ROUNDS):
            cache = RoundedCache(self._model.config, self._rounding, JITTERS[number % len(JITTERS)])
            scores = self._model(whole, past_key_values=cache).logits[:, len(prompt) - 1 :]
            own = scores.gather(2, answer.expand(COPIES, -1)[..., None])[..., 0]
            short = torch.minimum(short, (scores.amax(-1) - own).amin(0))
            if not short.any():
                return ""
        return f"{int((short > 0).sum())} of {tokens} tokens never win, by {short.max():.3g} or more"
