"""Flows against networkx, bounds and searches against all placements of small instances."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from range_instances import best_of_all, flow_by_networkx, instance, ranges_of

from hexgen2.search.layer_ranges.bounds import paper_bound, upper_bound, work_bound
from hexgen2.search.layer_ranges.heuristics import even_stages, petals, separate_pipelines, swarm
from hexgen2.search.layer_ranges.instance import NOTHING, Instance
from hexgen2.search.layer_ranges.local_search import anneal
from hexgen2.search.layer_ranges.max_flow import FlowValue
from hexgen2.search.layer_ranges.milp import solve_milp
from hexgen2.search.layer_ranges.paths import paths_of
from hexgen2.search.layer_ranges.plan import RangeSearch, search_ranges
from hexgen2.search.layer_ranges.stages import best_stages
from hexgen2.search.stopping import Stopping

SEEDS = st.integers(0, 10**6)


@settings(max_examples=80, deadline=None)
@given(SEEDS, st.integers(1, 7), st.integers(1, 9), st.booleans(), st.booleans())
def test_flows_are_those_of_networkx(seed, nodes, layers, partial, wide):
    asked = instance(seed, nodes, layers, partial, wide)
    ranges = ranges_of(asked, seed)
    value, expected = FlowValue(asked), flow_by_networkx(asked, ranges)
    flow = value.flow(ranges)
    assert math.isclose(value(ranges), expected, rel_tol=1e-9, abs_tol=1e-9)
    assert math.isclose(flow.tok_s, expected, rel_tol=1e-12, abs_tol=1e-12)
    assert value.covered(ranges) >= expected * (1 - 1e-12)
    assert not wide or asked.links_never_limit


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.booleans())
def test_paths_are_the_flow_and_compute_each_layer_once(seed, partial):
    asked = instance(seed, 7, 6, partial)
    ranges = ranges_of(asked, seed)
    flow = FlowValue(asked).flow(ranges)
    paths = paths_of(flow, ranges)
    assert math.isclose(math.fsum(path.tok_s for path in paths), flow.tok_s, rel_tol=1e-6, abs_tol=1e-9)
    carried: Counter = Counter()
    for path in paths:
        assert sum(path.layers) == asked.layers and min(path.layers) > 0
        done = 0
        for node, count in zip(path.nodes, path.layers, strict=True):
            assert ranges[node][0] <= done and done + count == ranges[node][1]
            done += count
            carried[node] += path.tok_s
    for node, tok_s in carried.items():
        assert tok_s <= asked.tok_s(node, ranges[node]) * (1 + 1e-6)


@settings(max_examples=15, deadline=None)
@given(SEEDS, st.booleans(), st.booleans())
def test_bounds_hold_for_every_placement(seed, partial, wide):
    asked = instance(seed, 3, 4, partial, wide)
    best, bound = best_of_all(asked), upper_bound(asked).tok_s
    slack = 1 + 1e-8
    assert best <= bound * slack and bound <= work_bound(asked) * slack <= paper_bound(asked) * slack**2
    started = upper_bound(asked, least=best).tok_s
    assert best <= started * slack


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.integers(1, 600))
def test_a_bound_that_is_cut_holds_and_ends_at_once(seed, most):
    """However far a program is: it looks at the clock in the midst of a search for one cover."""
    asked, looks = instance(seed, 12, 24, partial=True), itertools.count(1)
    cut, work = upper_bound(asked, stop=lambda: next(looks) >= most).tok_s, work_bound(asked)
    assert upper_bound(asked).tok_s * (1 - 1e-8) <= cut <= work
    assert next(looks) <= most + 60  # a bisection's


@pytest.mark.parametrize("factor", [1.0, 0.3, 1.0 / 3, 2.7182818, 1e-3])
def test_a_bound_that_is_reached_exactly_is_not_missed_by_rounding(factor):
    """A chain whose nodes all pass the same: work and L F are equal for every smaller F."""
    table, wide = np.array([[0.0, 900 * factor, 700.3 * factor]] * 4), np.full(3, 1e9)
    chain = Instance(6, (0, 0, 0), (table,), np.full((3, 3), 1e9), wide, wide, partial=False)
    flow = FlowValue(chain)(((0, 2), (2, 4), (4, 6)))
    assert math.isclose(flow, 700.3 * factor, rel_tol=1e-12)
    assert flow <= upper_bound(chain).tok_s <= flow * (1 + 1e-8)


@settings(max_examples=12, deadline=None)
@given(SEEDS, st.booleans(), st.booleans())
def test_searches_find_the_best_of_small_instances(seed, partial, wide):
    asked = instance(seed, 3, 4, partial, wide)
    search = RangeSearch(asked, Stopping(), tok_per_req=10.0)
    search_ranges(search, seed=0)
    best = best_of_all(asked)
    if search.ranges is None:
        assert best == 0
        return
    assert asked.fits(search.ranges)
    assert search.tok_s >= best * (1 - 1e-9)
    assert math.isclose(flow_by_networkx(asked, search.ranges), search.tok_s, rel_tol=1e-9)
    assert search.bound is not None and search.bound.tok_s >= best * (1 - 1e-8)


@settings(max_examples=8, deadline=None)
@given(SEEDS, st.booleans())
def test_the_integer_program_proves_the_best(seed, partial):
    asked = instance(seed, 3, 4, partial)
    best, value = best_of_all(asked), FlowValue(asked)
    start = (NOTHING,) * asked.nodes
    found = solve_milp(asked, start, value.flow(start), work_bound(asked), node_limit=10**5)
    assert not found.pruned and found.ranges is not None
    assert value(found.ranges) >= best - 1e-5 * max(best, 1)
    assert found.bound_tok_s >= best * (1 - 1e-6)
    assert found.bound_tok_s <= best + 1e-4 * max(best, 1)


@settings(max_examples=25, deadline=None)
@given(SEEDS)
def test_stages_are_the_best_placement_in_stages(seed):
    asked = instance(seed, 4, 4, False, wide_links=True)
    found = best_stages(asked, 0.0, work_bound(asked))
    value, best = FlowValue(asked), 0.0
    for cut in range(1, 2 ** (asked.layers - 1) + 1):
        ends = [0, *(b for b in range(1, asked.layers) if (cut - 1) >> (b - 1) & 1), asked.layers]
        stages = list(itertools.pairwise(ends))
        best = max(best, _best_assignment(asked, value, stages))
    assert (0.0 if found is None else value(found)) >= best * (1 - 1e-5)


def _best_assignment(asked, value, stages):
    best = 0.0
    for chosen in itertools.product([NOTHING, *stages], repeat=asked.nodes):
        if asked.fits(chosen):
            best = max(best, value(chosen))
    return best


def test_rules_place_as_described():
    asked = instance(5, 6, 6, True, wide_links=True)
    assert even_stages(7, 3) == [(0, 2), (2, 4), (4, 7)]
    for rule in (petals, swarm, separate_pipelines):
        found = rule(asked)
        assert found is None or asked.fits(found)
    for kind in range(2):  # A kind holds the whole model, or nothing of it.
        own = [
            held for held, k in zip(separate_pipelines(asked) or (), asked.kind, strict=False) if k == kind
        ]
        held = {layer for first, end in own for layer in range(first, end)}
        assert held in (set(), set(range(asked.layers)))


def test_the_same_seed_gives_the_same_ranges():
    asked = instance(11, 8, 12, True)
    value = FlowValue(asked)
    start = ranges_of(asked, 3)
    runs = [anneal(value, asked, start, seed, 4000, math.inf) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] and runs[0].tok_s >= value(start)
    assert runs[0].evaluations != runs[2].evaluations
