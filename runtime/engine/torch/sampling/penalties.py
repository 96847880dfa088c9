"""Penalties for tokens that a request's prompt or output has already."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


class History:
    """The distinct tokens of a request's prompt and output, and how often each is in the output.

    Sparse, because a request touches a few thousand tokens at most of a vocabulary of a hundred thousand.
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        tokens, places = np.unique(np.array([*prompt, *output], np.int64), return_inverse=True)
        self._places = {token: place for place, token in enumerate(tokens.tolist())}
        self._tokens = tokens
        self._counts = np.bincount(places[len(prompt) :], minlength=len(tokens)).astype(np.float32)

    @property
    def tokens(self) -> np.ndarray:
        """Each token once, int64 [distinct]."""
        return self._tokens[: len(self._places)]

    @property
    def counts(self) -> np.ndarray:
        """How often each is in the output, float32 [distinct]."""
        return self._counts[: len(self._places)]

    def add(self, token: int) -> None:
        """Add a token of the output."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            more = max(16, place)
            self._tokens = np.concatenate([self._tokens, np.zeros(more, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(more, np.float32)])
        self._tokens[place] = token
        self._counts[place] += 1


class Penalties:
    """Penalties of some rows of a batch.

    Parameters
    ----------
    rows : the batch's rows that have any
    repetition, frequency, presence : of each of these rows
    """

    def __init__(
        self,
        rows: Sequence[int],
        histories: Sequence[History],
        repetition: Sequence[float],
        frequency: Sequence[float],
        presence: Sequence[float],
    ) -> None:
        self._rows, self._histories = np.array(rows), histories
        self._factors = np.array([repetition, frequency, presence], np.float32)

    def apply(self, logits: torch.Tensor) -> None:
        """Change logits [rows, vocab] in place. Those of tokens in prompt or output are divided by the
        repetition penalty if positive, otherwise multiplied by it; then the frequency penalty is subtracted
        for each occurrence in the output, and the presence penalty once (vLLM's definitions and order)."""
        device = logits.device
        lengths = [len(history.tokens) for history in self._histories]
        rows = torch.from_numpy(np.repeat(self._rows, lengths)).to(device)
        tokens = torch.from_numpy(np.concatenate([history.tokens for history in self._histories])).to(device)
        counts = np.concatenate([history.counts for history in self._histories])
        factors = np.repeat(self._factors, lengths, axis=1)
        taken_off = torch.from_numpy(factors[1] * counts + factors[2] * (counts > 0)).to(device)
        repetition = torch.from_numpy(factors[0]).to(device)
        seen = logits[rows, tokens]
        logits[rows, tokens] = torch.where(seen > 0, seen / repetition, seen * repetition) - taken_off
