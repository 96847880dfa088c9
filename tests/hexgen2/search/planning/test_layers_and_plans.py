"""Layer splits and group plans, compared with enumeration."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problem_from, problems

from cost_model.base import TensorGroup, Work
from cost_model.pipeline import PhaseTimes, colocated_pace, decode_pace, micro_batch, prefill_pace
from hexgen2.search.planning.layers import balance_layers, fastest_layers
from hexgen2.search.planning.plan import Planner
from hexgen2.search.planning.shapes import partitions
from hexgen2.search.problem import Problem, counts_of


def splits(layers: int, stages: int):
    """Every way to give each stage at least one layer."""
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        ends = (0, *cuts, layers)
        yield [b - a for a, b in itertools.pairwise(ends)]


@st.composite
def split_problems(draw):
    stages = draw(st.integers(1, 4))
    times = st.floats(0.01, 10)
    return (
        draw(st.integers(stages, 12)),
        draw(st.lists(times, min_size=stages, max_size=stages)),
        draw(st.lists(st.floats(0, 20), min_size=stages, max_size=stages)),
        draw(st.lists(st.integers(0, 12), min_size=stages, max_size=stages)),
    )


@given(split_problems())
def test_balanced_split_is_optimal(case):
    layers, layer_s, edge_s, limit = case
    fitting = [s for s in splits(layers, len(layer_s)) if all(n <= m for n, m in zip(s, limit, strict=True))]
    found = balance_layers(layers, layer_s, edge_s, limit)
    if not fitting:
        assert found is None
        return

    def slowest(split):
        return max(a * n + e for a, n, e in zip(layer_s, split, edge_s, strict=True))

    assert found in fitting
    assert slowest(found) == pytest.approx(min(map(slowest, fitting)))


@given(split_problems())
def test_fastest_split_is_optimal(case):
    layers, layer_s, _, limit = case
    fitting = [s for s in splits(layers, len(layer_s)) if all(n <= m for n, m in zip(s, limit, strict=True))]
    found = fastest_layers(layers, layer_s, limit)
    if not fitting:
        assert found is None
        return

    def total(split):
        return sum(a * n for a, n in zip(layer_s, split, strict=True))

    assert found in fitting
    assert total(found) == pytest.approx(min(map(total, fitting)))


def test_partitions_are_all_and_each_once():
    assert set(partitions(4, (1, 2, 4))) == {(4,), (2, 2), (2, 1, 1), (1, 1, 1, 1)}
    assert set(partitions(6, (1, 2, 4))) == {
        (4, 2),
        (4, 1, 1),
        (2, 2, 2),
        (2, 2, 1, 1),
        (2, 1, 1, 1, 1),
        (1, 1, 1, 1, 1, 1),
    }


def mixed_capacity(costs, groups, split, hops, batch: int, tokens: int) -> float:
    """Requests/s of a colocated replica with chunks of so many tokens. Of the steps of a stage, those that a
    request's prompt needs are mixed; the others, up to its output tokens' share, have decodes only."""
    prompts, stages = tokens / costs.isl, len(split)
    decodes = min(batch / stages, costs.osl * prompts)

    def busy_s(work: Work) -> list[float]:
        stage_s = [
            n * costs.layer_work_s(g, work) + costs.edge_work_s(g, work.sampled, j == stages - 1)
            for j, (g, n) in enumerate(zip(groups, split, strict=True))
        ]
        return [*stage_s, *(costs.hop_work_s(hop, work.tokens) for hop in hops)]

    alone, chunk = costs.work("decode", decodes), costs.work("prefill", prompts)
    mixed = busy_s(Work(*(a + b for a, b in zip(alone, chunk, strict=True))))
    plain = busy_s(alone)
    mixed_steps, steps = 1 / prompts, costs.osl / decodes
    slowest = max(mixed_steps * m + (steps - mixed_steps) * p for m, p in zip(mixed, plain, strict=True))
    walk = sum(plain) * costs.osl / (decodes * stages)
    return 1 / max(slowest, walk)


def capacity(problem: Problem, role: str, shape, split, batch: int) -> float | None:
    """Capacity of a fully specified plan, from the cost model alone; None if it exceeds a GPU's memory. A
    stage is (node, degree), and the degrees of attention and experts if they are not 1."""
    costs, last = problem.costs, len(shape) - 1
    phase = "prefill" if role == "prefill" else "decode"
    groups = [
        TensorGroup(problem.node_accelerator[n], d, problem.node_links[n][n], *parts)
        for n, d, *parts in shape
    ]
    held = 1
    if phase == "prefill":
        held = len(shape) + 1 if problem.pipeline == "pipelined" else 2
    held *= max(1, batch)
    for j, (group, layers) in enumerate(zip(groups, split, strict=True)):
        memory = costs.stage_memory(phase, group, j == 0, j == last)
        if memory.needed(layers, held) > memory.limit:
            return None

    def times(phase, running):
        stage_s = [
            costs.layer_s(phase, g, running) * n + costs.edge_s(phase, g, running, j == last)
            for j, (g, n) in enumerate(zip(groups, split, strict=True))
        ]
        hops = (problem.node_links[a][b] for (a, *_), (b, *_) in itertools.pairwise(shape))
        return stage_s, [costs.hop_s(phase, hop, running) for hop in hops]

    if phase == "prefill":
        return prefill_pace(problem.pipeline, *times(phase, batch), batch).capacity_req_s
    decode = times(phase, micro_batch(problem.pipeline, batch, len(shape)))
    if role == "decode":
        return decode_pace(problem.pipeline, *decode, batch, costs.osl).capacity_req_s
    if problem.pipeline == "pipelined":
        hops = [problem.node_links[a][b] for (a, *_), (b, *_) in itertools.pairwise(shape)]
        return max(mixed_capacity(costs, groups, split, hops, batch, n) for n in (512, 1024, 2048))
    prompts = max(1, int(min(batch, costs.prefill_batch())))
    both = PhaseTimes(*times("prefill", prompts), prompts), PhaseTimes(*decode, batch)
    return colocated_pace(problem.pipeline, *both, costs.osl).capacity_req_s


@settings(max_examples=150, deadline=None)
@given(problems(), st.sampled_from(["prefill", "decode", "colocated"]))
def test_plans_fit_and_have_the_capacity_they_claim(problem, role):
    counts = counts_of({n: len(gpus) for n, gpus in enumerate(problem.node_gpus)})
    plan = Planner(problem).plan(role, counts)
    if plan is None:
        return
    shape = [s.shape for s in plan.stages]
    split = [s.layers for s in plan.stages]
    assert sum(split) == problem.model.layers
    used = counts_of({n: sum(s.degree for s in shape if s.node == n) for n, _ in counts})
    assert used == counts
    assert capacity(problem, role, shape, split, plan.batch) == pytest.approx(plan.capacity_req_s)


@pytest.mark.parametrize("role", ["prefill", "decode", "colocated"])
@pytest.mark.parametrize("pipeline", ["pipelined", "literal", "paper_optimistic"])
@pytest.mark.parametrize("counts", [("H100:1", "A100-80GB:1"), ("H100:2", "L40:1"), ("A100-80GB:3",)])
def test_plan_against_every_shape_and_split(role, pipeline, counts):
    """Within 1 % of the best over all tensor-parallel degrees, layer splits and (except for prefill) batch
    sizes."""
    nodes = [{"name": f"n{i}", "accelerators": c, "interconnect": "nvlink"} for i, c in enumerate(counts)]
    problem = problem_from({"name": "t", "nodes": nodes}, "opt-30b", "HPHD", pipeline=pipeline)
    counts = counts_of({n: len(gpus) for n, gpus in enumerate(problem.node_gpus)})
    plan = Planner(problem).plan(role, counts)
    assert plan is not None
    batches = [1] if role == "prefill" else sorted({*range(1, 257, 8), 256, plan.batch})
    best = 0.0
    for parts in itertools.product(*(partitions(c, (1, 2)) for _, c in counts)):
        shape = [(n, d) for (n, _), part in zip(counts, parts, strict=True) for d in part]
        for split in splits(problem.model.layers, len(shape)):
            for batch in batches:
                best = max(best, capacity(problem, role, shape, split, batch) or 0.0)
    assert plan.capacity_req_s >= 0.99 * best
