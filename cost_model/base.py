"""The interface of cost models: seconds of a layer, bytes of a stage, bytes of a KV cache.

A stage is a tensor-parallel group of equal devices inside one node, so its time is affine in its
layers, `layers * layer_s + edge_s`, and planning relies on that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np

from cost_model.architecture import ModelArchitecture
from cost_model.hardware import Accelerator, Link
from cost_model.lengths import RequestLengths, Window

if TYPE_CHECKING:
    from cost_model.registry import CostSource

Phase = Literal["prefill", "decode"]

PREFILL_TOKENS = 2048
"""Tokens per prefill batch at which compute saturates (HexGen-2, section 2, "Batching")."""
CHUNK_TOKENS = 512
"""Prompt tokens per step while requests decode, unless `hexgen2 launch` is told otherwise."""


@dataclass(frozen=True)
class TensorGroup:
    """The devices of one stage: `degree` equal accelerators; `link` is the slowest between any two of
    them.

    attention_dp : parts of the stage that run attention for requests of their own (attention data
        parallelism), each over degree / attention_dp devices; a divisor of degree
    expert_parallel : parts that the experts of a mixture are divided among, each expert over
        degree / expert_parallel devices; a divisor of degree
    """

    accelerator: Accelerator
    degree: int
    link: Link
    attention_dp: int = 1
    expert_parallel: int = 1


class Work(NamedTuple):
    """The work of one engine step, over all its requests; times are affine in each of the two attended sums.

    prompt_tokens : tokens of prompts, whole or chunks of them
    prompt_attended : sum over these of the tokens that each attends to
    decodes : requests that make their next token
    context : sum over these of the tokens that each attends to, read from the KV cache
    sampled : requests of which the LM head makes a token
    """

    prompt_tokens: float
    prompt_attended: float
    decodes: float
    context: float
    sampled: float

    @property
    def tokens(self) -> float:
        """Tokens that pass through every layer."""
        return self.prompt_tokens + self.decodes


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one device of a stage: `fixed + layers * (per_layer + batch * per_layer_request)
    + batch * per_request` must stay within `limit`."""

    limit: float
    fixed: float
    per_layer: float
    per_layer_request: float
    per_request: float

    def needed(self, layers: int, batch: float) -> float:
        """Bytes on each device for this many layers and concurrent requests."""
        return (
            self.fixed + layers * (self.per_layer + batch * self.per_layer_request) + batch * self.per_request
        )

    def max_layers(self, batch: float) -> int:
        """The most layers that fit together with `batch` requests, 0 if none: the inverse of `needed`."""
        room = self.limit - self.fixed - batch * self.per_request
        return max(0, int(room // (self.per_layer + batch * self.per_layer_request)))

    def max_batch(self, layers: int) -> int:
        """The most requests that fit together with `layers` layers (at least one); 0 if none."""
        room = self.limit - self.fixed - layers * self.per_layer
        return max(0, int(room // (layers * self.per_layer_request + self.per_request)))


class Origin(NamedTuple):
    """Where a cost model's numbers come from.

    name : of the set of numbers; engine : that they are for (None: a mean one); source : who measured what
    """

    name: str
    engine: str | None
    source: str


class CostModel(ABC):
    """Predicts times in seconds and memory in bytes for one model under one mixture of requests.

    Parameters
    ----------
    model : the architecture
    lengths : prompt and output tokens of the requests; isl and osl are their means
    batch_cap : most concurrent requests a decode replica runs (vLLM's max_num_seqs default)
    """

    name: str
    calibration: str
    source: CostSource | None = None
    """What it was made from (cost_model/registry.py); None if by hand."""
    times_expert_parallel: ClassVar[bool] = False
    """Whether its times depend on attention_dp and expert_parallel of a group. Memory may in any case."""
    tiled: ClassVar[bool] = False
    """Whether GPUs work in whole tiles: a step of one more request may then pass fewer requests/s, and a
    token of context takes longer in a step of few decodes."""

    def __init__(self, model: ModelArchitecture, lengths: RequestLengths, batch_cap: int = 256) -> None:
        self.model, self.lengths, self.batch_cap = model, lengths, batch_cap
        self.isl, self.osl = lengths.isl, lengths.osl

    def layer_s(self, phase: Phase, group: TensorGroup, batch: float) -> float:
        """Seconds of one layer for a prefill of `batch` prompts, or for one decode step of `batch`
        requests, tensor-parallel communication included."""
        return self.layer_work_s(group, self.work(phase, batch))

    def edge_s(self, phase: Phase, group: TensorGroup, batch: float, last: bool) -> float:
        """Seconds of a stage outside its layers: a fixed step cost, and the LM head if `last`."""
        return self.edge_work_s(group, batch, last)

    def hop_s(self, phase: Phase, link: Link, batch: float) -> float:
        """Seconds to pass the activations of one prefill or one decode step to the next stage."""
        return self.hop_work_s(link, batch * self.isl if phase == "prefill" else batch)

    def fastest_batch(self, phase: Phase, group: TensorGroup, most: float) -> float:
        """The requests of a step, up to `most`, at which a layer passes most requests/s: `most`, where more
        requests never take more than in proportion. The search's bounds rest on it."""
        return most

    def most_requests_s(self, phase: Phase, group: TensorGroup, most: np.ndarray) -> np.ndarray:
        """[n] the most requests/s that pass a layer in steps of up to [n] requests."""
        best = np.array([self.fastest_batch(phase, group, each) for each in most.tolist()])
        return best / self._layers_s(phase, group, best)

    def _layers_s(self, phase: Phase, group: TensorGroup, batch: np.ndarray) -> np.ndarray:
        """`layer_s` for [n] batches."""
        none = np.zeros_like(batch)
        both = (batch, none) if phase == "prefill" else (none, batch)
        return self.layers_work_s(group, self.mixed_work(*both))  # type: ignore[arg-type]

    def work(self, phase: Phase, batch: float) -> Work:
        """The mean work of a prefill of `batch` prompts, or of a decode step of `batch` requests."""
        if phase == "prefill":
            tokens = batch * self.isl
            return Work(tokens, tokens * self._prompt_attended, 0.0, 0.0, batch)
        return Work(0.0, 0.0, batch, batch * self._context, batch)

    def mixed_work(self, chunk: float, decodes: float) -> Work:
        """The mean work of a step with a chunk, `chunk` prompts' tokens long, beside so many decodes."""
        prompt, rest = self.work("prefill", chunk), self.work("decode", decodes)
        return Work(*(a + b for a, b in zip(prompt, rest, strict=True)))

    @cached_property
    def _prompt_attended(self) -> float:
        """Tokens that a prompt's token attends to, on average."""
        return self.lengths.prompt_attended(self.model.window)

    @cached_property
    def _context(self) -> float:
        """Tokens that an output token attends to, on average."""
        return self.lengths.decode_context(self.model.window)

    @abstractmethod
    def error(self, accelerator: Accelerator) -> float:
        """The mean relative error to expect of times on such devices."""

    @property
    def origin(self) -> Origin:
        """Where its numbers come from."""
        return Origin(self.name, None, self.calibration)

    def measured(self, accelerator: Accelerator) -> bool:
        """Whether the coefficients rest on steps measured on such devices."""
        return False

    def fitted_or_not(self, group: TensorGroup) -> list[str]:
        """What the times of such a stage rest on, a line for each kind of source; empty if there is only
        one."""
        return []

    def first_token_s(self, accelerator: Accelerator) -> float:
        """Seconds that a server with such devices adds to a request's first token outside its steps."""
        return 0.0

    def tokens_per_step(self, version: str) -> float:
        """Tokens that a decode step of this version of the engine gives each request: more than one where
        several are predicted at a time."""
        return 1.0

    @abstractmethod
    def layer_work_s(self, group: TensorGroup, work: Work) -> float:
        """Seconds of one layer for a step of this work, tensor-parallel communication included."""

    def layers_work_s(self, group: TensorGroup, work: Work) -> np.ndarray:
        """[n] seconds of one layer for n steps, whose work are arrays [n]: `layer_work_s` to the last bit, in
        less time where there are many."""
        steps = zip(*(np.asarray(each).tolist() for each in work), strict=True)
        return np.array([self.layer_work_s(group, Work(*step)) for step in steps])

    def edges_work_s(self, group: TensorGroup, sampled: np.ndarray, last: bool) -> np.ndarray:
        """The same of `edge_work_s`, for [n] tokens sampled."""
        different, which = np.unique(sampled, return_inverse=True)
        return np.array([self.edge_work_s(group, each, last) for each in different.tolist()])[which]

    @abstractmethod
    def edge_work_s(self, group: TensorGroup, sampled: float, last: bool) -> float:
        """Seconds of a stage outside its layers, in a step that samples this many tokens."""

    def hop_work_s(self, link: Link, tokens: float) -> float:
        """Seconds to pass the activations of this many tokens to the next stage."""
        return link.latency_s + tokens * self.activation_bytes_per_token / link.bandwidth_bytes_s

    @abstractmethod
    def stage_memory(self, phase: Phase, group: TensorGroup, first: bool, last: bool) -> StageMemory:
        """Bytes on one device of a stage, as an affine function of layers and requests."""

    @property
    @abstractmethod
    def kv_bytes_per_layer(self) -> float:
        """Bytes of one request's prompt KV cache in one layer, all heads: what a route carries."""

    @property
    def kv_window(self) -> Window | None:
        """The window of layers that keep and move the KV cache of no other tokens; None: all tokens count."""
        return self.model.window

    @property
    def kv_tokens_moved(self) -> float:
        """Of a prompt, the tokens whose KV cache moves, on average over prompts and layers: those of
        `kv_bytes_per_layer`."""
        return self.lengths.kv_tokens_moved(self.kv_window)

    @property
    def kv_to_every_rank(self) -> bool:
        """Whether each tensor-parallel rank of a decode stage receives the whole cache of its layers (latent
        attention), rather than its own heads."""
        return False

    @property
    @abstractmethod
    def activation_bytes_per_token(self) -> float:
        """Bytes of one token's activations between two layers: what a pipeline hop carries."""

    @abstractmethod
    def prefill_batch(self) -> float:
        """Prompts per prefill step of a busy replica; below 1 where a prompt takes several steps."""
