"""Cells of a KV cache on the move, and how they are cut.

A slice has its bytes in the order [layers, sides, tokens, heads, head_dim]; a side is keys or values. Each
end cuts them as it likes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from runtime.protocol.between_workers import KvSlice

PIECE_BYTES = 1024 * 1024  # fits a core's own cache: a staged copy then costs little
LIMIT_BYTES = 64 * 1024 * 1024  # no slice is as large


@dataclass(frozen=True, slots=True)
class Piece:
    """Layers [first, end) x sides [first, end) x tokens [first, end) of a slice, all its heads."""

    first_layer: int
    end_layer: int
    first_side: int
    end_side: int
    first_token: int
    end_token: int
    bytes: int


def pieces(header: KvSlice, limit_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """Cut a slice in the order of its bytes: several layers at once where they are small, else some tokens of
    one layer's keys or values."""
    layers, tokens = header.end_layer - header.first_layer, header.end_token - header.first_token
    row_bytes = header.payload_bytes // (2 * layers * tokens)
    layer_bytes = 2 * tokens * row_bytes
    if layer_bytes <= limit_bytes:
        step = limit_bytes // layer_bytes
        for layer in range(header.first_layer, header.end_layer, step):
            end = min(layer + step, header.end_layer)
            yield Piece(layer, end, 0, 2, header.first_token, header.end_token, (end - layer) * layer_bytes)
        return
    step = max(1, limit_bytes // row_bytes)
    for layer in range(header.first_layer, header.end_layer):
        for side in (0, 1):
            for token in range(header.first_token, header.end_token, step):
                end = min(token + step, header.end_token)
                yield Piece(layer, layer + 1, side, side + 1, token, end, (end - token) * row_bytes)


def token_pieces(header: KvSlice, limit_bytes: int) -> Iterator[Piece]:
    """Cut a slice at tokens, all its layers at once: where the order of the bytes is free."""
    token_bytes = header.payload_bytes // (header.end_token - header.first_token)
    step = max(1, limit_bytes // token_bytes)
    for token in range(header.first_token, header.end_token, step):
        end = min(token + step, header.end_token)
        yield Piece(header.first_layer, header.end_layer, 0, 2, token, end, (end - token) * token_bytes)


def slice_bytes(header: KvSlice, cell_bytes: int) -> int:
    """The payload that a header's ranges make, 0 if one is empty; a cell is one layer, head and token."""
    layers, heads = header.end_layer - header.first_layer, header.end_head - header.first_head
    tokens = header.end_token - header.first_token
    return layers * heads * tokens * cell_bytes if min(layers, heads, tokens) > 0 else 0
