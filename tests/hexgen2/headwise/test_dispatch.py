"""Dispatches against exhaustive search, and the linear program against an independent model of it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from hexgen2.headwise import dispatch as module
from hexgen2.headwise.dispatch import Load, dispatch
from hexgen2.headwise.profile import DeviceProfile

PROFILES = st.builds(
    DeviceProfile,
    head_s=st.sampled_from([0.0, 1e-8, 5e-7]),
    kv_byte_s=st.floats(1e-12, 1e-10),
    fixed_s=st.sampled_from([0.0, 1e-5]),
    vector_s=st.sampled_from([0.0, 1e-8]),
    exchange_s=st.sampled_from([0.0, 4e-5]),
)
SIZES = st.floats(1e3, 1e6)


@st.composite
def cases(draw, devices=3, requests=1, least=1):
    profiles = draw(st.lists(PROFILES, min_size=1, max_size=devices))
    sizes = draw(st.lists(SIZES, min_size=least, max_size=requests))
    loads = []
    for _ in profiles:
        seconds = draw(st.sampled_from([0.0, 1e-5, 1e-4]))
        loads.append(Load(seconds, draw(st.floats(0, 4e6)), used=seconds > 0))
    return profiles, loads, sizes


def done_s(profiles, query_heads, loads, sizes, found):
    """The seconds of the slowest device that has heads, from the definition."""
    most = 0.0
    for profile, load, heads in zip(profiles, loads, found, strict=True):
        if not load.used and not sum(heads):
            continue
        own = profile.fixed_s + profile.exchange_s + load.seconds
        for count, size in zip(heads, sizes, strict=True):
            each = profile.head_s * query_heads + profile.vector_s * query_heads * (2 + 2 / query_heads)
            own += count * (each + profile.kv_byte_s * size)
        most = max(most, own)
    return most


def fits(loads, sizes, found):
    return all(
        math.fsum(n * b for n, b in zip(heads, sizes, strict=True)) <= load.free_bytes * (1 + 1e-9)
        for heads, load in zip(found, loads, strict=True)
    )


def all_dispatches(devices, kv_heads, requests):
    """Every way to divide the heads of each request."""
    one = [
        split for split in itertools.product(range(kv_heads + 1), repeat=devices) if sum(split) == kv_heads
    ]
    for chosen in itertools.product(one, repeat=requests):
        yield [[chosen[j][i] for j in range(requests)] for i in range(devices)]


def best_of_all(profiles, query_heads, kv_heads, loads, sizes):
    values = (
        done_s(profiles, query_heads, loads, sizes, found)
        for found in all_dispatches(len(profiles), kv_heads, len(sizes))
        if fits(loads, sizes, found)
    )
    return min(values, default=math.inf)


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(1, 4), st.integers(1, 8))
def test_one_request_is_dispatched_as_well_as_possible(case, kv_heads, query_heads):
    profiles, loads, sizes = case
    best = best_of_all(profiles, query_heads, kv_heads, loads, sizes)
    found = dispatch(profiles, query_heads, kv_heads, loads, sizes)
    assert (found is None) == (best == math.inf)
    if found is not None:
        assert found.sum(axis=0).tolist() == [kv_heads]
        assert fits(loads, sizes, found.tolist())
        assert math.isclose(done_s(profiles, query_heads, loads, sizes, found.tolist()), best, rel_tol=1e-6)


@settings(max_examples=100, deadline=None)
@given(cases(devices=3, requests=3, least=2), st.integers(1, 3), st.integers(1, 8))
def test_several_requests_are_within_one_head_of_the_best(case, kv_heads, query_heads):
    """Rounding moves single heads: what it costs the slowest device is a few of them."""
    profiles, loads, sizes = case
    best = best_of_all(profiles, query_heads, kv_heads, loads, sizes)
    found = dispatch(profiles, query_heads, kv_heads, loads, sizes)
    if found is None:  # Whole heads may not fit where they have to be packed.
        most = max(sizes) * kv_heads * len(sizes)
        assert min(load.free_bytes for load in loads) < most
        return
    assert best < math.inf
    assert found.sum(axis=0).tolist() == [kv_heads] * len(sizes)
    assert (found >= 0).all() and (found == np.floor(found)).all()
    assert fits(loads, sizes, found.tolist())
    head_s = max(p.group_s(query_heads) + p.kv_byte_s * max(sizes) for p in profiles)
    start_s = max(p.start_s for p in profiles)
    assert done_s(profiles, query_heads, loads, sizes, found.tolist()) <= best + 2 * head_s + start_s


def test_several_requests_are_close_to_the_best_on_average():
    rng, ratios = np.random.default_rng(3), []
    for _ in range(60):
        profiles = [
            DeviceProfile(0.0, float(rng.uniform(1, 6)) * 1e-12, 0.0, 0.0, exchange)
            for exchange in (0.0, 2e-5, 4e-5)
        ]
        loads = [Load(float(rng.uniform(0, 1e-4)), 1e9, True) for _ in profiles]
        sizes = rng.uniform(1e5, 2e6, 3).tolist()
        best = best_of_all(profiles, 4, 4, loads, sizes)
        found = dispatch(profiles, 4, 4, loads, sizes)
        ratios.append(done_s(profiles, 4, loads, sizes, found.tolist()) / best)
    assert np.mean(ratios) < 1.02 and max(ratios) < 1.15


@pytest.mark.parametrize("requests", [24, 64])
@pytest.mark.parametrize("seed", range(6))
def test_the_linear_program_is_solved_to_its_optimum(seed, requests):
    """24 and 64 requests on 8 devices, against the same program written down anew."""
    rng = np.random.default_rng(seed)
    devices, kv_heads, query_heads = 8, 8, 8
    profiles = [
        DeviceProfile(*(float(rng.uniform(1, 4)) * unit for unit in (1e-9, 1e-12, 1e-6, 1e-10, 1e-6)))
        for _ in range(devices)
    ]
    sizes = rng.uniform(1e5, 2e6, requests)
    tight = 1.05 if seed % 2 else 4.0
    loads = [
        Load(float(rng.uniform(0, 1e-5)), float(sizes.sum() * kv_heads * tight / devices), True)
        for _ in range(devices)
    ]
    part = module._linear(profiles, query_heads, kv_heads, loads, sizes.tolist(), module.CLASSES)
    n = devices * requests
    rows, limits = np.zeros((2 * devices, n + 1)), np.zeros(2 * devices)
    for i, (p, load) in enumerate(zip(profiles, loads, strict=True)):
        own = slice(i * requests, (i + 1) * requests)
        each = p.head_s * query_heads + p.vector_s * query_heads * (2 + 2 / query_heads)
        rows[i, own] = (each + p.kv_byte_s * sizes) * 1e6
        rows[i, n] = -1
        limits[i] = -(p.fixed_s + p.exchange_s + load.seconds) * 1e6
        rows[devices + i, own] = sizes / 1e6
        limits[devices + i] = load.free_bytes / 1e6
    whole = np.zeros((requests, n + 1))
    for j in range(requests):
        whole[j, j:n:requests] = 1
    expected = linprog(
        np.r_[np.zeros(n), 1.0], rows, limits, whole, np.full(requests, float(kv_heads)), method="highs-ipm"
    )
    assert expected.success
    slowest = max(
        p.start_s
        + load.seconds
        + math.fsum(
            x * (p.group_s(query_heads) + p.kv_byte_s * b) for x, b in zip(part[i], sizes, strict=True)
        )
        for i, (p, load) in enumerate(zip(profiles, loads, strict=True))
    )
    exact = 1e-6 if requests <= module.CLASSES else 1e-4
    assert math.isclose(slowest, expected.fun * 1e-6, rel_tol=exact)
    assert np.allclose(part.sum(axis=0), kv_heads)
    found = dispatch(profiles, query_heads, kv_heads, loads, sizes.tolist())
    assert found is not None and fits(loads, sizes.tolist(), found.tolist())
    done = done_s(profiles, query_heads, loads, sizes.tolist(), found.tolist())
    assert slowest * (1 - 1e-9) <= done <= slowest * 1.02


def test_heads_stay_where_a_worker_is_not_worth_its_start():
    """Section 7.3: under light load nothing goes over the network."""
    primary, worker = DeviceProfile(0.0, 1e-12, 0.0), DeviceProfile(0.0, 2e-12, 1e-5, 1e-10, 4e-5)
    idle = [Load(0.0, 1e9, False), Load(0.0, 1e9, False)]
    few = dispatch([primary, worker], 8, 8, idle, [1e5, 2e5])
    assert few[1].sum() == 0
    many = dispatch([primary, worker], 8, 8, idle, [1e7] * 8)
    assert 0 < many[1].sum() < many[0].sum()
