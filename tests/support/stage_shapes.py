"""Stages of workers with generated names."""

from __future__ import annotations

from runtime.kv_cache.layout import held
from runtime.protocol.message import StageShape


def stages(name: str, shape: list[tuple[int, int, int]]) -> tuple[StageShape, ...]:
    """Stages of (tensor-parallel degree, first layer, end layer)."""
    return tuple(
        StageShape(
            workers=tuple(f"{name}/{number}.{rank}" for rank in range(degree)),
            first_layer=first,
            end_layer=end,
        )
        for number, (degree, first, end) in enumerate(shape)
    )


def replica_cells(replica: tuple[StageShape, ...], kv_heads: int) -> int:
    """The number of (layer, head) cells that all workers of a replica hold together, where replicated heads
    count each time. This is how many cells a request's transfer to the replica carries."""
    return sum(held(replica, worker, kv_heads).cells for stage in replica for worker in stage.workers)
