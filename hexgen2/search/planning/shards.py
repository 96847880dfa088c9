"""Shards: the weights that one GPU holds, and how many bytes of them two shards have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cost_model.architecture import ModelArchitecture


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `degree` tensor-parallel ranks over layers [first, end) of a model.

    It holds the share [rank / degree, (rank + 1) / degree) of each layer, and of the token table or the LM
    head if it is at that end of the pipeline. A KV head that several ranks copy counts once. With
    attention groups it holds the whole share of its group's attention; a rank of other degrees has nothing
    that this one could keep."""

    first: int
    end: int
    rank: int
    degree: int
    at_start: bool
    at_end: bool
    attention_dp: int = 1
    expert_parallel: int = 1


def shards_of(stages: Sequence[tuple[int, ...]]) -> list[list[Shard]]:
    """The shards of a replica's stages (tensor degree, layers, and the degrees of attention and experts if
    they are not 1), by stage and rank."""
    shards, first, last = [], 0, len(stages) - 1
    for s, (degree, layers, *rest) in enumerate(stages):
        end = first + layers
        ends = (s == 0, s == last)
        shards.append([Shard(first, end, rank, degree, *ends, *rest) for rank in range(degree)])
        first = end
    return shards


def shard_bytes(model: ModelArchitecture, shard: Shard) -> float:
    """Bytes of a shard's weights."""
    return shared_bytes(model, shard, shard)


def shared_bytes(model: ModelArchitecture, wanted: Shard, held: Shard) -> float:
    """Bytes of weights that a GPU with one shard does not have to load for another."""
    degrees = (wanted.attention_dp, wanted.expert_parallel)
    if degrees != (held.attention_dp, held.expert_parallel):
        return 0.0
    if max(degrees) > 1 and (wanted.degree, wanted.rank) != (held.degree, held.rank):
        return 0.0
    low = max(wanted.rank / wanted.degree, held.rank / held.degree)
    high = min((wanted.rank + 1) / wanted.degree, (held.rank + 1) / held.degree)
    if high - low <= 1e-12:
        return 0.0
    layers = max(0, min(wanted.end, held.end) - max(wanted.first, held.first))
    params = 0
    if wanted.at_start and held.at_start:
        params += model.embedding_params - (model.head_params if model.tied_embeddings else 0)
    if wanted.at_end and held.at_end:
        params += model.norm_params + (0 if model.tied_embeddings else model.head_params)
    # A tied head is the token table, which both ends of the pipeline hold.
    if model.tied_embeddings and (wanted.at_start or wanted.at_end) and (held.at_start or held.at_end):
        params += model.head_params
    layer_bytes = model.layer_bytes + (wanted.attention_dp - 1) * model.attention_bytes
    return (high - low) * (layers * layer_bytes + params * model.plain_bytes)
