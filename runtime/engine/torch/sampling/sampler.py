"""Logits to tokens, all rows of a step at once.

A token depends on (logits, history, seed, output index) alone: it is the same on any replica, in any batch,
and after a preemption or a move.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.engine.torch.sampling.draw import UNSETTLED, unsettle
from runtime.engine.torch.sampling.penalties import History
from runtime.engine.torch.sampling.rules import BatchRules
from runtime.protocol.message import Sampling, TokenLogprobs

BATCHES_KEPT = 16


class Sampler:
    """Samples tokens for the requests of a replica, and keeps the history that their rules need.

    Only the worker that samples has one. What depends only on the requests of a batch is computed once and
    kept while the same requests run together.
    """

    def __init__(self) -> None:
        self._samplings: dict[str, Sampling] = {}
        self._histories: dict[str, History] = {}
        self._rules: dict[tuple[str, ...], BatchRules] = {}

    def start(
        self, request_id: str, sampling: Sampling, history: tuple[Sequence[int], Sequence[int]] = ((), ())
    ) -> None:
        """Add a request, also again after a preemption.

        Parameters
        ----------
        history : tokens of the prompt and of the output so far; used if `sampling.needs_history`
        """
        self.forget(request_id)
        self._samplings[request_id] = sampling
        if sampling.needs_history:
            prompt, output = history
            self._histories[request_id] = History(prompt if sampling.repetition_penalty != 1 else (), output)

    def forget(self, request_id: str) -> None:
        """Drop a request; unknown ids are ignored."""
        self._rules.clear()
        self._samplings.pop(request_id, None)
        self._histories.pop(request_id, None)

    def sample(
        self, logits: torch.Tensor, request_ids: Sequence[str], indices: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[TokenLogprobs | None, ...]]:
        """Choose one token per row.

        Parameters
        ----------
        logits : [rows, vocab], any float type; not changed
        request_ids, indices : each row's request and the output index of the token to choose

        Returns
        -------
        tokens, and log probabilities for requests that ask for them; these are of the raw distribution,
        before penalties, temperature and limits (vLLM's default)

        Notes
        -----
        NaN counts as ruled out and infinity as the largest number; if nothing is left, all tokens are equally
        likely. Everything stays on the logits' device until one transfer fetches tokens and log
        probabilities; there is a second one only if the first could not settle some row.
        """
        counts = [self._samplings[request_id].logprobs for request_id in request_ids]
        raw = logits.float()
        logprobs = _raw_logprobs(raw, counts)
        rules = self._rules_of(tuple(request_ids), raw)
        scores = rules.adjust(raw, indices, in_place=raw is not logits)
        tokens = rules.choose(scores, indices)
        unsettle(tokens, scores)
        chosen, details = _fetch(tokens, logprobs, counts)
        if UNSETTLED in chosen:
            rows = [row for row, token in enumerate(chosen) if token == UNSETTLED]
            tokens[torch.tensor(rows, device=tokens.device)] = self._settle(
                scores, rows, request_ids, indices
            )
            chosen, details = _fetch(tokens, logprobs, counts)
        for request_id, token in zip(request_ids, chosen, strict=True):
            if (history := self._histories.get(request_id)) is not None:
                history.add(token)
        return chosen, details

    def _settle(
        self, scores: torch.Tensor, rows: Sequence[int], request_ids: Sequence[str], indices: Sequence[int]
    ) -> torch.Tensor:
        """Sample for rows that need the whole vocabulary sorted, or whose logits have NaN or infinity to be
        replaced."""
        scores = scores[torch.tensor(rows, device=scores.device)]
        scores.nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
        scores.masked_fill_(scores.amax(-1, keepdim=True) == -torch.inf, 0.0)
        samplings = [self._samplings[request_ids[row]] for row in rows]
        rules = BatchRules(samplings, [None] * len(rows), scores.shape[-1], scores.device)
        return rules.choose(scores, [indices[row] for row in rows], exactly=True)

    def _rules_of(self, request_ids: tuple[str, ...], logits: torch.Tensor) -> BatchRules:
        rules = self._rules.get(request_ids)
        if rules is None:
            if len(self._rules) >= BATCHES_KEPT:
                self._rules.clear()
            samplings = [self._samplings[request_id] for request_id in request_ids]
            histories = [self._histories.get(request_id) for request_id in request_ids]
            rules = BatchRules(samplings, histories, logits.shape[-1], logits.device)
            self._rules[request_ids] = rules
        return rules


def _raw_logprobs(logits: torch.Tensor, counts: Sequence[int]) -> torch.Tensor | None:
    """Log probabilities [rows that ask for them, vocab]; a count below 0 does not ask."""
    rows = [row for row, count in enumerate(counts) if count >= 0]
    if not rows:
        return None
    return logits[torch.tensor(rows, device=logits.device)].log_softmax(-1)


def _fetch(
    tokens: torch.Tensor, logprobs: torch.Tensor | None, counts: Sequence[int]
) -> tuple[tuple[int, ...], tuple[TokenLogprobs | None, ...]]:
    """Move tokens, their log probabilities and those of the likeliest tokens to the host, all in one float64
    tensor (which holds token ids and float32 exactly)."""
    if logprobs is None:
        return tuple(tokens.tolist()), (None,) * len(counts)
    rows = [row for row, count in enumerate(counts) if count >= 0]
    asked = tokens[torch.tensor(rows, device=tokens.device)].clamp(min=0)
    best, ids = logprobs.topk(min(max(counts), logprobs.shape[-1]))
    parts = (tokens[None], logprobs.gather(1, asked[:, None]), ids, best)
    numbers = torch.cat([part.double().flatten() for part in parts]).tolist()
    chosen = tuple(int(token) for token in numbers[: len(counts)])
    values = numbers[len(counts) : len(counts) + len(rows)]
    width = ids.shape[-1]
    top = [
        numbers[start : start + width] for start in range(len(counts) + len(rows), len(numbers), width or 1)
    ]
    details: list[TokenLogprobs | None] = [None] * len(counts)
    for place, row in enumerate(rows):
        pairs = zip(map(int, top[place]), top[place + len(rows)], strict=True) if width else ()
        details[row] = TokenLogprobs(chosen=values[place], top=tuple(pairs)[: counts[row]])
    return chosen, tuple(details)
