"""KV caches between replicas of different shapes: every cell arrives where it belongs, and nowhere else."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_pairs import WHOLE, Pool, Receiving, Sending, fill, holds, landed, next_event, scattered
from kv_transports import needs_nixl
from stage_shapes import stages

from runtime.kv_cache.layout import held, outgoing


def whole_replicas_agree(
    source: list[tuple[int, int, int]],
    destination: list[tuple[int, int, int]],
    kv_heads: int,
    first_token: int,
    chunks: list[int],
    transport: str,
    block_tokens: tuple[int, int] = (4, 4),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    sides: int = 2,
    kv: str = "plain",
) -> None:
    """Move two requests at once between replicas of any shape, and check the contents of all blocks."""
    froms, tos, end = stages("p", source), stages("d", destination), chunks[-1]
    names = [worker for stage in tos for worker in stage.workers]
    pools = [
        Pool(held(tos, name, kv_heads), block_tokens[1], 80, dtype, sides=sides, kv=kv) for name in names
    ]
    receivings = {name: Receiving(name, pool) for name, pool in zip(names, pools, strict=True)}
    peers = {name: receiving.address for name, receiving in receivings.items()}
    sendings = []
    to_first = scattered(seed + 3, pools[0], end)
    to_second = scattered(seed + 4, pools[0], end, to_first)
    from_pool = Pool(WHOLE, block_tokens[0], 80, dtype, sides=sides, kv=kv)
    from_first = scattered(seed + 1, from_pool, end)
    from_second = scattered(seed + 2, from_pool, end, from_first)
    try:
        for receiving in receivings.values():
            receiving.receiver.expect("first", to_first, first_token, end)
            receiving.receiver.expect("second", to_second, first_token, end)
        for worker in (worker for stage in froms for worker in stage.workers):
            pool = Pool(held(froms, worker, kv_heads), block_tokens[0], 80, dtype, sides=sides, kv=kv)
            sending = Sending(worker, pool, peers, transport=transport)
            sendings.append(sending)
            fill(sending.cache, pool, 1, from_first, end)
            fill(sending.cache, pool, 2, from_second, end)
            plan = outgoing(froms, worker, tos, kv_heads)
            sending.push("first", plan, from_first, chunks, first_token)
            sending.push("second", plan, from_second, chunks, first_token)
        for receiving in receivings.values():
            assert {landed(receiving).request_id, landed(receiving).request_id} == {"first", "second"}
            for request, table in ((1, to_first), (2, to_second)):
                assert holds(receiving.cache, receiving.pool, request, table, first_token, end)
            written = torch.zeros(receiving.cache.pool.shape[2], dtype=torch.bool)
            for table in (to_first, to_second):
                written[torch.from_numpy(receiving.cache.slots(table, first_token, end))] = True
            assert not receiving.cache.pool[:, :, ~written].any()
        for sending in sendings:
            assert {next_event(sending.events), next_event(sending.events)} == {"first", "second"}
            assert sending.events.empty()
    finally:
        for sending in sendings:
            sending.sender.close()
        for receiving in receivings.values():
            receiving.close()


SHAPES = {
    "equal": ([(1, 0, 3)], [(1, 0, 3)], 4),
    "tp1 to tp2": ([(1, 0, 3)], [(2, 0, 3)], 4),
    "tp2 to tp1": ([(2, 0, 3)], [(1, 0, 3)], 4),
    "tp2 to tp4, heads held twice": ([(2, 0, 3)], [(4, 0, 3)], 2),
    "tp4 to tp1, heads held twice": ([(4, 0, 3)], [(1, 0, 3)], 2),
    "pp2 to tp2": ([(1, 0, 2), (1, 2, 3)], [(2, 0, 3)], 4),
    "uneven": ([(2, 0, 1), (1, 1, 3)], [(1, 0, 2), (4, 2, 3)], 4),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("block_tokens", [(4, 4), (1, 16), (16, 3)])
def test_any_shape_to_any_shape(shape: str, transport: str, block_tokens: tuple[int, int]) -> None:
    source, destination, kv_heads = SHAPES[shape]
    whole_replicas_agree(source, destination, kv_heads, 5, [6, 17, 31], transport, block_tokens)


@pytest.mark.parametrize("transport", ["shm", "tcp", pytest.param("nixl", marks=needs_nixl)])
def test_latents_that_every_rank_holds(transport: str) -> None:
    """One vector for each token and layer, which is key and value, as in multi-head latent attention."""
    source, destination = [(2, 0, 1), (1, 1, 3)], [(1, 0, 2), (4, 2, 3)]
    whole_replicas_agree(source, destination, 1, 5, [6, 17, 31], transport, (4, 3), sides=1)


@pytest.mark.parametrize("transport", ["shm", "tcp", pytest.param("nixl", marks=needs_nixl)])
@pytest.mark.parametrize(("kv", "sides"), [("fp8", 2), ("int8", 2), ("int8", 1)])
def test_packed_heads_move_with_their_scales(transport: str, kv: str, sides: int) -> None:
    source, destination, kv_heads = SHAPES["uneven"] if sides == 2 else (*SHAPES["uneven"][:2], 1)
    whole_replicas_agree(source, destination, kv_heads, 5, [6, 17, 31], transport, (4, 3), sides=sides, kv=kv)


@needs_nixl
@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape_to_any_shape_by_nixl(shape: str) -> None:
    source, destination, kv_heads = SHAPES[shape]
    whole_replicas_agree(source, destination, kv_heads, 5, [6, 17, 31], "nixl", (16, 3))


@st.composite
def replicas(draw: st.DrawFn, kv_heads: int) -> list[tuple[int, int, int]]:
    degrees = [degree for degree in (1, 2, 4) if kv_heads % degree == 0 or degree % kv_heads == 0]
    bounds = [0, *sorted(draw(st.sets(st.integers(1, 2), max_size=2))), 3]
    return [(draw(st.sampled_from(degrees)), first, end) for first, end in itertools.pairwise(bounds)]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_plan_and_any_token_ranges(data: st.DataObject) -> None:
    kv_heads = data.draw(st.sampled_from([1, 2, 4]))
    first = data.draw(st.integers(0, 20))
    chunks = sorted(data.draw(st.sets(st.integers(first + 1, 36), min_size=1, max_size=4)))
    whole_replicas_agree(
        data.draw(replicas(kv_heads)),
        data.draw(replicas(kv_heads)),
        kv_heads,
        first,
        chunks,
        data.draw(st.sampled_from(["shm", "tcp"])),
        (data.draw(st.sampled_from([1, 3, 8])), data.draw(st.sampled_from([1, 3, 8]))),
        data.draw(st.integers(0, 99)),
        data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        kv=data.draw(st.sampled_from(["plain", "int8"])),
    )
