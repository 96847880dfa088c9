"""What every cost model answers: times of a layer, bytes of a stage, bytes of a KV cache.

A stage is a tensor-parallel group of equal devices inside one node, so its time is affine in its
layers: `layers * layer_s + edge_s`. Planning relies on that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from cost_model.architecture import ModelArchitecture
from cost_model.hardware import Accelerator, Link
from cost_model.lengths import RequestLengths

Phase = Literal["prefill", "decode"]

PREFILL_TOKENS = 2048
"""Tokens per prefill batch at which compute saturates (HexGen-2, section 2, "Batching")."""

PREFILL_BATCHES_HELD = 2
"""A prefill replica holds the KV cache of the batch it computes and of the one it sends."""


@dataclass(frozen=True)
class TensorGroup:
    """The devices of one stage: `degree` equal accelerators, `link` the slowest pair among them."""

    accelerator: Accelerator
    degree: int
    link: Link


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one device of a stage: `fixed + layers * (per_layer + batch * per_layer_request)
    + batch * per_request` must stay within `limit`."""

    limit: float
    fixed: float
    per_layer: float
    per_layer_request: float
    per_request: float

    def needed(self, layers: int, batch: int) -> float:
        """Bytes on each device for so many layers and concurrent requests."""
        return (
            self.fixed + layers * (self.per_layer + batch * self.per_layer_request) + batch * self.per_request
        )

    def max_layers(self, batch: int) -> int:
        """Most layers that fit beside `batch` requests (0 if none): the inverse of `needed`, to rounding."""
        room = self.limit - self.fixed - batch * self.per_request
        return max(0, int(room // (self.per_layer + batch * self.per_layer_request)))

    def max_batch(self, layers: int) -> int:
        """Most requests that fit beside `layers` layers, at least one (0 if none): likewise."""
        room = self.limit - self.fixed - layers * self.per_layer
        return max(0, int(room // (layers * self.per_layer_request + self.per_request)))


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

    def __init__(self, model: ModelArchitecture, lengths: RequestLengths, batch_cap: int = 256) -> None:
        self.model, self.lengths, self.batch_cap = model, lengths, batch_cap
        self.isl, self.osl = lengths.isl, lengths.osl

    @abstractmethod
    def layer_s(self, phase: Phase, group: TensorGroup, batch: float) -> float:
        """Seconds of one layer for a prefill of `batch` prompts, or for one decode step of `batch`
        requests, tensor-parallel communication included."""

    @abstractmethod
    def edge_s(self, phase: Phase, group: TensorGroup, batch: float, last: bool) -> float:
        """Seconds of a stage outside its layers: a fixed step cost, and the LM head if `last`."""

    @abstractmethod
    def boundary_s(self, phase: Phase, link: Link, batch: float) -> float:
        """Seconds to pass the activations of one prefill or one decode step to the next stage."""

    @abstractmethod
    def stage_memory(self, phase: Phase, group: TensorGroup, first: bool, last: bool) -> StageMemory:
        """Bytes on one device of a stage, as an affine function of layers and requests."""

    @property
    @abstractmethod
    def kv_bytes_per_layer(self) -> float:
        """Bytes of one request's prompt KV cache in one layer, all heads: what a route carries."""

    @property
    @abstractmethod
    def activation_bytes_per_token(self) -> float:
        """Bytes of one token's activations between two layers: what a pipeline hop carries."""

    @abstractmethod
    def prefill_batch(self) -> int:
        """Prompts per prefill step when the replica is busy."""
