"""Runs one worker's share of a step: its layers over a ragged batch; the last worker samples the tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from runtime.engine.faults import Faults, of_replica
from runtime.engine.torch.attention import make_attention
from runtime.engine.torch.attention.base import Batch, LayerAttention
from runtime.engine.torch.attention.gpu import GpuAttention
from runtime.engine.torch.attention.windowed import WindowedAttention
from runtime.engine.torch.headwise.heads import Heads
from runtime.engine.torch.headwise.step import StepAttention
from runtime.engine.torch.models.base import DecoderStage
from runtime.engine.torch.recorded import RecordedSteps
from runtime.engine.torch.sampling.sampler import Sampler
from runtime.kv_cache.pool import PagedCache
from runtime.protocol.between_workers import SequenceStep, Step, StepResult
from runtime.protocol.message import TokenLogprobs

if TYPE_CHECKING:
    from runtime.engine.torch.gpu.graphs import StepGraphs


class StageRunner:
    """Runs steps in the given order, which must be the same on every worker of the replica.

    Parameters
    ----------
    heads : where KV heads are, in a replica with attention workers; None: all are in the cache
    windowed : the cache of layers with a window, and the place of each layer of the model (see
        WindowedAttention); None: all layers are in the one cache
    most, most_tokens : sequences and tokens of prompts in a step
    replays : whether steps of decodes are replayed on a CPU
    """

    def __init__(
        self,
        stage: DecoderStage,
        cache: PagedCache,
        heads: Heads | None = None,
        windowed: tuple[PagedCache, Callable[[int], tuple[bool, int]]] | None = None,
        most: int = 0,
        most_tokens: int = 0,
        replays: bool = True,
    ) -> None:
        self._stage, self._attention, self._heads = stage, make_attention(cache), heads
        self._graphs: StepGraphs | None = None
        if isinstance(self._attention, GpuAttention) and most and heads is None and windowed is None:
            from runtime.engine.torch.gpu.graphs import StepGraphs

            self._graphs = StepGraphs.made(stage, self._attention, most, most_tokens)
        self._windowed = (make_attention(windowed[0]), windowed[1]) if windowed else None
        self._recorded = None
        if replays and heads is None:
            self._recorded = RecordedSteps.made(stage, self._attention, self._windowed)
        self._sampler = Sampler() if stage.collectives.rank.samples else None
        self._faults = Faults()

    def begin(self, step: Step) -> None:
        """Take note of the requests that begin with a step, and of heads that move before it."""
        if self._heads is not None:
            self._heads.begin(step)
        if self._sampler is not None:
            for start in step.starts:
                history = start.history[: start.prompt_tokens], start.history[start.prompt_tokens :]
                with self._faults.kept(start.request_id):
                    self._sampler.start(start.request_id, start.sampling, history)

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request that has ended or was preempted."""
        if self._heads is not None:
            self._heads.forget(request_id)
        if self._sampler is not None:
            self._sampler.forget(request_id)
            self._faults.forget(request_id)

    @torch.inference_mode()
    def run(
        self,
        step: Step,
        tables: Mapping[str, Sequence[int]],
        windowed_tables: Mapping[str, Sequence[int]],
        on_layer: Callable[[int], None] | None,
    ) -> StepResult | None:
        """Run a step.

        Parameters
        ----------
        tables, windowed_tables : blocks of each request, and those in the layers with a window
        on_layer : called with each global layer number once its keys and values are in the cache; None:
            nobody waits for them

        Returns
        -------
        the tokens on the worker that samples; None on others. If a request's token cannot be sampled, only
        that request is broken. What the step writes to caches is there on all workers of the replica
        """
        stage, collectives, sequences = self._stage, self._stage.collectives, step.sequences
        hidden = None
        if not collectives.rank.is_first:
            count = sum(len(each.tokens) for each in sequences)
            hidden = collectives.receive((count, stage.spec.hidden), stage.dtype)
        found = self._replayed(sequences, tables, windowed_tables, hidden)
        if found is not None:
            if on_layer is not None:
                for layer in range(stage.part.first_layer, stage.part.end_layer):
                    on_layer(layer)
            if collectives.rank.is_last:
                return self._result(step, lambda: found)
            hidden = found
        else:
            batch = self._batch(sequences, tables, windowed_tables)
            hidden = stage.forward(batch, hidden, on_layer)
            if collectives.rank.is_last:
                computed = hidden
                return self._result(step, lambda: stage.logits(computed, batch))
        collectives.send(hidden)
        return None

    def _replayed(
        self,
        sequences: Sequence[SequenceStep],
        tables: Mapping[str, Sequence[int]],
        windowed_tables: Mapping[str, Sequence[int]],
        hidden: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """The activations of a step that is replayed, or on the worker that samples its logits; None: it is
        not."""
        if self._graphs is not None and self._graphs.takes(sequences):
            return self._graphs.run(sequences, tables, hidden)
        if self._recorded is not None and self._recorded.takes(sequences):
            return self._recorded.run(sequences, tables, windowed_tables, hidden)
        return None

    def _result(self, step: Step, logits_of: Callable[[], torch.Tensor | None]) -> StepResult | None:
        """The tokens of a step on the worker that samples, from the logits of the sequences that sample."""
        stage = self._stage
        chosen = [sequence for sequence in step.sequences if sequence.samples]
        if not chosen:
            if not stage.collectives.rank.samples:
                return None
            if stage.device.type == "cuda":
                # Blocks of the step's requests may go to others once it has a result, and what writes to
                # those does not wait for this stream. Tokens, where there are some, wait for all before them.
                torch.cuda.current_stream(stage.device).synchronize()
            return StepResult(step=step.step, tokens=())
        logits = logits_of()
        if logits is None or self._sampler is None:
            return None
        lost = self._lost(logits, chosen)
        if lost:
            rows = [row for row, each in enumerate(chosen) if each.request_id not in lost]
            logits, chosen = logits[rows], [chosen[row] for row in rows]
        found = self._sample(self._sampler, logits, chosen)
        logprobs = tuple(detail for _, detail in found)
        return StepResult(
            step=step.step,
            tokens=tuple(token for token, _ in found),
            logprobs=logprobs if any(detail is not None for detail in logprobs) else (),
            broken=self._faults.take(sequence.request_id for sequence in chosen),
            lost=lost,
        )

    def _lost(self, logits: torch.Tensor, chosen: Sequence[SequenceStep]) -> tuple[str, ...]:
        """The requests whose heads were on an attention worker that is lost, which shows in their rows."""
        if self._heads is None:
            return ()
        wrong = logits[:, 0].isnan().tolist()
        return tuple(each.request_id for each, nan in zip(chosen, wrong, strict=True) if nan)

    def _sample(
        self, sampler: Sampler, logits: torch.Tensor, chosen: Sequence[SequenceStep]
    ) -> list[tuple[int, TokenLogprobs | None]]:
        """Sample for the rows of logits whose requests have no fault: all at once, or one by one if that
        fails, to find the faulty request."""
        rows = [row for row, each in enumerate(chosen) if each.request_id not in self._faults]
        if len(rows) < len(chosen):
            logits, chosen = logits[rows], [chosen[row] for row in rows]
        if not rows:
            return []
        try:
            return _sampled(sampler, logits, chosen)
        except Exception as error:
            if of_replica(error):
                raise
            found = list[tuple[int, TokenLogprobs | None]]()
            for row, sequence in enumerate(chosen):
                with self._faults.kept(sequence.request_id):
                    found += _sampled(sampler, logits[row : row + 1], [sequence])
            if len(chosen) > 1 and not found:
                raise  # the fault is not a single request's
            return found

    def _batch(
        self,
        sequences: Sequence[SequenceStep],
        tables: Mapping[str, Sequence[int]],
        windowed_tables: Mapping[str, Sequence[int]],
    ) -> Batch:
        attention: LayerAttention = self._attention
        if self._heads is not None:
            attention = StepAttention(self._heads, sequences)
        elif self._windowed is not None:
            theirs = [windowed_tables[sequence.request_id] for sequence in sequences]
            attention = WindowedAttention(self._attention, *self._windowed, theirs)
        return Batch.make(
            attention,
            [sequence.tokens for sequence in sequences],
            [sequence.position for sequence in sequences],
            [tables[sequence.request_id] for sequence in sequences],
            [sequence.samples for sequence in sequences],
        )


def _sampled(
    sampler: Sampler, logits: torch.Tensor, sequences: Sequence[SequenceStep]
) -> list[tuple[int, TokenLogprobs | None]]:
    ids, indices = [each.request_id for each in sequences], [each.index for each in sequences]
    return list(zip(*sampler.sample(logits, ids, indices), strict=True))
