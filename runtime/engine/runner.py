"""One worker's share of a step: its layers over a ragged batch, and the tokens at the very end."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch

from runtime.engine.attention import Batch
from runtime.engine.cache import CacheTable
from runtime.engine.models.base import DecoderStage
from runtime.engine.sampler import Sampler
from runtime.messages import Step, StepResult, TokenLogprobs


class StageRunner:
    """Runs steps in the order given; every worker of the replica must be given the same ones."""

    def __init__(self, stage: DecoderStage, caches: CacheTable) -> None:
        self._stage = stage
        self._caches = caches
        self._sampler = Sampler()

    @torch.inference_mode()
    def run(self, step: Step, on_layer: Callable[[int], None]) -> StepResult | None:
        """Run a step whose requests have their caches.

        Parameters
        ----------
        on_layer : called with each global layer number once its keys and values are in the caches

        Returns
        -------
        the tokens, on the worker that samples; None elsewhere
        """
        stage, links = self._stage, self._stage.links
        batch = self._batch(step)
        hidden = None
        if not links.place.is_first:
            hidden = links.receive((len(batch.tokens), stage.spec.hidden), stage.dtype)
        hidden = stage.forward(batch, hidden, on_layer)
        if not links.place.is_last:
            links.send(hidden)
            return None
        logits = stage.logits(hidden, batch)
        if logits is None:
            return None
        tokens, logprobs = self._sample(step, logits)
        wanted = any(detail is not None for detail in logprobs)
        return StepResult(step=step.step, tokens=tokens, logprobs=logprobs if wanted else ())

    def _sample(
        self, step: Step, logits: torch.Tensor
    ) -> tuple[tuple[int, ...], tuple[TokenLogprobs | None, ...]]:
        names = [sequence.request_id for sequence in step.sequences]
        for sequence in step.sequences:
            self._sampler.start(sequence.request_id, sequence.sampling)
        chosen = self._sampler.sample(logits, names, [sequence.index for sequence in step.sequences])
        for name in names:
            self._sampler.forget(name)
        return chosen

    def _batch(self, step: Step) -> Batch:
        sequences, device = step.sequences, self._stage.device
        tokens = list(chain.from_iterable(s.tokens for s in sequences))
        positions = list(
            chain.from_iterable(range(s.position, s.position + len(s.tokens)) for s in sequences)
        )
        return Batch(
            tokens=torch.tensor(tokens, device=device),
            positions=torch.tensor(positions, device=device),
            lengths=tuple(len(s.tokens) for s in sequences),
            offsets=tuple(s.position for s in sequences),
            caches=tuple(self._caches[s.request_id] for s in sequences),
        )
