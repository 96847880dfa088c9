"""Layer splits and group plans, compared with enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problem_from, problems

from cluster_specs.schema import ClusterSpec
from cost_model.base import TensorGroup, Work
from cost_model.pipeline import CHUNKS, PhaseTimes, colocated_pace, decode_pace, micro_batch, prefill_pace
from hexgen2.goal import Goal
from hexgen2.search.planning.layers import balance_layers, fastest_layers
from hexgen2.search.planning.plan import Planner
from hexgen2.search.planning.shapes import partitions
from hexgen2.search.planning.waiting_prompts import PREFILL_AHEAD
from hexgen2.search.problem import Problem, counts_of, make_problem


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
    """Requests/s of a colocated replica with chunks of so many tokens, by enumeration of what the steps in
    its stages may hold: a Markov chain, of which each step follows the one ahead of it."""
    chunk, stages, osl = tokens / costs.isl, len(split), costs.osl
    decodes = min(batch / stages, osl * chunk)
    begin = decodes / osl
    if chunk <= 1:
        busy = min(1.0, begin / chunk)
        sizes = {busy * chunk + (1 - busy) / math.ceil(round(1 / chunk, 9)): 1.0}
    else:
        mean = min(chunk, begin / (1 - math.exp(-begin)))
        single = (chunk - mean) / (chunk - 1)
        sizes = {1.0: single, chunk: 1 - single}
    prompts = sum(n * share for n, share in sizes.items())
    mixed_share = min(1.0, begin / prompts)

    # Where prompts fill every step, each brings the first token of its answer.
    beside = max(decodes - chunk, 0.0) if begin >= chunk * (1 - 1e-9) else decodes

    def step_s(parts: dict[float, float]) -> tuple[np.ndarray, np.ndarray]:
        stage_s, hop_s = np.zeros(stages), np.zeros(stages - 1)
        for n, share in parts.items():
            running = beside if n else decodes
            work = Work(*map(sum, zip(costs.work("decode", running), costs.work("prefill", n), strict=True)))
            stage_s += [
                share
                * (k * costs.layer_work_s(g, work) + costs.edge_work_s(g, work.sampled, j == stages - 1))
                for j, (g, k) in enumerate(zip(groups, split, strict=True))
            ]
            hop_s += [share * costs.hop_work_s(hop, work.tokens) for hop in hops]
        return stage_s, hop_s

    mixed, plain = step_s(sizes), step_s({0.0: 1.0})
    follows = {False: 1 - math.exp(-begin)}
    follows[True] = 1 - follows[False] * (1 - mixed_share) / mixed_share
    slowest = 0.0
    for held in itertools.product((True, False), repeat=stages):
        chance = mixed_share if held[0] else 1 - mixed_share
        for ahead, own in itertools.pairwise(held):
            chance *= follows[ahead] if own else 1 - follows[ahead]
        slowest += chance * max((m if own else p) for own, m, p in zip(held, mixed[0], plain[0], strict=True))
    hop_s = mixed_share * mixed[1] + (1 - mixed_share) * plain[1]
    walk = mixed_share * mixed[0].sum() + (1 - mixed_share) * plain[0].sum() + hop_s.sum()
    return decodes / osl / max(slowest, walk / stages, *hop_s, 0.0)


def beside_prompts(problem: Problem, batch: int, room: int, rate_of, lead_s: float) -> float:
    """Requests/s of a decode replica that runs up to `batch` requests, where the `room` in its memory is also
    for the prompts that are being computed for it, for lead_s seconds each."""
    held_s = lead_s * (problem.costs.isl + problem.costs.osl / 2)
    held_s /= problem.costs.isl + problem.costs.osl
    if batch + rate_of(batch) * held_s <= room:
        return rate_of(batch)
    low, high = 1.0, float(batch)
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if middle + rate_of(middle) * held_s <= room else (low, middle)
    return rate_of(low)


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

        def rate_of(running):
            own = times(phase, micro_batch(problem.pipeline, running, len(shape)))
            return decode_pace(problem.pipeline, *own, running, costs.osl).capacity_req_s

        if problem.pipeline != "pipelined":
            return rate_of(batch)
        room = min(
            costs.stage_memory(phase, group, j == 0, j == last).max_batch(layers)
            for j, (group, layers) in enumerate(zip(groups, split, strict=True))
        )
        lead_s = sum(map(sum, times("prefill", costs.prefill_batch()))) / PREFILL_AHEAD
        return beside_prompts(problem, batch, room, rate_of, lead_s)
    if problem.pipeline == "pipelined":
        hops = [problem.node_links[a][b] for (a, *_), (b, *_) in itertools.pairwise(shape)]
        return max(mixed_capacity(costs, groups, split, hops, batch, n) for n in CHUNKS)
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
    # Requests/s of a decode replica are taken as linear between two batches.
    rel = 0.003 if role == "decode" else 1e-6
    assert capacity(problem, role, shape, split, plan.batch) == pytest.approx(plan.capacity_req_s, rel=rel)


# In the usual run, each role once with each reading of pipelines and once with each set of GPUs.
@pytest.mark.parametrize(
    ("role", "pipeline", "counts"),
    [
        pytest.param(role, pipeline, counts, marks=[pytest.mark.slow] * ((i + j + k) % 3 != 0))
        for i, role in enumerate(["prefill", "decode", "colocated"])
        for j, pipeline in enumerate(["pipelined", "literal", "paper_optimistic"])
        for k, counts in enumerate([("H100:1", "A100-80GB:1"), ("H100:2", "L40:1"), ("A100-80GB:3",)])
    ],
)
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


def test_other_targets_plan_the_same_kinds_of_nodes_elsewhere():
    """The pipelines that one goal found on some nodes serve another goal on others that are like them."""
    cluster = ClusterSpec.model_validate(
        {"name": "alike", "nodes": [{"name": name, "accelerators": "A100-80GB:2"} for name in "abcd"]}
    )

    def planner(tpot_ms, alike=None):
        goal = Goal(objective="goodput", ttft_ms=4000.0, tpot_ms=tpot_ms)
        return Planner(make_problem(cluster, "llama-2-70b", "HPLD", goal=goal), alike)

    first = planner(100.0)
    one, two, other = (planner(tpot_ms, first) for tpot_ms in (100.0, 150.0, 200.0))
    for each, nodes in ((one, (0, 1)), (two, (2, 3)), (two, (0, 2)), (other, (1, 3)), (other, (0, 1))):
        plan = each.plan("prefill", counts_of(dict.fromkeys(nodes, 2)))
        assert plan is not None and {stage.node for stage in plan.stages} == set(nodes)
