"""The parts of KV caches that move between GPUs, compared with the cache of each rank."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placements import replica_of

from hexgen2.network.kv_parts import gpu_parts
from hexgen2.placement import Route, Stage

degrees = st.sampled_from([1, 2, 3, 4, 8])


def pipeline(node: str, shape: list[tuple[int, int]]) -> list[Stage]:
    """Stages of (GPUs, layers)."""
    stages, first, gpu = [], 0, 0
    for degree, layers in shape:
        gpus = [f"{node}/{k}" for k in range(gpu, gpu + degree)]
        stages.append(Stage(gpus=gpus, layers=(first, first + layers)))
        first, gpu = first + layers, gpu + degree
    return stages


@given(degrees, degrees, degrees, degrees, st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_every_rank_receives_what_it_holds(p, q, d, e, cut, decode_cut, latent):
    prefill = pipeline("p", [(p, cut), (q, 6 - cut)])
    decode = pipeline("d", [(d, decode_cut), (e, 6 - decode_cut)])
    received: Counter[str] = Counter()
    for _, receiver, moved in gpu_parts(prefill, decode, 12.0, latent):
        received[receiver] += moved
    for stage in decode:
        own = stage.layer_count * 12.0 / (1 if latent else len(stage.gpus))
        assert [received[gpu] for gpu in stage.gpus] == pytest.approx([own] * len(stage.gpus))


@given(degrees, degrees, st.data(), st.booleans())
def test_attention_groups_each_carry_a_share_of_the_requests(p, d, data, latent):
    """As if a request went from each sending group to each receiving group equally often."""
    sending, receiving = pipeline("p", [(p, 6)])[0], pipeline("d", [(d, 6)])[0]
    for stage in (sending, receiving):
        divisors = [n for n in range(1, len(stage.gpus) + 1) if len(stage.gpus) % n == 0]
        stage.attention_data_parallel = data.draw(st.sampled_from(divisors))
    expected: Counter[tuple[str, str]] = Counter()
    groups = [
        [
            stage.gpus[k : k + stage.attention_degree]
            for k in range(0, len(stage.gpus), stage.attention_degree)
        ]
        for stage in (sending, receiving)
    ]
    pairs = list(itertools.product(*groups))
    for one, other in pairs:
        alone = [Stage(gpus=gpus, layers=(0, 6)) for gpus in (one, other)]
        for sender, receiver, moved in gpu_parts(alone[:1], alone[1:], 12.0, latent):
            expected[sender, receiver] += moved / len(pairs)
    found = {(a, b): moved for a, b, moved in gpu_parts([sending], [receiving], 12.0, latent)}
    assert found == pytest.approx(dict(expected))
    source, target = (
        replica_of(name, [("a", 6)]).model_copy(update={"stages": [stage]})
        for name, stage in (("prefill-0", sending), ("decode-0", receiving))
    )
    route = Route.between(source, target, 12.0, to_every_rank=latent)
    assert math.fsum(found.values()) == pytest.approx(route.kv_bytes_per_req)


def test_a_route_counts_every_copy_of_a_latent_cache():
    source = replica_of("prefill-0", [("p/0 p/1", 6)])
    target = replica_of("decode-0", [("d/0 d/1 d/2 d/3", 6)])
    once, copied = (Route.between(source, target, 12.0, to_every_rank=each) for each in (False, True))
    assert (once.kv_bytes_per_req, copied.kv_bytes_per_req) == (6 * 12.0, 4 * 6 * 12.0)
    for route in (once, copied):
        assert math.fsum(link.bytes_per_req for link in route.links) == pytest.approx(route.kv_bytes_per_req)
