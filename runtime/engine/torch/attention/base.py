"""The interface of attention over a paged KV cache, and the batch that one step attends with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from runtime import native
from runtime.kv_cache.pool import CacheShape, PagedCache

if TYPE_CHECKING:
    from runtime.engine.torch.models.rope import Rotary


class Single(NamedTuple):
    """A sequence with one token in a step (a decode): its row of the batch, the tokens up to and including
    it, and the sequence's blocks."""

    row: int
    context: int
    table: Sequence[int]


class Part(NamedTuple):
    """A sequence with several tokens in a step (a chunk of a prompt): rows [first, first + length) of the
    batch, the position of its first token, and the sequence's blocks."""

    first: int
    length: int
    offset: int
    table: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """Which tokens a token of a layer attends to, and how their scores become weights.

    Attributes
    ----------
    window : a token attends to the last `window` tokens, including itself; None: to all
    scale : of scores; None: head_dim ** -0.5
    cap : scores are squeezed into (-cap, cap), as cap x tanh(score / cap); None: they stay as they are
    sinks : for each query head one more score, whose weight goes to no value, [heads]; None: there are none
    """

    window: int | None = None
    scale: float | None = None
    cap: float | None = None
    sinks: torch.Tensor | None = None


PLAIN = Scoring()


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one step, sequence after sequence.

    Attributes
    ----------
    tokens, positions : [total] int64
    slots : where each token's keys and values go in the cache, [total] int64
    sampled : rows after which a token is sampled, [samples] int64
    lengths, offsets : number of tokens of each sequence, and the position of its first one
    tables : each sequence's blocks
    attention : attends over the cache that holds these blocks
    samples_each : `sampled` are all rows, in their order
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sampled: torch.Tensor
    lengths: tuple[int, ...]
    offsets: tuple[int, ...]
    tables: tuple[Sequence[int], ...]
    attention: LayerAttention
    samples_each: bool = False
    _plans: dict[int | None, Any] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        attention: LayerAttention,
        tokens: Sequence[Sequence[int]],
        offsets: Sequence[int],
        tables: Sequence[Sequence[int]],
        samples: Sequence[bool],
    ) -> Batch:
        """Lay out a step.

        Parameters
        ----------
        tokens : of each sequence
        offsets : position of each sequence's first token, so the cache has that many of its tokens already
        tables : each sequence's blocks, including those of the new tokens
        samples : whether a token is sampled after a sequence's last one
        """
        cache = attention.cache
        device = cache.shape.device
        lengths = np.fromiter(map(len, tokens), dtype=np.int64, count=len(tokens))
        ends = lengths.cumsum()
        flat = np.fromiter((token for part in tokens for token in part), dtype=np.int64, count=int(ends[-1]))
        starts = np.asarray(offsets, dtype=np.int64)
        positions = np.arange(len(flat)) + np.repeat(starts - (ends - lengths), lengths)
        return cls(
            tokens=torch.from_numpy(flat).to(device),
            positions=torch.from_numpy(positions).to(device),
            slots=_slots(cache, lengths, offsets, tables),
            sampled=torch.from_numpy(ends[np.asarray(samples, dtype=bool)] - 1).to(device),
            lengths=tuple(lengths.tolist()),
            offsets=tuple(offsets),
            tables=tuple(tables),
            attention=attention,
            samples_each=len(flat) == len(tokens) and all(samples),
        )

    def rows_sampled(self, rows: torch.Tensor) -> torch.Tensor:
        """Of [total, width], the rows after which a token is sampled."""
        return rows if self.samples_each else rows[self.sampled]

    def over(self, attention: LayerAttention, tables: Sequence[Sequence[int]]) -> Batch:
        """The same step over another cache, in which the sequences have these blocks."""
        slots = _slots(attention.cache, self.lengths, self.offsets, tables)
        return replace(self, slots=slots, tables=tuple(tables), attention=attention, _plans={})

    def plan(self, attention: Attention, window: int | None) -> Any:
        """An attention's plan for a window, made once per step for all layers that have this window."""
        if window not in self._plans:
            singles, parts = self._split()
            self._plans[window] = attention.plan(singles, parts, window)
        return self._plans[window]

    def _split(self) -> tuple[list[Single], list[Part]]:
        singles, parts, first = list[Single](), list[Part](), 0
        for length, offset, table in zip(self.lengths, self.offsets, self.tables, strict=True):
            if length == 1:
                singles.append(Single(first, offset + 1, table))
            else:
                parts.append(Part(first, length, offset, table))
            first += length
        return singles, parts


def _slots(
    cache: PagedCache, lengths: Iterable[int], offsets: Sequence[int], tables: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Where the new tokens of each sequence go in a cache, [total] int64."""
    places = [cache.slots(t, o, o + n) for t, o, n in zip(tables, offsets, lengths, strict=True)]
    return torch.from_numpy(np.concatenate(places)).to(cache.shape.device)


class LayerAttention(ABC):
    """What a layer of a model asks of attention: decodes and chunks of prompts together, in ragged batches.

    In each layer a model first stores keys and values, with `store` or `rotate_and_store`, then attends.
    Layer numbers are global; heads are those of this worker. `heads` is a multiple of `kv_heads`:
    query head h attends to KV head h // (heads // kv_heads). All tensors have the dtype and
    device of the cache's shape, but sinks, which are float32.

    Where the cache is packed, a step attends to what was packed, its own tokens included: so a token's result
    does not depend on how its prompt was divided into chunks.

    Attributes
    ----------
    cache : the blocks that a batch names, [layers, sides, slots, kv_heads, width] in its shape's format; keys
        first, then values
    """

    def __init__(self, cache: PagedCache) -> None:
        self.cache = cache

    @abstractmethod
    def store(self, key: torch.Tensor, value: torch.Tensor, layer: int, batch: Batch) -> None:
        """Write a step's keys and values, [total, kv_heads, head_dim], to a layer of the cache."""

    @abstractmethod
    def rotate_and_store(self, heads: torch.Tensor, rotary: Rotary, layer: int, batch: Batch) -> None:
        """Rotate query and key heads by their positions, in place, and write keys and values to the cache.

        Parameters
        ----------
        heads : [total, heads + 2 x kv_heads, head_dim], contiguous: queries, keys, values
        rotary : holds the angles of this step
        """

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        batch: Batch,
        scoring: Scoring = PLAIN,
    ) -> torch.Tensor:
        """Attend from each token of the batch to all tokens of its sequence up to and including itself.

        Parameters
        ----------
        query : [total, heads, head_dim]
        key, value : [total, kv_heads, head_dim], which the cache holds already

        Returns
        -------
        [total, heads x head_dim]
        """


class Attention(LayerAttention):
    """Attention over one worker's KV cache. Implementations raise nothing of their own: `serves` says
    beforehand what they can compute."""

    def __init__(self, cache: PagedCache) -> None:
        super().__init__(cache)
        self._compiled = native.serves(cache.shape.dtype, cache.shape.device)

    @classmethod
    @abstractmethod
    def serves(cls, shape: CacheShape) -> bool:
        """Whether this implementation can attend over such a cache on this machine."""

    @abstractmethod
    def plan(self, singles: Sequence[Single], parts: Sequence[Part], window: int | None) -> Any:
        """What all layers of a step share, such as slots and masks. `attend` gets it by `Batch.plan`.

        Parameters
        ----------
        window : a token attends to the last `window` tokens, including itself; None: to all
        """

    def store(self, key: torch.Tensor, value: torch.Tensor, layer: int, batch: Batch) -> None:
        keys, values = self.cache.keys_values(layer)
        self._store(key, keys, batch)
        if self.cache.shape.sides > 1:
            self._store(value, values, batch)

    def _store(self, heads: torch.Tensor, cached: torch.Tensor, batch: Batch) -> None:
        """Write [total, kv_heads, head_dim] to one side of a layer."""
        form = self.cache.shape.format
        if self._compiled and heads[0].is_contiguous():
            native.store_heads(heads, batch.slots, cached, form.kind)
        else:
            cached.index_copy_(0, batch.slots, form.pack(heads))

    def rotate_and_store(self, heads: torch.Tensor, rotary: Rotary, layer: int, batch: Batch) -> None:
        if self._compiled:
            cached = self.cache.keys_values(layer)
            kind = self.cache.shape.format.kind
            native.turn_and_store(heads, rotary.cosines, rotary.sines, batch.slots, *cached, kind)
            return
        kv_heads = self.cache.shape.heads
        rotary.rotate(heads[:, :-kv_heads])
        self.store(heads[:, -2 * kv_heads : -kv_heads], heads[:, -kv_heads:], layer, batch)


def reach(context: int, window: int | None) -> int:
    """How many of a context's tokens its last token attends to."""
    return context if window is None else min(context, window)
