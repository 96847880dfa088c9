"""The sampling rules of a batch as tensors on the logits' device, made once per set of rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.engine.torch.sampling.draw import Limits, draw, draw_limited, draw_limited_exactly, largest
from runtime.engine.torch.sampling.noise import draw_keys, token_hashes
from runtime.engine.torch.sampling.penalties import History, Penalties
from runtime.protocol.message import Sampling

CANDIDATES = 256
TIES = 64


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that are drawn the same way, from the `candidates` likeliest tokens (0: from all, without
    limits)."""

    rows: list[int]
    place: torch.Tensor
    limits: Limits
    candidates: int


class BatchRules:
    """Chooses the tokens of the rows of a batch by their sampling rules.

    Parameters
    ----------
    samplings, histories : of each row; a history where the sampling needs one
    vocab, device : of the logits
    """

    def __init__(
        self,
        samplings: Sequence[Sampling],
        histories: Sequence[History | None],
        vocab: int,
        device: torch.device,
    ) -> None:
        self._samplings, self._vocab, self._device = samplings, vocab, device
        self._groups = self._grouped()
        self._shortest = [row for row, each in enumerate(samplings) if each.min_tokens and each.end_token_ids]
        self._bias = self._biases()
        self._penalties = _penalties(samplings, histories)

    def adjust(self, logits: torch.Tensor, indices: Sequence[int], in_place: bool) -> torch.Tensor:
        """float32 logits [rows, vocab] with end tokens ruled out before min_tokens, logit_bias added and
        penalties applied (vLLM's order); the same tensor if no rule changes it."""
        early = [row for row in self._shortest if indices[row] < self._samplings[row].min_tokens]
        if not early and self._bias is None and self._penalties is None:
            return logits
        if not in_place:
            logits = logits.clone()
        if early:
            ends = [(row, token) for row in early for token in self._samplings[row].end_token_ids]
            rows, tokens = torch.tensor(ends, device=self._device).T
            logits[rows, tokens] = -torch.inf
        if self._bias is not None:
            rows, tokens, bias = self._bias
            logits[rows, tokens] += bias
        if self._penalties is not None:
            self._penalties.apply(logits)
        return logits

    def choose(self, logits: torch.Tensor, indices: Sequence[int], exactly: bool = False) -> torch.Tensor:
        """Token ids [rows] from adjusted logits, UNSETTLED if the likeliest tokens don't show what top_k,
        top_p and min_p keep; never with `exactly`, which sorts the vocabulary."""
        tokens = largest(logits)
        for group in self._groups:
            draws = [(self._samplings[row].seed, indices[row]) for row in group.rows]
            keys, hashes = draw_keys(draws, self._device), token_hashes(self._vocab, self._device)
            scores = logits if len(group.rows) == len(self._samplings) else logits[group.place]
            if not group.candidates:
                drawn = draw(scores, group.limits.temperature, hashes, keys)
            elif exactly or group.candidates >= self._vocab:
                drawn = draw_limited_exactly(scores, group.limits, hashes, keys)
            else:
                drawn = draw_limited(scores, group.limits, hashes, keys, group.candidates)
            tokens[group.place] = drawn
        return tokens

    def _grouped(self) -> list[_Group]:
        members: dict[tuple[int, bool], list[int]] = defaultdict(list)
        for row, sampling in enumerate(self._samplings):
            if sampling.temperature > 0:
                members[self._candidates(sampling)].append(row)
        groups = []
        for (candidates, nucleus_only), rows in members.items():
            rules = [self._samplings[row] for row in rows]
            limits = Limits(
                temperature=self._column([rule.temperature for rule in rules]),
                top_k=self._column([rule.top_k for rule in rules], torch.int64),
                top_p=self._column([rule.top_p if rule.top_p < 1 else torch.inf for rule in rules]),
                min_p=self._column([rule.min_p for rule in rules]),
                nucleus_only=nucleus_only,
            )
            groups.append(_Group(rows, torch.tensor(rows, device=self._device), limits, candidates))
        return groups

    def _candidates(self, sampling: Sampling) -> tuple[int, bool]:
        """How many of the likeliest tokens to consider (0: all, because nothing limits them), and whether
        only top_p limits them."""
        if 0 < sampling.top_k < self._vocab:
            return sampling.top_k + TIES, False
        if sampling.min_p > 0:
            return CANDIDATES, False
        return (CANDIDATES, True) if sampling.top_p < 1 else (0, False)

    def _column(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)[:, None]

    def _biases(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        entries = [(row, *entry) for row, each in enumerate(self._samplings) for entry in each.logit_bias]
        if not entries:
            return None
        rows, tokens, bias = zip(*entries, strict=True)
        places = torch.tensor([rows, tokens], device=self._device)
        return places[0], places[1], torch.tensor(bias, dtype=torch.float32, device=self._device)


def _penalties(samplings: Sequence[Sampling], histories: Sequence[History | None]) -> Penalties | None:
    rows = [row for row, history in enumerate(histories) if history is not None]
    if not rows:
        return None
    return Penalties(
        rows,
        [history for history in histories if history is not None],
        [samplings[row].repetition_penalty for row in rows],
        [samplings[row].frequency_penalty for row in rows],
        [samplings[row].presence_penalty for row in rows],
    )
