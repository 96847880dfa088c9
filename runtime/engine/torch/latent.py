"""Multi-head latent attention between its projections: what the KV cache keeps, and what heads make of it.

The cache has one vector for each token and layer, the latent and behind it the rotated part of the key
(DeepSeek-V2, arXiv:2405.04434, section 2.1.2). Attention works on these vectors, as if they were keys and
values of a single KV head: what would expand them to keys is applied to queries, what would expand them to
values is applied to results. Such a head is three times as wide, though, so that most chunks of prompts take
less time with keys and values expanded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from cost_model.architecture import LatentAttention
from runtime import native
from runtime.engine.torch.attention.base import Batch, Scoring
from runtime.engine.torch.attention.cpu import Chunk, CpuAttention, Plan
from runtime.engine.torch.models.rope import Rotary
from runtime.kv_cache.pool import CacheShape

_LATENT_EPS = 1e-6  # of the norms of latent vectors, whatever rms_norm_eps is
_BLOCK_TOKENS = 16
_SHORTEST = 8
"""Tokens of a chunk for which keys and values are expanded."""


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """The heads of one layer on one rank, and what their attention depends on.

    Attributes
    ----------
    expansion : of latents to keys and values, [heads x (nope_dim + value_dim), latent_rank]
    norm : weight of the latent's norm, [latent_rank]
    interleaved : whether values that rotate together are neighbours in the checkpoint
    """

    sizes: LatentAttention
    heads: int
    expansion: torch.Tensor
    norm: torch.Tensor
    rotary: Rotary
    interleaved: bool
    scoring: Scoring

    def expansions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """To keys, [heads, nope_dim, latent_rank], and to values, [heads, value_dim, latent_rank]."""
        parts = (self.sizes.nope_dim, self.sizes.value_dim)
        keys, values = self.expansion.view(self.heads, sum(parts), -1).split(parts, dim=1)
        return keys, values


class LatentHeadsAttention(ABC):
    """Attention of one layer's heads over latents."""

    @abstractmethod
    def __call__(self, queries: torch.Tensor, kept: torch.Tensor, layer: int, batch: Batch) -> torch.Tensor:
        """Store what the cache keeps of a step's tokens, and attend.

        Parameters
        ----------
        queries : [tokens, heads x (nope_dim + rope_dim)]; tokens need not be adjacent
        kept : [tokens, latent_rank + rope_dim], before the norm and the rotation

        Returns
        -------
        [tokens, heads x value_dim]
        """


def latent_rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The norm of latent vectors, [tokens, rank], whose rows need not be adjacent."""
    if native.serves(x.dtype, x.device):
        return native.rms_norm(x, weight, _LATENT_EPS)
    return F.rms_norm(x, x.shape[-1:], None, _LATENT_EPS).mul_(weight)


def latent_attention(heads: LatentHeads, shape: CacheShape) -> LatentHeadsAttention:
    """By compiled kernels where they serve such a cache, otherwise by torch's operators."""
    even = heads.sizes.nope_dim % 2 == 0 and heads.sizes.latent_rank % 2 == 0
    return (ByKernels if CpuAttention.serves(shape) and even else ByOperators)(heads)


class ByOperators(LatentHeadsAttention):
    """By torch's operators."""

    def __init__(self, heads: LatentHeads) -> None:
        self._of = heads
        self._to_keys, to_values = heads.expansions()
        self._to_values = to_values.transpose(1, 2)

    def __call__(self, queries: torch.Tensor, kept: torch.Tensor, layer: int, batch: Batch) -> torch.Tensor:
        of, rank = self._of, self._of.sizes.latent_rank
        nope, turning = queries.unflatten(1, (of.heads, -1)).split(
            (of.sizes.nope_dim, of.sizes.rope_dim), dim=2
        )
        query = torch.cat([_per_head(nope, self._to_keys), self._turned(turning)], dim=2)
        own = latent_rms(kept[:, :rank], of.norm).unsqueeze(1)
        key = torch.cat([own, self._turned(kept[:, None, rank:])], dim=2)
        batch.attention.store(key, key, layer, batch)
        seen = batch.attention.attend(query, key, key, layer, batch, of.scoring)
        return _per_head(seen.unflatten(1, (of.heads, -1))[..., :rank], self._to_values).flatten(1)

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        """Rotated parts of heads, [tokens, heads, rope_dim], in halves where the checkpoint has pairs."""
        x = x.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2) if self._of.interleaved else x.clone()
        self._of.rotary.rotate(x)
        return x


class ByKernels(LatentHeadsAttention):
    """By compiled kernels on CPUs, which also expand keys and values for chunks of prompts."""

    def __init__(self, heads: LatentHeads) -> None:
        self._of, sizes = replace(heads, expansion=torch.empty(0)), heads.sizes  # which is kept in panels
        to_keys, to_values = heads.expansions()
        self._to_latents = native.pack_heads(to_keys.transpose(1, 2))
        self._to_values = native.pack_heads(to_values)
        self._wide = sizes.latent_rank + sizes.rope_dim
        self._narrow = _compiled_dim(max(sizes.nope_dim + sizes.rope_dim, sizes.value_dim), self._wide)

    def __call__(self, queries: torch.Tensor, kept: torch.Tensor, layer: int, batch: Batch) -> torch.Tensor:
        own = queries.view(len(queries), self._of.heads, -1)
        plan: Plan = batch.plan(batch.attention, None)  # type: ignore[arg-type]
        expanded = [chunk for chunk in plan.chunks if self._expands(chunk)]
        if expanded:
            return self._attend_expanded(own, kept, layer, batch, expanded)
        query = native.empty((*own.shape[:2], self._wide), own.dtype)
        key = self._store(own, kept, query[..., self._of.sizes.latent_rank :], layer, batch)
        return self._attend_latents(own, query, key, layer, batch, None)

    def _expands(self, chunk: Chunk) -> bool:
        """Whether a chunk takes fewer operations with keys and values expanded: the latents before it have to
        be expanded, too, which its own queries and results would otherwise pass through."""
        length, sizes = chunk.end - chunk.first, self._of.sizes
        attended = length * chunk.offset + length * (length + 1) // 2
        saved = 2 * attended * (self._wide - self._narrow)
        return length >= _SHORTEST and saved > chunk.offset * sizes.latent_rank * (
            sizes.nope_dim + sizes.value_dim
        )

    def _store(
        self, queries: torch.Tensor, kept: torch.Tensor, turned: torch.Tensor, layer: int, batch: Batch
    ) -> torch.Tensor:
        """Rotate parts of queries, and store what the cache keeps, which is returned."""
        of = self._of
        angles = of.rotary.cosines, of.rotary.sines
        key = native.turn_latents(queries, kept, of.norm, _LATENT_EPS, *angles, of.interleaved, turned)
        key = key.unsqueeze(1)
        batch.attention.store(key, key, layer, batch)
        return key

    def _attend_latents(
        self,
        queries: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        layer: int,
        batch: Batch,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend to latents; `query` [tokens, heads, latent_rank + rope_dim] has the rotated parts already.

        Parameters
        ----------
        rows : that count; None: all
        """
        sizes, heads = self._of.sizes, self._of.heads
        nope, rank = queries[..., : sizes.nope_dim], sizes.latent_rank
        if rows is None:
            native.multiply_heads(nope, self._to_latents, query[..., :rank])
        else:
            applied = native.empty((len(rows), heads, rank), query.dtype)
            query[rows, :, :rank] = native.multiply_heads(nope[rows], self._to_latents, applied)
        seen = batch.attention.attend(query, key, key, layer, batch, self._of.scoring)
        results = seen.view(len(seen), heads, -1)[..., :rank]
        results = results if rows is None else results[rows]
        values = native.empty((len(results), heads, sizes.value_dim), query.dtype)
        return native.multiply_heads(results, self._to_values, values).view(len(results), -1)

    def _attend_expanded(
        self,
        queries: torch.Tensor,
        kept: torch.Tensor,
        layer: int,
        batch: Batch,
        expanded: Sequence[Chunk],
    ) -> torch.Tensor:
        """A step some of whose chunks have their keys and values expanded."""
        sizes, (tokens, heads, _) = self._of.sizes, queries.shape
        turned = queries.new_empty(tokens, heads, sizes.rope_dim)
        key = self._store(queries, kept, turned, layer, batch)
        output = queries.new_empty(tokens, heads, sizes.value_dim)
        others = torch.ones(tokens, dtype=torch.bool)
        for chunk in expanded:
            rows = slice(chunk.first, chunk.end)
            others[rows] = False
            asked = queries.new_zeros(chunk.end - chunk.first, heads, self._narrow)
            asked[..., : sizes.nope_dim] = queries[rows, :, : sizes.nope_dim]
            asked[..., sizes.nope_dim : sizes.nope_dim + sizes.rope_dim] = turned[rows]
            self._attend_chunk(asked, chunk, layer, batch, output[rows])
        if others.any():
            plan: Plan = batch.plan(batch.attention, None)  # type: ignore[arg-type]
            left = tuple(chunk for chunk in plan.chunks if others[chunk.first])
            rest, numbers = replace(batch, _plans={None: Plan(plan.spans, left)}), others.nonzero()[:, 0]
            query = queries.new_empty(tokens, heads, self._wide)
            query[numbers, :, sizes.latent_rank :] = turned[numbers]
            found = self._attend_latents(queries, query, key, layer, rest, numbers)
            output[numbers] = found.view(len(numbers), heads, -1)
        return output.flatten(1)

    def _attend_chunk(
        self, asked: torch.Tensor, chunk: Chunk, layer: int, batch: Batch, output: torch.Tensor
    ) -> None:
        """Attend from a chunk's queries, [length, heads, narrow], to what the cache has of its request,
        expanded to keys and values."""
        cache, of, sizes = batch.attention.cache, self._of, self._of.sizes
        end = chunk.offset + len(asked)
        slots = torch.from_numpy(cache.slots(chunk.table.tolist(), 0, end))
        stored = cache.keys_values(layer)[0][slots]
        latents = cache.shape.format.unpack(stored, asked.dtype).view(end, -1)
        low = latents[:, : sizes.latent_rank].contiguous().unsqueeze(1)
        turned = latents[:, sizes.latent_rank :].unsqueeze(1)
        blocks = -(-end // _BLOCK_TOKENS)
        keys, values = asked.new_zeros(2, blocks * _BLOCK_TOKENS, 1, self._narrow)
        keys[:end, :, sizes.nope_dim : sizes.nope_dim + sizes.rope_dim] = turned
        seen = keys, values, np.arange(blocks, dtype=np.int32), chunk.offset, None, _BLOCK_TOKENS
        found = asked.new_empty(len(asked), 1, self._narrow)
        for head in range(of.heads):  # one after the other, so that what is expanded stays in the caches
            own = slice(head, head + 1)
            to_keys = native.transposed_head(self._to_latents[head], sizes.latent_rank)
            native.multiply_heads(low, to_keys, keys[:end, :, : sizes.nope_dim])
            native.multiply_heads(low, self._to_values[own], values[:end, :, : sizes.value_dim])
            native.attend_chunk(asked[:, own], *seen, found, of.scoring.scale, of.scoring.cap)
            output[:, own] = found[..., : sizes.value_dim]


def _compiled_dim(least: int, most: int) -> int:
    """The smallest head size in this range for which attention is compiled; otherwise `most`."""
    return next((dim for dim in range(least, most) if native.attends_to(dim)), most)


def _per_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, in] by weight [heads, in, out] -> [tokens, heads, out]."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
