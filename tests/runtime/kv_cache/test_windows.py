"""Blocks of layers with a window: how many a request takes, and what of them others share."""

from __future__ import annotations

import pytest
from stage_shapes import stages

from cost_model.lengths import first_kept, most_blocks
from runtime.kv_cache.blocks import prefix_digests
from runtime.kv_cache.windows import WindowedPool, numbered

SIZE, WINDOW, RUNNING = 4, 6, 8
TEXT = list(range(100, 140))


def make(blocks: int = 40, windowed: int = 40) -> WindowedPool:
    return WindowedPool(blocks, windowed, SIZE, WINDOW, RUNNING)


def run(pool: WindowedPool, owner: str, first: int, end: int, finished: bool = False) -> None:
    """One step with these tokens of a request."""
    assert pool.extend(owner, end) == end
    pool.passed(owner, end, finished)


def test_layers_are_numbered_by_group() -> None:
    shape = stages("r", [(2, 0, 2), (1, 2, 5)])
    ends = [(stage.first_layer, stage.end_layer) for stage in numbered(shape, (0, 2, 4))]
    assert ends == [(0, 1), (1, 3)]
    assert [(stage.first_layer, stage.end_layer) for stage in numbered(shape, (3,))] == [(0, 0), (0, 1)]
    assert [stage.workers for stage in numbered(shape, (3,))] == [stage.workers for stage in shape]


def test_a_long_prompt_takes_no_more_than_the_window_and_its_steps() -> None:
    most = most_blocks(WINDOW, SIZE, RUNNING)
    pool = make(windowed=most)
    assert pool.can_fit(len(TEXT)) and not make(windowed=most - 1).can_fit(len(TEXT))
    assert pool.begin(len(TEXT), (), owner="a") is not None
    for first in range(0, len(TEXT), RUNNING):
        run(pool, "a", first, first + RUNNING, first + RUNNING == len(TEXT))
    kept = len(TEXT) - first_kept(len(TEXT), WINDOW, SIZE)
    assert pool.free == 40 * (most - kept // SIZE) // most < 40
    for end in range(len(TEXT), len(TEXT) + 10 * SIZE, SIZE):
        assert pool.allocate(1, owner="a") is not None
        run(pool, "a", end, end + SIZE, True)
    pool.release(range(20), "a")
    assert pool.free == 40


def test_a_beginning_is_shared_where_both_pools_have_what_is_read_next() -> None:
    """A request that is computed here reads back from the end of what it shares, one that comes from
    elsewhere from the end of its prompt."""
    pool, digests = make(windowed=10), prefix_digests(TEXT, SIZE)
    blocks, _ = pool.begin(len(TEXT), (), owner="a") or ([], 0)
    for first in range(0, len(TEXT), RUNNING):
        end = first + RUNNING
        pool.extend("a", end)
        for number in range(first // SIZE, end // SIZE):
            pool.publish(blocks[number], digests[number], "a", number)
        pool.passed("a", end, end == len(TEXT))
    pool.release(blocks, "a")
    _, cached = pool.begin(len(TEXT), digests[:-1], owner="b") or ([], 0)
    assert cached == len(TEXT) - SIZE
    pool.release([], "b")
    pool = make(windowed=10)
    blocks, _ = pool.reserve(len(TEXT), (), owner="a") or ([], 0)
    for number, digest in enumerate(digests):
        pool.publish(blocks[number], digest, "a", number)
    kept = first_kept(len(TEXT), WINDOW, SIZE) // SIZE
    assert pool.windowed_table("a")[:kept] == (0,) * kept
    middle = digests[: kept + 1]
    begun = pool.begin(len(TEXT), middle, owner="b")
    assert begun is not None and begun[1] == 0  # block kept - 1 is not there, which the next token reads
    taken = pool.reserve((kept + 1) * SIZE, middle, owner="c")
    assert taken is not None and taken[1] == 28  # from there on, windowed layers get all that is read
    whole = pool.reserve(len(TEXT), digests, owner="d")
    assert whole is not None and whole[1] == len(TEXT)


@pytest.mark.parametrize("short", ["blocks", "windowed"])
def test_without_room_in_one_pool_nothing_is_taken_in_the_other(short: str) -> None:
    pool = make(**{short: 1})
    for take in (pool.begin, pool.reserve):
        assert take(4 * SIZE, (), owner="a") is None
        assert pool.free == pool.blocks
    assert pool.begin(SIZE, (), owner="a") is not None
    assert pool.allocate(1, owner="a") is None
    pool.release([0], "a")
    assert pool.free == pool.blocks
