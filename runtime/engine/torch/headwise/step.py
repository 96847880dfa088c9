"""Attention of one step on a stage's worker whose KV heads are on several devices.

For decodes on an attention worker, the worker sends query and new key and value, attends to its own heads
meanwhile, and gets the result. Prompts it computes itself, in a cache for one layer; keys and values of heads
elsewhere go there, and those of earlier chunks come back. What heads that are gone attend to is NaN, which
stays in the rows of their request: so the last stage can tell whose tokens are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from runtime.engine.torch.attention.base import PLAIN, Batch, LayerAttention, Scoring
from runtime.engine.torch.headwise.heads import OWN, Heads
from runtime.engine.torch.headwise.pages import HeadPages, Key, one_head
from runtime.engine.torch.headwise.remote import RemoteHeads
from runtime.kv_cache.pool import PagedCache
from runtime.protocol.between_workers import SequenceStep

if TYPE_CHECKING:
    from runtime.engine.torch.models.rope import Rotary


@dataclass(slots=True)
class _Rows:
    """Heads of a step.

    Attributes
    ----------
    rows : of each: its name, the position of its first new token, and their number
    firsts : its first new token among all (token, head) pairs of the step
    """

    rows: list[tuple[Key, int, int]] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)

    def add(self, row: tuple[Key, int, int], first: int) -> None:
        self.rows.append(row)
        self.firsts.append(first)

    def pairs(self, heads: int, device: torch.device) -> torch.Tensor:
        """The (token, head) pairs, int64; a token's are neighbours, `heads` of them."""
        runs = [
            torch.arange(first, first + count * heads, heads)
            for first, (_, _, count) in zip(self.firsts, self.rows, strict=True)
        ]
        return torch.cat(runs or [torch.empty(0, dtype=torch.int64)]).to(device)


@dataclass(frozen=True, slots=True)
class _Layer:
    """What a layer attends with, by (token, head) pair: queries [pairs, query_heads, head_dim], keys and
    values [pairs, 1, head_dim]; outputs have the shape of the queries."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    layer: int
    window: int | None


class _Local:
    """Heads whose cache is in this process."""

    def __init__(self, pages: HeadPages, rows: _Rows, heads: int) -> None:
        self.pages, self._pairs = pages, rows.pairs(heads, pages.cache.shape.device)
        self._batch = pages.batch(rows.rows)

    def attend(self, at: _Layer, layer: int) -> None:
        """Store keys and values in a layer of the cache, and attend."""
        query, key, value = (each[self._pairs] for each in (at.query, at.key, at.value))
        self.pages.store(key, value, layer, self._batch)
        at.output[self._pairs] = self.pages.attend(query, key, value, layer, self._batch, at.window)


class _Remote:
    """Heads on one attention worker: of decodes, and of prompts whose keys and values go there."""

    def __init__(self, heads: Heads, device: int, decodes: _Rows, prompts: _Rows) -> None:
        self._heads, self._device, self._prompts = heads, device, prompts.rows
        count, where = heads.lane.heads, heads.one_head.device
        self._decodes = decodes.pairs(count, where)
        self._all = torch.cat([self._decodes, prompts.pairs(count, where)])
        self._lost = False
        self._ask(lambda there: there.begin(decodes.rows, prompts.rows))

    def send(self, at: _Layer) -> None:
        """Send what it needs for a layer."""
        query, key, value = at.query[self._decodes], at.key[self._all], at.value[self._all]
        self._ask(lambda there: there.ask(at.layer, at.window, query, key, value))

    def receive(self, at: _Layer, scratch: HeadPages | None) -> None:
        """Take its answer: outputs of decodes, and what the caches of prompts have had before."""

        def answer(there: RemoteHeads) -> None:
            if len(self._decodes):
                at.output[self._decodes] = there.attended(len(self._decodes))
            for key, first, _ in self._prompts:
                if first and scratch is not None:
                    scratch.write(key, 0, first, there.before(first))

        self._ask(answer)

    def spoil(self, output: torch.Tensor) -> None:
        """NaN for all heads, if the attention worker is lost."""
        if self._lost:
            output[self._all] = torch.nan

    def _ask(self, call: Callable[[RemoteHeads], None]) -> None:
        if not self._lost:
            try:
                call(self._heads.remote(self._device))
            except OSError as error:
                self._lost = True
                self._heads.lose(self._device, error)


class StepAttention(LayerAttention):
    """Attends to the heads of one step, wherever they are; `store` has nothing to do."""

    def __init__(self, heads: Heads, sequences: Sequence[SequenceStep]) -> None:
        super().__init__(heads.cache)
        self._heads, device = heads.lane.heads, heads.one_head.device
        own, gone, prompts = _Rows(), _Rows(), _Rows()
        remote: dict[int, tuple[_Rows, _Rows]] = {}
        token = 0
        for sequence in sequences:
            count = len(sequence.tokens)
            for head in range(self._heads):
                row = (sequence.request_id, head), sequence.position, count
                first, where = token * self._heads + head, heads.device_of(sequence.request_id, head)
                if where is None:
                    gone.add(row, first)
                elif where == OWN:
                    own.add(row, first)
                else:
                    remote.setdefault(where, (_Rows(), _Rows()))[count > 1].add(row, first)
                    if count > 1:
                        prompts.add(row, first)
            token += count
        self._gone = gone.pairs(self._heads, device)
        self._own = _Local(heads.own, own, self._heads) if own.rows else None
        self._prompts = None
        if prompts.rows:
            self._prompts = _Local(_scratch(heads, prompts.rows), prompts, self._heads)
        self._remote = [_Remote(heads, where, *rows) for where, rows in remote.items()]

    def store(self, key: torch.Tensor, value: torch.Tensor, layer: int, batch: Batch) -> None:
        """Nothing: `attend` stores keys and values where their heads are."""

    def rotate_and_store(self, heads: torch.Tensor, rotary: Rotary, layer: int, batch: Batch) -> None:
        rotary.rotate(heads[:, : -self._heads])

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        batch: Batch,
        scoring: Scoring = PLAIN,
    ) -> torch.Tensor:
        total, heads, dim = query.shape
        if scoring.scale is not None:
            query = query * (scoring.scale * dim**0.5)
        pairs = total * self._heads
        queries = query.reshape(pairs, heads // self._heads, dim)
        keys, values = key.reshape(pairs, 1, dim), value.reshape(pairs, 1, dim)
        at = _Layer(queries, keys, values, torch.empty_like(queries), layer, scoring.window)
        for share in self._remote:
            share.send(at)
        if self._own is not None:
            self._own.attend(at, layer)
        for share in self._remote:
            share.receive(at, self._prompts.pages if self._prompts else None)
        if self._prompts is not None:
            self._prompts.attend(at, 0)
        for share in self._remote:
            share.spoil(at.output)
        at.output[self._gone] = torch.nan
        return at.output.view(total, heads * dim)


def _scratch(heads: Heads, rows: Sequence[tuple[Key, int, int]]) -> HeadPages:
    """A cache of one layer for prompts whose heads are kept elsewhere."""
    size = heads.cache.block_tokens
    needed = [-(-(first + count) // size) for _, first, count in rows]
    pages = HeadPages(PagedCache(one_head(heads.one_head, (0, 1)), sum(needed), size))
    begin = 0
    for (key, _, _), blocks in zip(rows, needed, strict=True):
        pages.grant(key, range(begin, begin + blocks))
        begin += blocks
    return pages
