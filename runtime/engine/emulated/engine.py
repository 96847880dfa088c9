"""An engine that computes nothing, but takes the time that a model would take by the placement's cost model.

All else is real: scheduler, blocks, pipeline, KV transfers over links as fast as the placement's. Of the
sampling rules only the seed has an effect, and no token ends the text by itself.

A sleep ends late, by some tenths of a millisecond or by more where other programs have the processor. So that
this does not add up over stages and steps, a stage begins as if the one before, and its own last step, had
ended in time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster_specs.loader import resolve
from cost_model.base import Work
from cost_model.lengths import Window, attended_tokens, context_tokens
from cost_model.pipeline import PipelineSemantics
from hexgen2.cluster import Cluster
from hexgen2.placement import Placement
from hexgen2.prediction.step_times import StepTimes
from runtime.engine.base import Engine, OnLayer
from runtime.engine.emulated.cache import EmulatedCache, EmulatedShape
from runtime.engine.emulated.hops import PURPOSE, Hops
from runtime.engine.emulated.tokens import choose, seed_of, states
from runtime.engine.faults import Faults
from runtime.engine.rank import Rank
from runtime.kv_cache.layout import held
from runtime.protocol.between_workers import Hello, Step, StepResult
from runtime.protocol.framing import Connection
from runtime.protocol.message import TokenLogprobs
from runtime.protocol.to_workers import Configure, Connect, Emulation

_SHORTEST_S = 0.001
"""The engine does not sleep for a single layer that takes less."""
_NEXT_S = 0.005
"""A step that begins so soon after the last one waited for it, and not for a request."""


@dataclass(frozen=True, slots=True)
class EmulatedSpec:
    """Sizes of the model."""

    kv_heads: int
    vocab: int
    position_limit: int | None


class EmulatedEngine(Engine):
    """The engine of one GPU of a replica. Tensor-parallel ranks take equally long and don't wait."""

    def __init__(self, config: Configure, rank: Rank) -> None:
        super().__init__()
        self._config, self._rank = config, rank
        self._hops = Hops(config, rank)
        self._seeds: dict[str, tuple[int, bool]] = {}
        self._faults = Faults()
        self._ended_s = self._late_s = 0.0

    def load(self) -> None:
        config, rank, emulation = self._config, self._rank, self._emulation
        placement = Placement.model_validate_json(emulation.placement)
        model = placement.model
        self._window = model.window
        self.spec = EmulatedSpec(model.kv_heads, model.vocab, model.max_position)
        self._shape = EmulatedShape(
            held(rank.stages, config.worker, model.kv_heads),
            model.head_dim,
            model.kv_value_bytes,
            model.kv_values_per_token_layer // model.kv_heads,
        )
        blocks = config.kv_budget_tokens // config.block_tokens
        self.cache = self._pages = EmulatedCache(self._shape, blocks, config.block_tokens, emulation.kv_scale)
        self._times = _times(placement, config.replica)

    def turn(self, config: Configure) -> None:
        self._config = config
        emulation, blocks = self._emulation, config.kv_budget_tokens // config.block_tokens
        if blocks != self.cache.blocks:
            self.cache = self._pages = EmulatedCache(
                self._shape, blocks, config.block_tokens, emulation.kv_scale
            )
        self._times = _times(Placement.model_validate_json(emulation.placement), config.replica)

    @property
    def _emulation(self) -> Emulation:
        if self._config.emulation is None:
            raise RuntimeError("the emulated engine got no placement to emulate")
        return self._config.emulation

    def join(self, addresses: Connect) -> None:
        self._hops.join(addresses)

    def welcome(self, connection: Connection, introduced: Hello) -> bool:
        if introduced.purpose != PURPOSE or introduced.worker not in self._rank.workers:
            return False
        self._hops.serve(connection)
        return True

    def begin(self, step: Step) -> None:
        if self._rank.samples:
            for start in step.starts:
                with self._faults.kept(start.request_id):
                    self._seeds[start.request_id] = seed_of(start.sampling), start.sampling.logprobs >= 0

    def forget(self, request_id: str) -> None:
        self._seeds.pop(request_id, None)
        self._faults.forget(request_id)

    def run(
        self,
        step: Step,
        tables: Mapping[str, list[int]],
        windowed_tables: Mapping[str, list[int]],
        on_layer: OnLayer | None,
    ) -> StepResult | None:
        begun_s = time.monotonic()
        if begun_s - self._ended_s < _NEXT_S:
            begun_s -= self._late_s
        stage_s, hop_s = self._times.step(work_of(step, self._window))
        index = self._rank.stage_index
        if not self._rank.is_first:
            begun_s = max(self._hops.wait(step.step) + hop_s[index - 1], begun_s)
        last = [self._write(each.tokens, each.position, tables[each.request_id]) for each in step.sequences]
        self._pass_layers(begun_s, stage_s[index], on_layer)
        self._ended_s = time.monotonic()
        self._late_s = self._ended_s - begun_s - stage_s[index]
        if not self._rank.is_last:
            self._hops.pass_on(step.step, self._late_s)
            return None
        if not self._rank.samples:
            return None
        return self._sample(step, last)

    def _write(self, tokens: tuple[int, ...], position: int, table: list[int]) -> int:
        """Write the states of a request's tokens to their slots; returns the last one."""
        pages = self._pages
        before = int(pages.states[_slot(table, position - 1, pages.block_tokens)]) if position else 0
        after = states(before, tokens)
        if len(after) == 1:
            pages.states[_slot(table, position, pages.block_tokens)] = after[0]
        else:
            pages.states[pages.slots(table, position, position + len(tokens))] = after
        return after[-1]

    def _pass_layers(self, begun_s: float, stage_s: float, on_layer: OnLayer | None) -> None:
        """Wait for the time that the stage takes from `begun_s` on; calls `on_layer` when each layer is
        due."""
        part = self._pages.shape.part
        if on_layer is not None:
            layer_s = stage_s / (part.end_layer - part.first_layer)
            for layer in range(part.first_layer, part.end_layer):
                _sleep_until(begun_s + (layer + 1 - part.first_layer) * layer_s, _SHORTEST_S)
                on_layer(layer, None)
        _sleep_until(begun_s + stage_s)

    def _sample(self, step: Step, last: list[int]) -> StepResult:
        tokens, logprobs = list[int](), list[TokenLogprobs | None]()
        for sequence, state in zip(step.sequences, last, strict=True):
            if not sequence.samples or sequence.request_id in self._faults:
                continue
            with self._faults.kept(sequence.request_id):
                seed, wanted = self._seeds[sequence.request_id]
                token = choose(state, seed, self.spec.vocab)
                tokens.append(token)
                logprobs.append(TokenLogprobs(chosen=0.0, top=((token, 0.0),)) if wanted else None)
        return StepResult(
            step=step.step,
            tokens=tuple(tokens),
            logprobs=tuple(logprobs) if any(logprobs) else (),
            broken=self._faults.take(each.request_id for each in step.sequences if each.samples),
        )


def work_of(step: Step, window: Window | None) -> Work:
    """The work of a step as the cost model counts it; `window` is the model's attention window."""
    prompt_tokens = attended = decodes = context = sampled = 0.0
    for sequence in step.sequences:
        count, position = len(sequence.tokens), sequence.position
        sampled += sequence.samples
        if count == 1 and sequence.index:
            decodes, context = decodes + 1, context + context_tokens(position + 1, window)
        else:
            prompt_tokens += count
            attended += attended_tokens(count, window, position)
    return Work(prompt_tokens, attended, decodes, context, sampled)


def _times(placement: Placement, replica: str) -> StepTimes:
    costs = placement.costs()
    cluster = Cluster.from_spec(resolve(placement.cluster, "cluster", Path()))
    semantics: PipelineSemantics = placement.cost_model.pipeline  # type: ignore[assignment]
    return StepTimes(placement.replica(replica), cluster, costs, semantics)


def _slot(table: list[int], position: int, block_tokens: int) -> int:
    return table[position // block_tokens] * block_tokens + position % block_tokens


def _sleep_until(at_s: float, shortest_s: float = 0.0) -> None:
    rest_s = at_s - time.monotonic()
    if rest_s > shortest_s:
        time.sleep(rest_s)
