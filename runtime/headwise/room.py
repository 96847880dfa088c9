"""How many tokens a replica with attention workers holds: in whole blocks, of whole heads."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from runtime.protocol.to_workers import HeadLane

Without = Collection[str]
"""Attention workers that are lost."""


def blocks_of(lane: HeadLane, without: Without = ()) -> list[int]:
    """Blocks of one head that each device of a lane has."""
    return [0 if device.worker in without else device.blocks for device in lane.devices]


def budget_tokens(lanes: Sequence[HeadLane], block_tokens: int, without: Without = ()) -> int:
    """Tokens of all requests together, if their heads could be divided at will."""
    return min(sum(blocks_of(lane, without)) // lane.heads for lane in lanes) * block_tokens


def largest_tokens(lanes: Sequence[HeadLane], block_tokens: int, without: Without = ()) -> int:
    """Tokens of the longest request that a replica holds when nothing else is there. Each head is on one
    device, so less than the budget where devices have room for parts of heads."""
    return min(_largest_blocks(blocks_of(lane, without), lane.heads) for lane in lanes) * block_tokens


def _largest_blocks(blocks: Sequence[int], heads: int) -> int:
    """The largest size of which so many heads fit into devices."""
    low, high = 0, sum(blocks) // heads
    while low < high:
        middle = (low + high + 1) // 2
        if sum(each // middle for each in blocks) >= heads:
            low = middle
        else:
            high = middle - 1
    return low
