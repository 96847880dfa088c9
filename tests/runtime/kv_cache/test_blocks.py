"""The block pool compared with a simple model of it, over random sequences of requests."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kv_cache.blocks import BlockPool, prefix_digests

SIZE = 4


def test_digests_name_everything_up_to_a_block() -> None:
    tokens = list(range(11))
    digests = prefix_digests(tokens, SIZE)
    assert len(digests) == 2
    assert prefix_digests(tokens[:8], SIZE) == digests == prefix_digests(tokens, SIZE, digests[:1])
    other = prefix_digests([99, *tokens[1:]], SIZE)
    assert not set(other) & set(digests)
    assert prefix_digests(tokens[4:8], SIZE)[0] != digests[1]


def test_a_prompt_finds_what_was_computed_of_its_beginning() -> None:
    pool = BlockPool(8, SIZE)
    tokens = list(range(12))
    digests = prefix_digests(tokens, SIZE)
    blocks, computed = pool.begin(12, digests)
    assert computed == 0 and len(set(blocks)) == 3
    for block, digest in zip(blocks, digests, strict=True):
        pool.publish(block, digest)
    longer = prefix_digests([*tokens[:8], 50, 51, 52, 53], SIZE)
    shared, computed = pool.begin(16, longer)
    assert computed == 8 and shared[:2] == blocks[:2] and not set(shared[2:]) & set(blocks)
    pool.release(blocks)
    assert pool.free == 8 - len(shared)
    pool.release(shared)
    assert pool.free == 8
    again, computed = pool.begin(12, digests)
    assert (again, computed) == (blocks, 12)


def test_a_pool_without_reuse_keeps_nothing() -> None:
    pool = BlockPool(8, SIZE, reuse=False)
    digests = prefix_digests(range(8), SIZE)
    blocks, _ = pool.begin(8, digests)
    for block, digest in zip(blocks, digests, strict=True):
        pool.publish(block, digest)
    pool.release(blocks)
    assert pool.begin(8, digests)[1] == 0


def test_the_block_used_longest_ago_goes_first_and_ends_before_beginnings() -> None:
    pool = BlockPool(4, SIZE)
    old, new = prefix_digests([1] * 8, SIZE), prefix_digests([2] * 8, SIZE)
    for digests in (old, new):
        blocks, _ = pool.begin(8, digests)
        for block, digest in zip(blocks, digests, strict=True):
            pool.publish(block, digest)
        pool.release(blocks)
    assert pool.allocate(1) is not None
    assert pool.begin(4, old[:1]) is not None  # its prefix is still cached: only the end was reused
    assert pool.begin(8, new)[1] == 8


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**32), st.integers(1, 12), st.booleans())
def test_no_block_has_two_owners_and_none_is_lost(seed: int, size: int, reuse: bool) -> None:
    """Random requests over a tiny vocabulary share prefixes; the test tracks the content of every block."""
    rng, pool = random.Random(seed), BlockPool(size, SIZE, reuse)
    content: dict[int, tuple[int, ...]] = {}
    live: list[tuple[list[int], list[int]]] = []
    for _ in range(60):
        if live and rng.random() < 0.5:
            _, blocks = live.pop(rng.randrange(len(live)))
            pool.release(blocks)
        else:
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 5 * SIZE))]
            digests = prefix_digests(tokens, SIZE)
            spare = rng.randrange(3)
            free = pool.free
            begun = pool.begin(len(tokens), digests, spare)
            if begun is None:
                assert free < pool.blocks_for(len(tokens)) + spare
                assert pool.free == free
                continue
            blocks, computed = begun
            assert len(blocks) == len(set(blocks)) == -(-len(tokens) // SIZE)
            assert pool.free >= spare
            held = {block for _, others in live for block in others}
            for number, block in enumerate(blocks):
                upto = tuple(tokens[: (number + 1) * SIZE])
                if number * SIZE < computed:
                    assert content[block] == upto  # the shared block has the content that the request needs
                else:
                    assert block not in held
                    content[block] = upto
                    if number < len(digests):
                        pool.publish(block, digests[number])
            live.append((tokens, blocks))
        assert pool.free == size - len({block for _, blocks in live for block in blocks})
    for _, blocks in live:
        pool.release(blocks)
    assert pool.free == size
    assert len(pool.allocate(size) or []) == size
