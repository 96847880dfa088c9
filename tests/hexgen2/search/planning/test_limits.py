"""Limits that hold for every division of a pipeline's layers: no division and no plan exceeds them."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cost_model.pipeline import PhaseTimes, mixed_period_s
from hexgen2.goal import Goal
from hexgen2.search import background
from hexgen2.search.background import Background
from hexgen2.search.planning import outlooks
from hexgen2.search.planning.layers import balance_layers, balance_many
from hexgen2.search.planning.limits import (
    MixedSteps,
    least_decodes_s,
    least_period_s,
    least_step_s,
    mean_period_s,
)
from hexgen2.search.planning.plan import Planner
from hexgen2.search.planning.shapes import Shapes
from hexgen2.search.planning.timing import Timing, Timings
from hexgen2.search.problem import make_problem

SECONDS = st.floats(1e-4, 1e-2)
SLOWER = st.floats(1.0, 8.0)
SMALL = 1e-9


@st.composite
def pipelines(draw):
    """Times of mixed and decode steps, and layers of each stage."""
    stages = draw(st.integers(1, 6))
    decode_s = draw(st.lists(SECONDS, min_size=stages, max_size=stages))
    slower = draw(st.lists(SLOWER, min_size=stages, max_size=stages))
    edges, more_edges = [0.0] * stages, [0.0] * stages
    edges[-1] = draw(st.floats(0, 0.02))
    more_edges[-1] = edges[-1] * draw(SLOWER)
    hops = draw(st.lists(st.floats(0, 0.01), min_size=stages - 1, max_size=stages - 1))
    rest = Timing(decode_s, edges, hops)
    mixed_s = [d * s for d, s in zip(decode_s, slower, strict=True)]
    mixed = Timing(mixed_s, more_edges, [2 * hop for hop in hops])
    split = draw(st.lists(st.integers(1, 30), min_size=stages, max_size=stages))
    return mixed, rest, split


def _chain(share: float, prompts: float, stages: int) -> MixedSteps:
    return MixedSteps(np.array([share]), np.array([prompts]), np.array([stages]))


def _beside_a_longer_one(timing: Timing) -> Timings:
    """A row for the timing, and one for a pipeline of more stages, so that the first is filled up."""
    stages = len(timing.layer_s) + 2
    return Timings.of([timing, Timing([1e-3] * stages, [0.0] * stages, [0.0] * (stages - 1))])


def _period_s(mixed: Timing, rest: Timing, split: list[int], share: float, prompts: float) -> float:
    both = PhaseTimes(mixed.stage_s(split), mixed.hop_s, prompts)
    return mixed_period_s(both, PhaseTimes(rest.stage_s(split), rest.hop_s, 1.0), share)


@given(pipelines(), st.floats(0.01, 1.0), st.floats(0.05, 8.0))
def test_no_division_has_a_shorter_period(pipeline, share, prompts):
    mixed, rest, split = pipeline
    both = Timings.of([mixed]), Timings.of([rest])
    (least_s,) = least_period_s(*both, sum(split), _chain(share, prompts, len(split)))
    assert least_s <= _period_s(mixed, rest, split, share, prompts) * (1 + SMALL)


@given(pipelines(), st.floats(0.05, 0.95), st.floats(0.05, 8.0))
def test_no_division_decodes_more_beside_mixed_steps(pipeline, share, prompts):
    mixed, rest, split = pipeline
    steps, both = _chain(share, prompts, len(split)), (Timings.of([mixed]), Timings.of([rest]))
    mean_s = _period_s(mixed, rest, split, share, prompts)
    alone_s = _period_s(mixed, rest, split, 0.0, prompts)
    all_mixed_s = _period_s(mixed, rest, split, 1.0, prompts)
    line_s = max(alone_s, (mean_s - share * all_mixed_s) / (1 - share))
    (least_s,) = least_decodes_s(*both, sum(split), steps)
    assert least_s <= line_s * (1 + SMALL)


@given(pipelines(), st.floats(0.05, 0.95), st.floats(0.05, 8.0))
def test_rows_do_not_depend_on_one_another(pipeline, share, prompts):
    mixed, rest, split = pipeline
    alone = [Timings.of([mixed]), Timings.of([rest])]
    both = [_beside_a_longer_one(mixed), _beside_a_longer_one(rest)]
    one = _chain(share, prompts, len(split))
    two = MixedSteps(np.full(2, share), np.full(2, prompts), both[0].stages)
    for limit in (least_period_s, least_decodes_s):
        assert limit(*both, sum(split), two)[0] == pytest.approx(limit(*alone, sum(split), one)[0], rel=1e-12)
    (step_s, _), (expected_s,) = (least_step_s(each[0], sum(split)) for each in (both, alone))
    assert step_s == pytest.approx(expected_s, rel=1e-12)


@given(pipelines(), st.floats(0.01, 1.0), st.floats(0.05, 8.0))
def test_mean_periods_of_many_divisions_are_those_of_each(pipeline, share, prompts):
    mixed, rest, split = pipeline
    rows = _beside_a_longer_one(mixed), _beside_a_longer_one(rest)
    two = MixedSteps(np.full(2, share), np.full(2, prompts), rows[0].stages)
    layers = np.array([[*split, 0, 0], [1] * (len(split) + 2)])
    found = mean_period_s(*rows, layers, two)
    assert found[0] == pytest.approx(_period_s(mixed, rest, split, share, prompts), rel=1e-9)


@given(pipelines(), st.integers(0, 40), st.lists(st.integers(0, 30), min_size=6, max_size=6))
def test_many_pipelines_are_balanced_as_each_is(pipeline, more, room):
    timing, _, split = pipeline
    limit = [n + spare for n, spare in zip(split, room, strict=False)]
    layers = min(sum(limit), len(split) + more)
    expected = balance_layers(layers, timing.layer_s, timing.edge_s, limit)
    rows = _beside_a_longer_one(timing)
    limits = np.array([[*limit, 0, 0], [100] * (len(limit) + 2)])
    assume(layers >= len(limit) + 2)
    found = balance_many(layers, rows, limits)[0]
    assert found.sum() == layers and (found <= limits[0]).all() and (found[: len(limit)] >= 1).all()
    slowest_s = [max(timing.stage_s(each)) for each in (expected, found[: len(limit)].astype(int).tolist())]
    assert slowest_s[1] == pytest.approx(slowest_s[0], rel=1e-6)


@given(pipelines())
def test_no_division_has_quicker_equal_steps(pipeline):
    mixed, _, split = pipeline
    (least_s,) = least_step_s(Timings.of([mixed]), sum(split))
    walk_s = sum(mixed.stage_s(split)) + sum(mixed.hop_s)
    assert least_s <= max(*mixed.stage_s(split), *mixed.hop_s, walk_s / len(split)) * (1 + SMALL)


@given(st.integers(1, 6), st.integers(1, 20), SECONDS, SLOWER, st.floats(0.01, 1.0))
def test_equal_stages_reach_the_limit(stages, layers, decode_s, slower, share):
    """With prompts of one chunk each, that begin at random, so that steps do not remember one another."""
    prompts = 1e-9
    rest = Timing([decode_s] * stages, [0.0] * stages, [0.0] * (stages - 1))
    mixed = rest.times(slower)
    steps = _chain(share, prompts, stages)
    assume(steps.most == pytest.approx(1.0, abs=1e-6) or share > 0.99)
    period_s = _period_s(mixed, rest, [layers] * stages, share, prompts)
    (least_s,) = least_period_s(Timings.of([mixed]), Timings.of([rest]), stages * layers, steps)
    assert least_s == pytest.approx(period_s, rel=1e-6)


@pytest.mark.parametrize(
    "goal",
    [
        Goal(),
        Goal(objective="goodput", tpot_ms=60),
        Goal(objective="goodput", ttft_ms=2000, tpot_ms=100),
        Goal(objective="goodput", ttft_ms=1500),
    ],
)
@pytest.mark.parametrize(
    ("cluster", "model", "workload"),
    [
        ("hexgen2-setting-1", "llama-2-70b", "HPLD"),
        ("hexgen2-setting-3", "opt-30b", "HPHD"),
        ("helix-mixed-42", "llama-3-8b", "online"),
    ],
)
def test_no_plan_exceeds_the_limit_of_its_group(cluster, model, workload, goal):
    """Not even one of a shape that the planner does not look at, because of its limit."""
    planner = Planner(make_problem(cluster, model, workload, phases="flexible", goal=goal))
    shapes, unlimited = Shapes(planner.problem), [math.inf] * len(planner._pipelines.chunks)
    sizes = [len(gpus) for gpus in planner.problem.node_gpus]
    groups = [((node, size),) for node, size in enumerate(sizes) if size]
    groups += [((a, sizes[a]), (b, 1)) for a in range(len(sizes)) for b in range(a + 1, len(sizes))][::3]
    if goal != Goal():
        groups = groups[::2]
    planned = 0
    for counts, role in itertools.product(groups, planner.problem.roles):
        limit = planner.limit(role, counts)
        limits = unlimited if role == "colocated" else ()
        made = (planner._pipelines.of(role, shape, limits) for shape in shapes.of(role, counts))
        for plan in filter(None, map(planner._plan, filter(None, made))):
            planned += 1
            assert limit is not None
            assert plan.capacity_req_s <= limit.req_s * (1 + SMALL)
        best = planner.plan(role, counts)
        if role == "colocated" and best:
            able = planner.mixtures(best).widest
            assert all(limit.region.contains(corner, 1e-6) for corner in able.corners)
    assert planned >= 15


@pytest.mark.parametrize(
    "goal", [Goal(), Goal(objective="goodput", ttft_ms=3000, tpot_ms=80, request_rate=5)]
)
@pytest.mark.parametrize("model", ["llama-2-70b", "opt-30b", "mixtral-8x7b"])
def test_a_plan_is_the_best_of_all_shapes_whichever_groups_are_looked_at_with_it(model, goal):
    """Alone, and beside all others; and no shape that is not looked at any further is better."""
    problem = make_problem("hexgen2-case-study", model, "HPLD", phases="flexible", goal=goal)
    alone, together, shapes = Planner(problem), Planner(problem), Shapes(problem)
    sizes = [len(gpus) for gpus in problem.node_gpus]
    groups = [((node, count),) for node, size in enumerate(sizes) for count in range(1, size + 1)]
    groups += [((a, sizes[a]), (b, sizes[b])) for a, b in itertools.combinations(range(len(sizes)), 2)]
    together.look_ahead(problem.roles, groups)
    planned = 0
    for counts, role in itertools.product(groups, problem.roles):
        plan = alone.plan(role, counts)
        assert together.plan(role, counts) == plan
        each = filter(None, (alone.plan_shape(role, shape) for shape in shapes.of(role, counts)))
        best_req_s = max((one.capacity_req_s for one in each), default=0.0)
        assert (plan.capacity_req_s if plan else 0.0) == pytest.approx(best_req_s, rel=1e-6)
        planned += plan is not None
    assert planned >= 6


@pytest.mark.parametrize("engine", ["any", "vllm"])
def test_groups_looked_at_in_another_process_are_the_same(engine, monkeypatch):
    """Limits, and the plans that are made of what the other process sends."""
    monkeypatch.setattr(outlooks, "WORTH_A_PROCESS", 2)
    for module in (outlooks, background):
        monkeypatch.setattr(module, "free_cores", lambda: 1)
    begun = []
    monkeypatch.setattr(outlooks, "Background", lambda work: begun.append(Background(work)) or begun[-1])
    problem = make_problem("hexgen2-setting-1", "opt-30b", "LPHD", phases="flexible", engine=engine)
    alone, together = Planner(problem), Planner(problem)
    sizes = [len(gpus) for gpus in problem.node_gpus]
    groups = [((node, count),) for node, size in enumerate(sizes) for count in range(1, size + 1)]
    groups += [((a, sizes[a]), (b, sizes[b])) for a, b in itertools.combinations(range(len(sizes)), 2)]
    together.look_ahead(problem.roles, groups, at_once=8, shared=True)
    assert [each.elsewhere for each in begun] == [True]
    for counts, role in itertools.product(groups, problem.roles):
        assert together.looked_at(role, counts)
        assert together.limit(role, counts) == alone.limit(role, counts)
        assert together.plan(role, counts) == alone.plan(role, counts)


def test_a_look_ahead_can_be_stopped():
    problem = make_problem("hexgen2-setting-1", "llama-2-70b", "HPLD")
    planner, groups = Planner(problem), [((node, 2),) for node in range(len(problem.node_gpus))]
    shares = []
    planner.look_ahead(["prefill"], groups, lambda share: shares.append(share) or share > 0, at_once=1)
    known = [counts for counts in groups if planner.looked_at("prefill", counts)]
    assert 0 < len(known) < len(groups) and shares[0] == 0 < shares[1] < 1
    assert all(
        planner.limit("prefill", counts) == Planner(problem).limit("prefill", counts) for counts in groups
    )
