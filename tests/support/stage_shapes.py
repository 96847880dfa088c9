"""Stages of workers with made-up names."""

from __future__ import annotations

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
