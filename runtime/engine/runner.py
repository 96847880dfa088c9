"""One worker's share of a step: its layers over a ragged batch, and the tokens at the very end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from runtime.engine.attention import Batch
from runtime.engine.cache import PagedCache
from runtime.engine.models.base import DecoderStage
from runtime.engine.sampler import Sampler
from runtime.messages import Step, StepResult


class StageRunner:
    """Runs steps in the order given; every worker of the replica must be given the same ones."""

    def __init__(self, stage: DecoderStage, cache: PagedCache) -> None:
        self._stage, self._cache = stage, cache
        self._sampler = Sampler() if stage.links.place.samples else None

    def begin(self, step: Step) -> None:
        """Take note of the requests that begin with a step."""
        if self._sampler is not None:
            for start in step.starts:
                history = start.history[: start.prompt_tokens], start.history[start.prompt_tokens :]
                self._sampler.start(start.request_id, start.sampling, history)

    def forget(self, request_id: str) -> None:
        """A request has ended, or was preempted."""
        if self._sampler is not None:
            self._sampler.forget(request_id)

    @torch.inference_mode()
    def run(
        self, step: Step, tables: Mapping[str, Sequence[int]], on_layer: Callable[[int], None]
    ) -> StepResult | None:
        """Run a step whose requests have their blocks.

        Parameters
        ----------
        tables : blocks of each request
        on_layer : called with each global layer number once its keys and values are in the cache

        Returns
        -------
        the tokens, on the worker that samples; None elsewhere
        """
        stage, links = self._stage, self._stage.links
        batch = self._batch(step, tables)
        hidden = None
        if not links.place.is_first:
            hidden = links.receive((len(batch.tokens), stage.spec.hidden), stage.dtype)
        hidden = stage.forward(batch, hidden, on_layer)
        if not links.place.is_last:
            links.send(hidden)
            return None
        chosen = [sequence for sequence in step.sequences if sequence.samples]
        if not chosen:
            return StepResult(step=step.step, tokens=()) if links.place.samples else None
        logits = stage.logits(hidden, batch)
        if logits is None or self._sampler is None:
            return None
        tokens, logprobs = self._sampler.sample(
            logits, [sequence.request_id for sequence in chosen], [sequence.index for sequence in chosen]
        )
        wanted = any(detail is not None for detail in logprobs)
        return StepResult(step=step.step, tokens=tuple(tokens), logprobs=tuple(logprobs) if wanted else ())

    def _batch(self, step: Step, tables: Mapping[str, Sequence[int]]) -> Batch:
        sequences = step.sequences
        return Batch.make(
            self._cache,
            [sequence.tokens for sequence in sequences],
            [sequence.position for sequence in sequences],
            [tables[sequence.request_id] for sequence in sequences],
            [sequence.samples for sequence in sequences],
        )
